"""Chains of thought between two trainings: written once for each problem, whole or not at all, and
read by the second."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from undertow.cli.main import main
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.lab.evaluation import chains
from undertow.lab.evaluation.chains import write_chains
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.tasks import GSM8K, Example, character_tokenizer
from undertow.lab.training import train
from undertow.lab.training.from_scratch import from_scratch

COUNTS = {"train": 10, "valid": 3, "test": 5}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of stage one on a handful of problems, with a model that has learnt nothing yet."""
    folder = tmp_path_factory.mktemp("stage-one")
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    torch.manual_seed(1)
    from_scratch(ModelSection(width=16, heads=2, positions=256), tokenizer).save_pretrained(
        folder / "base"
    )
    tokenizer.save_pretrained(folder / "base")
    for split, count in COUNTS.items():
        rows = [
            {"question": f"{split} {i}?", "steps": [f"<<{i}+1={i + 1}>>"], "answer": str(i + 1)}
            for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {split: str(folder / f"{split}.jsonl") for split in COUNTS}
    task = {"kind": "gsm8k", "chain_of_thought": True, **files}
    recipe = tiny.recipe(
        folder,
        task=task,
        model={"path": str(folder / "base")},
        training={"steps": 1, "save_every": None, "evaluate_examples": 2},
        evaluation={"lengths": [], "examples": 2},
    )
    return train(recipe, 0).parent


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for generation: right chains, wrong ones and unfinished ones in turn. Lists the
    sizes of its batches."""
    asked: list[int] = []

    def generate(
        model: Any, tokenizer: Any, examples: Sequence[Example], *settings: Any
    ) -> list[str]:
        asked.append(len(examples))
        texts = []
        for example in examples:
            number = int(example.prompt.split("?")[0].split()[-1])
            texts.append([example.completion, " <<1+1=3>>\n#### 99", " and so on"][number % 3])
        return texts

    monkeypatch.setattr(chains, "generate", generate)
    return asked


def test_every_problem_gets_a_chain(run: Path, writing: list[int], tmp_path: Path) -> None:
    text = write_chains(run, tmp_path, batch=4)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{split}.jsonl" for split in COUNTS),
        "chains.json",
        "summary.json",
    }
    for split, count in COUNTS.items():
        rows = rows_of(tmp_path / f"{split}.jsonl")
        assert [row["question"] for row in rows] == [f"{split} {i}?" for i in range(count)]
        for i, row in enumerate(rows):
            assert row["answer"] == str(i + 1) and row["steps"] == [f"<<{i}+1={i + 1}>>"]
            assert row["chain"] == [f"<<{i}+1={i + 1}>>", "<<1+1=3>>", "and so on"][i % 3]
            assert (row["finished"], row["right"]) == (i % 3 != 2, i % 3 == 0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["train"] == {"chains": 10, "unfinished": 3, "right": 4}
    assert "| train |     10 |                 3 |                  4 | 40.0% |" in text
    assert sorted(writing) == sorted([4, 4, 2, 3, 4, 1])


def test_the_second_stage_reads_what_was_written(
    run: Path, writing: list[int], tmp_path: Path
) -> None:
    write_chains(run, tmp_path)
    task = GSM8K(**{split: str(tmp_path / f"{split}.jsonl") for split in COUNTS}, given_chain=True)
    assert [task.size(split) for split in ("train", "valid", "test")] == list(COUNTS.values())
    prompt = "Question: Answer the math question.\nInput: test 1?\nReasoning: <<1+1=3>>\nAnswer:"
    example = task.example("test", 1)
    assert example == Example(prompt, " 2", 1), "the right answer, whatever the chain says"
    assert task.score(example, " 2") and not task.score(example, " 3")
    plain = GSM8K(test=str(tmp_path / "test.jsonl"))
    assert "Reasoning" not in plain.example("test", 1).prompt, "the same file, without the chains"


def test_an_interrupted_call_goes_on(
    run: Path, writing: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chains(run, tmp_path / "whole", batch=4)
    stand_in = chains.generate

    def stops(model: Any, tokenizer: Any, examples: Sequence[Example], *settings: Any) -> list[str]:
        if "train 8?" in examples[0].prompt:
            raise KeyboardInterrupt
        return stand_in(model, tokenizer, examples, *settings)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(chains, "generate", stops)
        write_chains(run, tmp_path / "cut", batch=4)
    part = tmp_path / "cut" / ".train.jsonl.part"
    assert not (tmp_path / "cut" / "train.jsonl").exists()
    assert len(part.read_text().splitlines()) == 8
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:7]) + lines[7][:10])  # killed in the middle of a line
    writing.clear()
    write_chains(run, tmp_path / "cut", batch=4)
    assert sorted(writing) == sorted([4, 2, 3, 4, 1]), (
        "the first batch was there, the second was not whole"
    )
    for split in COUNTS:
        name = f"{split}.jsonl"
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()
    writing.clear()
    write_chains(run, tmp_path / "cut", batch=4)
    assert not writing, "what is written is not written again"


def test_a_real_model_writes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "chains",
        str(run),
        str(tmp_path / "a"),
        "--max-new-tokens=6",
        "--temperature=1",
        "--batch=4",
    ]
    assert main(command) == 0
    assert "without an answer" in capsys.readouterr().out
    command[2] = str(tmp_path / "b")
    assert main(command) == 0
    for split, count in COUNTS.items():
        rows = rows_of(tmp_path / "a" / f"{split}.jsonl")
        assert len(rows) == count and all(len(row["chain"]) <= 6 for row in rows)
        assert len({row["chain"] for row in rows}) > 1
        assert rows == rows_of(tmp_path / "b" / f"{split}.jsonl"), "the seed decides the draws"


def test_a_split_without_a_file_is_told(run: Path, writing: list[int], tmp_path: Path) -> None:
    recipe = run / "seed-0" / "recipe.yaml"
    text = recipe.read_text()
    try:
        recipe.write_text(text.replace(f"test: {run.parent / 'test.jsonl'}", "test: null"))
        assert "The task has no test file, so there are no chains for it." in write_chains(
            run, tmp_path
        )
    finally:
        recipe.write_text(text)
    assert not (tmp_path / "test.jsonl").exists()


def test_mistakes(run: Path, writing: list[int], tmp_path: Path) -> None:
    write_chains(run, tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"holds chains whose temperature is 0\.0 and not 0\.5; choose another",
    ):
        write_chains(run, tmp_path, temperature=0.5)
    about = (tmp_path / "chains.json").read_text()
    (tmp_path / "chains.json").write_text(about[:-4])
    with pytest.raises(CheckpointError, match=r"chains\.json, line 5: expected JSON.*; remove it"):
        write_chains(run, tmp_path)
    (tmp_path / "chains.json").write_text(about)
    whole = (tmp_path / "valid.jsonl").read_text()
    (tmp_path / "valid.jsonl").write_text("{}\n")
    with pytest.raises(
        CheckpointError, match=r"valid\.jsonl, line 1 is no chain that undertow chains wrote"
    ):
        write_chains(run, tmp_path)
    (tmp_path / "valid.jsonl").write_text(whole.splitlines(True)[0])
    with pytest.raises(
        CheckpointError, match=r"valid\.jsonl has 1 chains for 3 problems; remove it"
    ):
        write_chains(run, tmp_path)
    with pytest.raises(ConfigError, match="temperature is -1"):
        write_chains(run, tmp_path, temperature=-1)
    with pytest.raises(ConfigError, match="max-new-tokens is 0 and batch is 64; use 1 or more"):
        write_chains(run, tmp_path, max_new_tokens=0)
    other = train(tiny.recipe(tmp_path, training={"steps": 1, "save_every": None}), 0)
    with pytest.raises(
        ConfigError,
        match=r"was not trained to write chains of thought; train gsm8k with task\.chain",
    ):
        write_chains(other, tmp_path / "none")


def test_a_row_without_a_chain_is_named(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "q?", "answer": "#### 3"}))
    with pytest.raises(
        DataError, match="gsm8k test example 0 has no 'chain', which given_chain asks for"
    ):
        GSM8K(test=str(path), given_chain=True).example("test", 0)
    path.write_text(json.dumps({"question": "q?", "answer": "#### 3", "chain": 5}))
    with pytest.raises(
        DataError, match=r"test\.jsonl, line 1: expected a text as 'chain', found '5'"
    ):
        GSM8K(test=str(path)).size("test")
    with pytest.raises(ConfigError, match="given_chain and chain_of_thought are both set"):
        GSM8K(given_chain=True, chain_of_thought=True)
