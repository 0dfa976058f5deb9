"""Text as packed documents: split by document, tokenized once, cut into windows in which positions
start again."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import PadCollator, Text, character_tokenizer, real_tokens, split_of
from undertow.lab.tasks import tokens as tokens_module
from undertow.lab.tasks.encode import IGNORED

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .")
EOS = TOKENIZER.eos_token_id
SPLITS: Any = ("train", "valid", "test")
TEXTS = [f"document {i} says {'yes ' * (i % 5)}no." for i in range(120)]


def jsonl(path: Path, texts: list[Any], column: str = "text") -> str:
    path.write_text("".join(json.dumps({column: text, "id": 1}) + "\n" for text in texts))
    return str(path)


def windows(task: Text, split: Any = "train") -> list[dict[str, list[int]]]:
    return [task.encode(split, index, TOKENIZER) for index in range(task.size(split, TOKENIZER))]


def texts_of(task: Text, split: Any) -> list[str]:
    ids = [token for item in windows(task, split) for token in item["input_ids"]]
    return TOKENIZER.decode(ids).split("<eos>")[:-1]


@pytest.fixture
def task(tmp_path: Path) -> Text:
    return Text((jsonl(tmp_path / "a.jsonl", TEXTS),), context=32)


def test_every_document_is_in_its_own_split_once_and_ends(task: Text) -> None:
    for split in SPLITS:
        assert texts_of(task, split) == [text for text in TEXTS if split_of(text) == split]
    assert task.has_documents(TOKENIZER)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), context=st.integers(2, 50))
@settings(max_examples=40, deadline=None)
def test_positions_start_again_with_each_document(
    tmp_path_factory: Any, lengths: list[int], context: int
) -> None:
    texts = [
        letter * length
        for letter, length in zip("abcdefghijklmnopqrstuvwxyz0123", lengths, strict=False)
    ]
    path = jsonl(tmp_path_factory.mktemp("text") / "a.jsonl", texts)
    task = Text((path,), context)
    kept = [text for text in texts if split_of(text) == "train"]
    if not kept:
        return
    row = [
        (n, o, t)
        for n, text in enumerate(kept)
        for o, t in enumerate([*TOKENIZER(text)["input_ids"], EOS])
    ]
    for index, item in enumerate(windows(task)):
        own = row[index * context : (index + 1) * context]
        assert item["input_ids"] == [token for *_, token in own]
        before = [None, *own[:-1]]
        same = [
            b is not None and b[0] == document
            for b, (document, *_) in zip(before, own, strict=True)
        ]
        labels = [
            token if known else IGNORED
            for known, token in zip(same[1:], item["input_ids"][1:], strict=True)
        ]
        assert item["labels"][1:] == labels
        expected: list[int] = []
        for known in same:
            expected.append(expected[-1] + 1 if known else 0)
        assert item.get("position_ids", list(range(len(own)))) == expected
        assert ("position_ids" in item) == (expected != list(range(len(own))))


def test_a_batch_of_packed_rows_has_positions_and_no_mask(task: Text) -> None:
    items = [windows(task)[0], {"input_ids": [4, 5], "labels": [4, 5]}]
    batch = PadCollator(TOKENIZER)(items)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"][0].tolist() == items[0]["position_ids"]
    assert batch["position_ids"][1].tolist() == [0, 1, *([0] * 30)]
    assert (
        real_tokens(batch)[1].tolist() == [True, True, *([False] * 30)]
        and real_tokens(batch)[0].all()
    )
    assert set(PadCollator(TOKENIZER)(items[1:])) == {"input_ids", "labels", "attention_mask"}


def test_files_of_both_kinds_and_plain_text_do_not_see_each_other(
    tmp_path: Path, task: Text
) -> None:
    (tmp_path / "b.txt").write_text("plain text.\n".replace("\n", " ") * 20)
    both = Text((*task.files, str(tmp_path / "b.txt")), context=5000)
    (item,) = windows(both)
    begin = item["input_ids"].index(
        TOKENIZER("pl")["input_ids"][0], len("".join(texts_of(task, "train")))
    )
    assert item["position_ids"][begin] == 0 and item["labels"][begin] == IGNORED
    assert item["position_ids"][-1] == len(item["input_ids"]) - begin - 1


def test_tokens_are_made_once(tmp_path: Path, task: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Text(task.files, 32, cache=str(tmp_path / "tokens"))
    expected = [windows(task, split) for split in SPLITS]
    assert [windows(kept, split) for split in SPLITS] == expected
    (folder,) = (tmp_path / "tokens").iterdir()
    about = json.loads((folder / "about.json").read_text())
    assert sum(about["tokens"].values()) == sum(len(text) + 1 for text in TEXTS)

    def never(*_: Any) -> Any:
        raise AssertionError("it was tokenized again")

    tokens_module._on_disk.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "encoded", never)
        assert [windows(kept, split) for split in SPLITS] == expected
        other = Text(kept.files, 7, cache=kept.cache)
        assert Counter(t for i in windows(other) for t in i["input_ids"]) == Counter(
            t for i in expected[0] for t in i["input_ids"]
        )
        moved = shutil.copy(kept.files[0], tmp_path / "elsewhere.jsonl")
        assert windows(Text((moved,), 32, cache=kept.cache)) == expected[0], "the text is the key"
    jsonl(Path(kept.files[0]), TEXTS[:60])  # a changed text is another one
    assert len(windows(kept)) < len(expected[0])
    assert len(list((tmp_path / "tokens").iterdir())) == 2
    assert len(windows(Text(kept.files, 32, cache=kept.cache))) == len(
        windows(Text(kept.files, 32))
    )


def test_an_interrupted_tokenization_leaves_nothing(
    tmp_path: Path, task: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Text(task.files, 32, cache=str(tmp_path / "tokens"))

    def stopped(*_: Any) -> Any:
        yield "train", [5, 6]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "encoded", stopped)
        with pytest.raises(KeyboardInterrupt):
            kept.size("train", TOKENIZER)
    assert list((tmp_path / "tokens").iterdir()) == []
    assert windows(kept) == windows(task)


def test_a_look_at_the_first_items_reads_no_further(tmp_path: Path, task: Text) -> None:
    rest = jsonl(tmp_path / "bad.jsonl", [None])
    items, size = Text((*task.files, rest), 32).first("train", TOKENIZER, 3)
    assert items == windows(task)[:3] and size is None
    assert len(Text(task.files, 10**6).first("train", TOKENIZER, 4)[0]) == 1


def test_documents_without_text_are_counted(tmp_path: Path, task: Text) -> None:
    task = Text((jsonl(tmp_path / "b.jsonl", [*TEXTS[:50], "", " \n ", *TEXTS[50:]]),), context=32)
    counted = [task.left_out(split, TOKENIZER) for split in SPLITS]
    assert sum(sum(each.values()) for each in counted) == 2
    assert texts_of(task, "train") == [text for text in TEXTS if split_of(text) == "train"]


# A data set that `datasets` loads


def test_a_data_set_in_a_folder(
    tmp_path: Path, task: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder / "train.jsonl", TEXTS, "content")
    found = Text(hub=str(folder), column="content", context=32, cache=str(tmp_path / "tokens"))
    assert [windows(found, split) for split in SPLITS] == [windows(task, split) for split in SPLITS]
    assert found.first("train", TOKENIZER, 2)[0] == windows(task)[:2]
    jsonl(folder / "validation.jsonl", ["held out."], "content")
    jsonl(folder / "test.jsonl", ["a test."], "content")
    own = Text(hub=str(folder), column="content", context=32)
    assert [texts_of(own, split) for split in SPLITS] == [TEXTS, ["held out."], ["a test."]]
    with pytest.raises(
        DataError, match=r"set, train row 0: expected an object with a text as 'text'"
    ):
        Text(hub=str(folder), context=32).size("train", TOKENIZER)
    with pytest.raises(DataError, match=r"the data set .*absent cannot be loaded"):
        Text(hub=str(folder / "absent")).size("train", TOKENIZER)


# Mistakes


def test_malformed_rows_are_named(tmp_path: Path) -> None:
    for row, message in (
        ('{"id": 2}', "line 2: expected an object with a text as 'text'"),
        ('{"text": 5}', "line 2: expected an object with a text as 'text'"),
        ("{", "line 2: expected JSON, found '{'"),
    ):
        path = tmp_path / "bad.jsonl"
        path.write_text(f'{{"text": "good"}}\n{row}\n')
        with pytest.raises(DataError, match=rf"bad\.jsonl, {message}"):
            Text((str(path),)).size("train", TOKENIZER)
    with pytest.raises(ConfigError, match="files and hub are both set"):
        Text(("a.txt",), hub="b")


def test_documents_need_an_end(task: Text) -> None:
    endless: Any = character_tokenizer("abc")
    endless.eos_token = None
    with pytest.raises(ConfigError, match="no EOS token"):
        task.size("train", endless)
