"""Shards hold the tokens of the text, whatever made them, and nothing that is damaged is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undertow.errors import ConfigError, DataError
from undertow.lab.runs.recipe import TrainingSection
from undertow.lab.tasks import Shards, Text, character_tokenizer, shard_files, tokenizing
from undertow.lab.tasks.documents import Sources, stamped
from undertow.lab.tasks.shard_files import SPLITS, read_index, row_of, write_index, write_part
from undertow.lab.tasks.shards import words_of
from undertow.lab.tasks.tokenizing import tokenize
from undertow.lab.training.data import training_set
from undertow.lab.training.order import Shuffled

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .\n")
TEXTS = [f"document {i} says {'yes ' * (i % 5)}no." for i in range(150)]


def jsonl(path: Path, texts: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def sources(*paths: Path) -> Sources:
    return Sources(tuple(stamped(path) for path in paths), None, "text")


def windows(task: Any, split: Any = "train") -> list[dict[str, list[int]]]:
    return [task.encode(split, index, TOKENIZER) for index in range(task.size(split, TOKENIZER))]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*-*") if p.is_file()}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "a.jsonl", TEXTS)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Shards of random tokens, made without `datasets`."""
    folder, draw = tmp_path / "made", np.random.default_rng(0)
    folder.mkdir()
    parts: Any = {split: [] for split in SPLITS}
    for split in SPLITS:
        for number, count in enumerate((5, 0, 3)):
            documents = [(9, draw.integers(3, 40, 20_000)) for _ in range(count)]
            parts[split].append(
                write_part(folder, f"{split}-{number:05}", documents, "uint16", number)
            )
    write_index(folder, {"id_type": "uint16", "words": words_of(TOKENIZER)}, parts)
    return folder


def test_windows_cross_shards_and_know_where_documents_begin(made: Path) -> None:
    index = read_index(made)
    row = row_of(made, "uint16", index["parts"]["train"])
    names = [f"train-{number:05}.ids" for number in range(3)]
    whole = np.concatenate([np.fromfile(made / name, dtype=np.uint16) for name in names])
    assert row.total == len(whole) == 160_000 and row.documents == 8 and row.empty == 3
    for start, stop in ((0, 5), (99_990, 100_010), (19_999, 60_001), (159_990, 170_000)):
        ids, borders = row.stretch(start, stop)
        assert ids == whole[start:stop].tolist()
        assert borders == [at - start for at in range(20_000, 160_000, 20_000) if start < at < stop]
    task = Shards(str(made), context=1000)
    assert task.encode("train", 19, TOKENIZER)["input_ids"] == whole[19_000:20_000].tolist()
    assert task.size("train", TOKENIZER) == 160 and task.left_out("train", TOKENIZER)


def section_of(**settings: Any) -> TrainingSection:
    return TrainingSection(**settings)


def test_the_order_is_computed(made: Path) -> None:
    task = Shards(str(made), context=1000)
    section = section_of(steps=90, batch=4)
    dataset, skipped = training_set(task, TOKENIZER, section, seed=3)
    assert dataset.indices == Shuffled(160, 360, 3) and not skipped
    assert sorted(dataset.indices[:160]) == list(range(160))
    assert dataset[7] == task.encode("train", dataset.indices[7], TOKENIZER)
    with pytest.raises(ConfigError, match="max_tokens leaves nothing out of shards"):
        training_set(task, TOKENIZER, section_of(steps=9, max_tokens=10), seed=3)


@pytest.mark.parametrize("ending", ["ids", "starts", "sums"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_shard_is_named(made: Path, ending: str, damage: str) -> None:
    path = made / f"train-00002.{ending}"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else content)
    shard_files.opened.cache_clear()
    task = Shards(str(made), context=1000)
    with pytest.raises(DataError, match=r"the shard .*train-00002\.\w+ is damaged: .*anew"):
        task.encode("train", 159, TOKENIZER)
    if damage == "changed":  # what is whole can be read
        assert len(task.encode("train", 0, TOKENIZER)["input_ids"]) == 1000
    else:  # told before a training
        with pytest.raises(DataError, match="is damaged"):
            task.check("test")


def test_what_makes_no_sense_is_told(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="made with another tokenizer"):
        Shards(str(made)).size("train", character_tokenizer("ab"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs the field 'folder'"):
        Shards().check("train")
    with pytest.raises(DataError, match="holds no complete shards"):
        Shards(str(tmp_path)).check("train")
    for damage in ("{", "[]", '{"id_type": "uint16", "words": "", "parts": {"train": [[1]]}}'):
        (made / "shards.json").write_text(damage)
        with pytest.raises(DataError, match=r"shards\.json is damaged"):
            read_index(made)


# What datasets reads


def test_shards_hold_what_the_text_task_holds(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    more = jsonl(tmp_path / "b.jsonl", ["", *TEXTS[:20]])
    index = tokenize(sources(text, more), TOKENIZER, tmp_path / "out", shard=700)
    assert len(index["parts"]["train"]) > 4
    mine, plain = Shards(str(tmp_path / "out"), 32), Text((str(text), str(more)), 32)
    for split in SPLITS:
        assert windows(mine, split) == windows(plain, split)
    assert sum(of["empty"] for of in index["totals"].values()) == 1
    assert sum(of["documents"] for of in index["totals"].values()) == 170
    before = contents(tmp_path / "out")
    again = tokenize(sources(text, more), TOKENIZER, tmp_path / "out", shard=700)
    assert json.dumps(again) == json.dumps(index) and contents(tmp_path / "out") == before
    with pytest.raises(ConfigError, match="holds shards of other text"):
        tokenize(sources(text), TOKENIZER, tmp_path / "out", shard=700)


def test_it_goes_on_where_it_was_stopped(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    parquet, plain = tmp_path / "c.parquet", tmp_path / "d.txt"
    datasets.Dataset.from_dict({"text": TEXTS[:60]}).to_parquet(str(parquet))
    plain.write_text("\n\n".join(TEXTS[60:110]))
    given = sources(text, parquet, plain)
    expected = tokenize(given, TOKENIZER, tmp_path / "whole", shard=900)
    total = sum(of["documents"] for of in expected["totals"].values())
    assert total == 150 + 60 + 50
    write = tokenizing._write
    left = [2]

    def stopped(*arguments: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(*arguments)

    for _ in range(3):
        left[0] = 2
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(tokenizing, "_write", stopped)
            tokenize(given, TOKENIZER, tmp_path / "out", shard=900)
        with pytest.raises(DataError, match="no complete shards"):
            read_index(tmp_path / "out")
    assert {"shard-00005.json"} <= set(contents(tmp_path / "out"))
    damaged = next((tmp_path / "out").glob("*-00003.ids"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    tokenize(given, TOKENIZER, tmp_path / "out", processes=2, shard=900)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    damaged.unlink()  # after its end, too
    tokenize(given, TOKENIZER, tmp_path / "out", shard=900)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_malformed_sources_are_named(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{\n')
    with pytest.raises(DataError, match=r"bad\.jsonl cannot be read"):
        tokenize(sources(bad), TOKENIZER, tmp_path / "one")
    bad.write_text('{"text": "good"}\n{"other": 1}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl, row 1: expected an object with a text"):
        tokenize(sources(bad), TOKENIZER, tmp_path / "two")
    csv = tmp_path / "bad.csv"
    csv.write_text("text\n")
    with pytest.raises(ConfigError, match=r"bad\.csv is no file that can be tokenized"):
        tokenize(sources(csv), TOKENIZER, tmp_path / "three")


def test_without_datasets_it_says_what_to_install(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r'install it with: pip install "undertow\[data\]"'):
        tokenize(sources(text), TOKENIZER, tmp_path / "out")
