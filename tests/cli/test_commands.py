"""The commands, from a recipe to text: train, evaluate, generate, demo."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from undertow.cli.main import main
from undertow.lab.evaluation import demo as demo_module
from undertow.lab.runs.recipe import load_recipe
from undertow.lab.study import pool as study_module


def output_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_train_eval_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny.recipe_file(tmp_path, recurrence=tiny.TURBOCONN))
    run = tmp_path / "mine"
    overrides = ["--name=mine", "--training.steps=12", "--seeds=[0, 3]", "--recurrence.rank=4"]
    trained = output_of(["train", path, *overrides], capsys)
    lines = trained.splitlines()
    assert lines[:2] == [str(run / "seed-0"), str(run / "seed-3")]
    assert lines[2] == "mine (2 seeds together)"
    recipe = load_recipe(run / "seed-3" / "recipe.yaml", [])
    assert (recipe.training.steps, recipe.training.batch) == (12, 4)
    assert list(tiny.losses(run / "seed-3")) == list(range(1, 13))
    assert (run / "accuracy.png").is_file()

    # The same command again trains nothing and tells the same; so does evaluating.
    model = run / "seed-0" / "model" / "model.safetensors"
    before = model.stat().st_mtime_ns
    assert output_of(["train", path, *overrides], capsys) == trained
    assert model.stat().st_mtime_ns == before
    assert output_of(["eval", str(run)], capsys).splitlines() == lines[2:]

    # Evaluated otherwise, by either command.
    for arguments in (["eval", str(run)], ["train", path, *overrides]):
        text = output_of(
            [*arguments, "--evaluation.lengths=[7]", "--evaluation.examples=5"], capsys
        )
        assert re.search(r"\| 7 +\| +greedy \| +\d+ \| 10 \|", text)
        saved = json.loads((run / "seed-0" / "accuracy.json").read_text())
        assert [(each["length"], each["total"]) for each in saved] == [(7, 5)]

    greedy = [
        output_of(["generate", str(folder), "1011="], capsys)
        for folder in (run, run / "seed-0", model.parent)
    ]
    assert greedy[0] == greedy[1] == greedy[2]
    assert set(greedy[0].strip()) <= set("01=")
    options = ["--max-new-tokens=3", "--temperature=5"]
    samples = {output_of(["generate", str(run), "1011=", *options], capsys) for _ in range(8)}
    assert len(samples) > 1 and max(len(sample.strip()) for sample in samples) <= 3


def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny.recipe_file(tmp_path))
    with monkeypatch.context() as patch:
        tiny.interrupt(patch, 5)
        assert main(["train", path]) == 130
    message = capsys.readouterr().err
    kept = tmp_path / "tiny" / "seed-0" / "checkpoint-4"
    assert message.endswith(f"\nundertow: interrupted; the same command goes on from {kept}\n")
    assert "Traceback" not in message
    assert (tmp_path / "tiny" / "seed-0" / "checkpoint-4").is_dir()
    output_of(["train", path], capsys)
    assert list(tiny.losses(tmp_path / "tiny" / "seed-0")) == [1, 2, 3, 4, 5, 6]


def test_demo_writes_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(demo_module, "demo", lambda output: asked.append(output) or "a table")
    assert output_of(["demo", f"--output={tmp_path}"], capsys) == "a table\n"
    assert output_of(["demo"], capsys) == "a table\n"
    assert asked == [tmp_path, Path("runs/demo")]


def test_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        study_module, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers)
    )
    common = {key: value for key, value in tiny.TINY.items() if key != "name"}
    axes = {"recurrence": {"none": {}, "T²MLR": {"recurrence": tiny.T2MLR}}}
    path = tmp_path / "study.yaml"
    path.write_text(
        yaml.safe_dump(
            {"name": "grid", "recipe": common, "axes": axes, "output": str(tmp_path)},
            sort_keys=False,
        )
    )
    arguments = [
        "study",
        str(path),
        "--name=mine",
        "--recipe.training.steps=3",
        "--seeds=[4]",
        "--workers=1",
    ]
    text = output_of(arguments, capsys)
    header, _, *lines = text.splitlines()
    assert [line.split()[1] for line in (header, *lines)] == ["recurrence", "none", "T²MLR"]
    for name in ("none", "T²MLR"):
        assert (
            load_recipe(tmp_path / "mine" / name / "seed-4" / "recipe.yaml", []).training.steps == 3
        )
    assert (tmp_path / "mine" / "summary.md").read_text() == text
    assert output_of(arguments, capsys) == text


def test_inspect_fidelity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solver = {"kind": "scan", "sweeps": 5, "backward": 1}
    path = str(tiny.recipe_file(tmp_path, recurrence=tiny.T2MLR, solver=solver, seeds=[0, 1]))
    output_of(["train", path], capsys)
    text = output_of(["inspect", "fidelity", str(tmp_path / "tiny"), "--examples=4"], capsys)
    found = [
        json.loads((tmp_path / "tiny" / seed / "fidelity.json").read_text())
        for seed in ("seed-0", "seed-1")
    ]
    trained = [next(one for one in seed if one["name"] == "as trained") for seed in found]
    assert trained[0]["cosine_all"] != trained[1]["cosine_all"]
    row = next(line for line in text.splitlines() if "as trained" in line)
    assert f" {min(one['cosine_all'] for one in trained):.4f} " in row
    assert (tmp_path / "tiny" / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"\| exact +\| +\+0\.0e\+00 \| +1\.0000 ", text)
    assert re.search(r"\| scan\(2,1\) +\|", text)
    assert re.search(r"is enough here|None of these is enough", text)
    assert main(["inspect", "fidelity", str(tmp_path / "tiny"), "--examples=0"]) == 2
    assert "examples is 0" in capsys.readouterr().err
