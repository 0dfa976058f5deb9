"""The how-to page's commands run as they stand, on little text and with few steps; what it names is
there."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from undertow.cli.main import main
from undertow.lab.tasks import TASKS, character_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to-pretrain.md").read_text(encoding="utf-8")


def test_the_commands_on_text_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "first.txt").write_text(
        "".join(f"line {number} of some text\n" for number in range(900))
    )
    rows = [
        {"text": f"document {number} with its own words, and some more of them"}
        for number in range(200)
    ]
    (tmp_path / "second.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "recipes", tmp_path / "recipes")
    commands = re.findall(
        r"^    undertow (.*)$", PAGE.partition("## On text larger")[0], flags=re.MULTILINE
    )
    small = [
        "--training.steps=2",
        "--training.batch=2",
        "--training.evaluate_examples=2",
        "--evaluation.examples=2",
    ]
    small += ["--seeds=[0]", "--training.save_every=null"]
    for command in commands:
        words = command.split()
        assert main([*words, *(small if words[0] == "train" else ())]) == 0, command
    assert [command.split()[0] for command in commands] == ["train", "train", "eval", "inspect"]
    assert "parameters" in capsys.readouterr().out and any((tmp_path / "tokens").iterdir())


def test_the_commands_on_shards_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [f"document {number} with its own words, and some more of them" for number in range(200)]
    (tmp_path / "first.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in rows))
    datasets.Dataset.from_dict({"text": rows}).to_parquet(str(tmp_path / "second.parquet"))
    character_tokenizer("".join(rows)).save_pretrained(tmp_path / "my-tokenizer")
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "recipes", tmp_path / "recipes")
    part = PAGE.partition("## On text larger")[2].partition("\n## ")[0]
    make, train = re.findall(r"^    undertow (.*)$", part, flags=re.MULTILINE)
    assert main([word.replace("=2", "=1") for word in make.split()]) == 0  # no time for two
    assert "documents" in capsys.readouterr().out
    few = ["--training.steps=3", "--training.batch=2", "--training.save_every=null"]
    assert main([*train.split(), *few, "--evaluation.examples=2", "--seeds=[0]"]) == 0
    assert (tmp_path / "runs" / "shards-t2mlr" / "seed-0" / "model").is_dir()
    ids = tmp_path / "shards" / "train-00000.ids"
    ids.write_bytes(ids.read_bytes()[:-2])
    capsys.readouterr()
    assert main([*train.split(), *few, "--name=other"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "train-00000.ids is damaged: it has" in said
    assert main(make.split()) == 0 and main([*train.split(), "--dry-run"]) == 0


def test_the_tasks_and_options_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    table = PAGE.partition("| kind |")[2].partition("What is compared")[0]
    kinds = {
        kind
        for line in table.splitlines()
        for kind in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    assert kinds and kinds <= set(TASKS)
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    told = capsys.readouterr().out
    for option in re.findall(
        r"(--[a-z-]+)", " ".join(re.findall(r"^    undertow eval (.*)$", PAGE, flags=re.MULTILINE))
    ):
        assert option in told
