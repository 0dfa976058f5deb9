"""Text: split at line breaks, cut into windows that cover it once, in characters or a tokenizer's
own tokens."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import PadCollator, TaskDataset, Text, character_tokenizer
from undertow.lab.tasks import tokens as tokens_module
from undertow.lab.tasks.documents import streamed

SHAKESPEARE = Path(__file__).resolve().parents[3] / ".." / "shared" / "data" / "tinyshakespeare.txt"
SPLITS: Any = ("train", "valid", "test")
LINES = "".join(f"line {number} of a hundred\n" for number in range(100))


def write(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    return str(path)


def decoded(task: Text, split: Any, tokenizer: Any) -> str:
    windows = [
        task.encode(split, index, tokenizer)["input_ids"]
        for index in range(task.size(split, tokenizer))
    ]
    return "".join(tokenizer.decode(window) for window in windows)


@pytest.fixture
def task(tmp_path: Path) -> Text:
    return Text((write(tmp_path / "lines.txt", LINES),), context=16)


@pytest.fixture
def characters(task: Text) -> Any:
    return character_tokenizer(task.characters())


def test_splits_are_stretches_of_whole_lines(task: Text, characters: Any) -> None:
    parts = [decoded(task, split, characters) for split in SPLITS]
    assert "".join(parts) == LINES
    assert all(part.endswith("\n") for part in parts)
    shares = [len(part) / len(LINES) for part in parts]
    assert shares == pytest.approx([0.90, 0.05, 0.05], abs=0.02)
    assert shares[0] <= 0.90


@pytest.mark.parametrize("context", [2, 16, 127, 5000])
def test_windows_cover_the_text_once_and_labels_are_the_window(
    tmp_path: Path, context: int
) -> None:
    task = Text((write(tmp_path / "lines.txt", LINES),), context)
    tokenizer = character_tokenizer(task.characters())
    dataset = TaskDataset(task, "train", tokenizer)
    assert len(dataset) == task.size("train", tokenizer)
    items = list(map(dataset.__getitem__, range(len(dataset))))
    assert all(item["labels"] == item["input_ids"] for item in items)
    assert [len(item["input_ids"]) for item in items[:-1]] == [context] * (len(items) - 1)
    assert 1 < len(items[-1]["input_ids"]) <= context
    read = "".join(tokenizer.decode(item["input_ids"]) for item in items)
    assert LINES.startswith(read) and len(read) >= 0.88 * len(LINES)
    assert dataset.lengths() == [context] * len(items)


def test_a_last_token_alone_is_left_out(tmp_path: Path) -> None:
    task = Text(
        (write(tmp_path / "a.txt", "abcdefghi" * 2 + "xy"),), context=17
    )  # 18 characters are train
    tokenizer = character_tokenizer(task.characters())
    assert task.size("train", tokenizer) == 1
    assert decoded(task, "train", tokenizer) == "abcdefghiabcdefgh"
    assert Text(task.files, 16).size("train", tokenizer) == 2


def test_text_of_one_line_is_cut_inside_it(tmp_path: Path) -> None:
    task = Text((write(tmp_path / "a.txt", "0123456789" * 10),), context=5)
    tokenizer = character_tokenizer(task.characters())
    assert [len(decoded(task, split, tokenizer)) for split in SPLITS] == [90, 5, 5]


def test_few_long_lines_leave_no_split_empty(tmp_path: Path) -> None:
    line = "0123456789" * 10 + "\n"
    task = Text((write(tmp_path / "a.txt", line * 3),), context=9)
    tokenizer = character_tokenizer(task.characters())
    parts = [decoded(task, split, tokenizer) for split in SPLITS]
    assert "".join(parts) == line * 3 and parts[0] == line * 2
    assert all(parts)


def test_every_file_gives_to_every_split(tmp_path: Path) -> None:
    files = tuple(write(tmp_path / f"{letter}.txt", f"{letter * 19}\n" * 50) for letter in "ab")
    task = Text(files, context=10)
    assert task.characters() == "\nab"
    tokenizer = character_tokenizer(task.characters())
    for split in SPLITS:
        text = decoded(task, split, tokenizer)
        assert text == "".join(f"{letter * 19}\n" * (len(text) // 40) for letter in "ab")


@given(
    text=st.text(st.sampled_from("ab \n\u00e9"), min_size=60, max_size=400),
    piece=st.integers(1, 40),
)
@settings(max_examples=30, deadline=None)
def test_pieces_are_joined_again(text: str, piece: int) -> None:
    before, tokens_module.PIECE = tokens_module.PIECE, piece
    try:
        pieces = list(tokens_module._pieces(text))
    finally:
        tokens_module.PIECE = before
    assert "".join(pieces) == text
    assert all(each.endswith("\n") and len(each) > piece for each in pieces[:-1])


def test_a_pretrained_tokenizer_makes_windows_of_its_own_tokens(task: Text) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator([LINES], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    assert "".join(decoded(task, split, tokenizer) for split in SPLITS) == LINES
    assert (
        task.size("train", tokenizer)
        < task.size("train", character_tokenizer(task.characters())) / 2
    )
    assert len(task.encode("train", 0, tokenizer)["input_ids"]) == 16


def test_the_collator_takes_windows(task: Text, characters: Any) -> None:
    last = task.size("test", characters) - 1
    batch = PadCollator(characters)([task.encode("test", index, characters) for index in (0, last)])
    assert batch["input_ids"].shape == (2, 16)
    assert (batch["labels"] == -100).sum() == (batch["attention_mask"] == 0).sum() > 0


def test_a_changed_file_is_read_again(task: Text, characters: Any) -> None:
    before = task.size("train", characters)
    path = Path(task.files[0])
    path.write_text(LINES * 2)
    os.utime(path, ns=(1, 1))
    assert task.size("train", characters) == pytest.approx(2 * before, abs=2)


# Mistakes


def test_files_that_are_missing_or_empty_are_named(tmp_path: Path) -> None:
    tokenizer: Any = character_tokenizer("ab")
    good, empty = write(tmp_path / "good.txt", "ab\n" * 50), write(tmp_path / "empty.txt", "")
    for files, error, expected in (
        ((), ConfigError, "needs the field 'files'; give it the paths"),
        (
            (good, str(tmp_path / "absent.txt")),
            DataError,
            r"absent\.txt cannot be read \(No such file",
        ),
        ((str(tmp_path),), DataError, r"cannot be read \(Is a directory\)"),
        ((good, empty), DataError, r"empty\.txt is empty; give a file with text"),
    ):
        with pytest.raises(error, match=expected):
            Text(files).characters()
        with pytest.raises(error, match=expected):
            Text(files).size("train", tokenizer)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"binary\.txt is UTF-16 text; save it as UTF-8"):
        Text((str(binary),)).characters()


def test_too_little_text_is_told(tmp_path: Path) -> None:
    task = Text((write(tmp_path / "short.txt", "abcdefghijk"),))
    tokenizer = character_tokenizer(task.characters())
    assert task.size("train", tokenizer) == 1
    with pytest.raises(
        DataError, match=r"The valid split of .*short\.txt holds 1 tokens, too few for a window"
    ):
        task.size("valid", tokenizer)


def test_what_makes_no_sense_is_refused(task: Text, characters: Any) -> None:
    with pytest.raises(ConfigError, match="context is 1; use 2 or more"):
        Text(context=1)
    with pytest.raises(ConfigError, match="The split is 'training'"):
        task.size("training", characters)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give size\\(\\) the tokenizer"):
        task.size("train")
    with pytest.raises(ConfigError, match="no prompts with answers"):
        task.example("train", 0)
    size = task.size("test", characters)
    for index in (-1, size):
        with pytest.raises(
            DataError, match=f"no text window {index}, as the test split holds {size}"
        ):
            task.encode("test", index, characters)
    with pytest.raises(DataError, match="does not know a part of"):
        task.size("train", character_tokenizer("ab"))


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the text is not here")
def test_tiny_shakespeare() -> None:
    task = Text((str(SHAKESPEARE),))
    characters = task.characters()
    assert len(characters) == 65
    tokenizer = character_tokenizer(characters)
    assert [task.size(split, tokenizer) for split in SPLITS] == [7843, 436, 436]
    text = SHAKESPEARE.read_text()
    held_out = "".join(decoded(task, split, tokenizer) for split in ("valid", "test"))
    assert text.endswith(f"\n{held_out}")
    assert len(held_out) / len(text) == pytest.approx(0.10, abs=0.001)


def test_a_stream_that_breaks_is_named() -> None:
    def rows() -> Any:
        yield {"text": "first"}
        raise ConnectionError("peer closed\nand more")

    coming = streamed(rows(), "some/set")
    assert next(coming) == {"text": "first"}
    with pytest.raises(
        DataError, match=r"the data set some/set stopped coming: peer closed; try again"
    ):
        next(coming)
