"""Evaluating finished runs, one seed or several, and the demo."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from matplotlib import image

from undertow.cli.main import main
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.lab.evaluation import demo as demo_module
from undertow.lab.evaluation.demo import demo
from undertow.lab.evaluation.run import continue_prompt, evaluate
from undertow.lab.runs.recipe import load_recipe
from undertow.lab.runs.run import Experiment
from undertow.lab.training import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two seeds that has learnt to answer with a digit, mostly."""
    recipe = tiny.recipe(
        tmp_path_factory.mktemp("runs"),
        recurrence=tiny.TURBOCONN,
        training={"steps": 12, "save_every": None},
    )
    for seed in (0, 1):
        folder = train(recipe, seed)
    return folder.parent


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to write into."""
    copy: Path = shutil.copytree(trained, tmp_path / "tiny")
    return copy


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def results(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "accuracy.json").read_text())
    return found


def test_several_seeds_are_pooled(finished: Path) -> None:
    text = evaluate(finished, ["--evaluation.temperature=1", "--evaluation.examples=20"])
    assert text.startswith("tiny (2 seeds together)\n\n|")
    by_seed = [results(finished / f"seed-{seed}") for seed in (0, 1)]
    assert by_seed[0] != by_seed[1], "so alike that pooling shows nothing"
    expected = []
    for first, second in zip(*by_seed, strict=True):
        assert (first["length"], first["temperature"]) == (second["length"], second["temperature"])
        correct, total = first["correct"] + second["correct"], first["total"] + second["total"]
        decoding = "greedy" if first["temperature"] == 0 else "temperature 1"
        expected.append(
            [
                str(first["length"]),
                decoding,
                str(correct),
                str(total),
                f"{100 * correct / total:.1f}%",
            ]
        )
    assert cells(text) == expected
    assert [row[:2] for row in expected] == [
        ["6", "greedy"],
        ["8", "greedy"],
        ["6", "temperature 1"],
        ["8", "temperature 1"],
    ]
    assert {row[3] for row in expected} == {"40"}
    assert any(row[2] not in ("0", "40") for row in expected)
    assert image.imread(finished / "accuracy.png").size


def test_one_seed_alone(finished: Path) -> None:
    text = evaluate(finished / "seed-1", [])
    assert text.startswith("tiny\n\n|")
    assert {row[3] for row in cells(text)} == {"8"}
    assert (finished / "seed-1" / "accuracy.png").is_file()
    assert not (finished / "seed-0" / "accuracy.json").exists()


def test_overrides_change_the_evaluation_and_not_the_run(finished: Path) -> None:
    path = finished / "seed-0" / "recipe.yaml"
    before = load_recipe(path, [])
    text = evaluate(finished, ["--evaluation.lengths=[7, 9, 10]", "--evaluation.examples=3"])
    assert [row[0] for row in cells(text)] == ["7", "9", "10"]
    after = load_recipe(path, [])  # what stands in accuracy.json is what its recipe says
    assert (after.evaluation.lengths, after.evaluation.examples) == ((7, 9, 10), 3)
    assert dataclasses.replace(after, evaluation=before.evaluation) == before
    with pytest.raises(
        ConfigError, match=r"unknown key evaluation\.length; did you mean 'lengths'"
    ):
        evaluate(finished, ["--evaluation.length=[7]"])
    with pytest.raises(DataError, match="length 2 falls in the test split"):
        evaluate(finished, ["--evaluation.lengths=[2]"])
    assert load_recipe(path, []) == after


def test_another_task_has_a_figure_of_its_own(finished: Path) -> None:
    evaluate(finished, [])
    own = (finished / "accuracy.png").read_bytes()
    evaluate(
        finished,
        ["--task={kind: parity, template: bare, max_length: 12}", "--evaluation.lengths=[9]"],
    )
    assert (finished / "accuracy.png").read_bytes() == own
    assert (finished / "accuracy-parity.png").is_file() and (
        finished / "seed-0" / "accuracy-parity.json"
    ).is_file()


def test_without_lengths_there_is_no_figure(finished: Path) -> None:
    text = evaluate(finished, ["--evaluation.lengths=[]"])
    assert [row[0] for row in cells(text)] == ["all"]
    assert not (finished / "accuracy.png").exists()


def test_unfinished_runs_are_told_apart_from_none(finished: Path, tmp_path: Path) -> None:
    shutil.rmtree(finished / "seed-0" / "model")
    assert [seed.folder for seed in Experiment(finished).runs] == [finished / "seed-1"]
    for folder, expected in (
        (finished / "seed-0", r"its training has not finished; run `undertow train` again"),
        (tmp_path, r"it has no recipe\.yaml"),
        (tmp_path / "absent", r"there is no such folder"),
    ):
        with pytest.raises(CheckpointError, match=f"is no finished run: {expected}"):
            evaluate(folder, [])


# Tasks that nothing is generated for


def test_a_run_on_labels_is_trained_and_evaluated(tmp_path: Path) -> None:
    recipe = tiny.recipe(
        tmp_path,
        task={"kind": "group_tracking", "group": "S3", "min_length": 4, "max_length": 6},
        recurrence=tiny.T2MLR,
        training={"steps": 30, "batch": 16, "save_every": None},
        evaluation={"lengths": [6, 9], "examples": 16},
    )
    for seed in (0, 1):
        folder = train(recipe, seed)
    losses = list(tiny.losses(folder).values())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    text = evaluate(folder.parent, [])
    both = [results(folder.with_name(f"seed-{seed}")) for seed in (0, 1)]
    assert [row[0] for row in cells(text)] == ["6", "9"]
    for row, first, second in zip(cells(text), *both, strict=True):
        assert first["total"] == 16 and first["symbols"] == 16 * first["length"]
        right, symbols = (first[key] + second[key] for key in ("right_symbols", "symbols"))
        assert 0 < right < symbols
        assert row[2:4] == [str(first["correct"] + second["correct"]), "32"]
        assert row[5] == f"{100 * right / symbols:.1f}%"
    assert (folder.parent / "accuracy.png").is_file()
    with pytest.raises(
        ConfigError,
        match=r"evaluation\.temperature is set, but nothing is generated for group_tracking",
    ):
        evaluate(folder, ["--evaluation.temperature=1"])


def test_a_run_on_text_is_trained_and_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "squares.txt"
    path.write_text("".join(f"{number * number}\n" for number in range(400)))
    recipe = tiny.recipe(
        tmp_path,
        task={"kind": "text", "files": [str(path)], "context": 16},
        recurrence=tiny.T2MLR,
        training={"steps": 30, "batch": 8, "save_every": None},
        evaluation={"lengths": [], "examples": 5},
    )
    folder = train(recipe, 0)
    losses = list(tiny.losses(folder).values())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    text = evaluate(folder.parent, [])
    found = json.loads((folder / "loss.json").read_text())
    assert found["tokens"] == 5 * 15 and found["windows"] == 5
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["loss"] == pytest.approx(losses[-1], rel=0.3)
    assert cells(text) == [
        [
            "seed-0",
            f"{found['loss']:.4f}",
            f"{found['perplexity']:.3f}",
            "75",
            "5",
            str(found["of"]),
        ]
    ]
    assert sorted(each.name for each in folder.parent.iterdir()) == ["seed-0"]
    assert not (folder / "accuracy.json").exists()
    assert set(continue_prompt(folder, "12", 8, 0)) <= set("0123456789\n")
    other = tmp_path / "cubes.txt"
    other.write_text("".join(f"{number**3}\n" for number in range(400)))
    assert cells(evaluate(folder, [f"--task.files=[{other}]"]))[0][1] != f"{found['loss']:.4f}"
    assert json.loads((folder / "loss-text.json").read_text())["loss"] != found["loss"]
    assert json.loads((folder / "loss.json").read_text()) == found, (
        "the run's own results are another file's"
    )
    path.unlink()
    with pytest.raises(DataError, match=r"squares\.txt cannot be read"):
        evaluate(folder, [])


# Continuing a prompt


def test_a_run_a_seed_and_a_model_continue_alike(trained: Path) -> None:
    answer = continue_prompt(trained, "1011=", 5, 0)
    assert answer and set(answer) <= set("01=")
    assert continue_prompt(trained / "seed-0", "1011=", 5, 0) == answer
    assert continue_prompt(trained / "seed-0" / "model", "1011=", 5, 0) == answer
    assert len(continue_prompt(trained, "1011=", 1, 0)) == 1


def test_samples_differ_and_greedy_answers_do_not(trained: Path) -> None:
    assert len({continue_prompt(trained, "1011=", 8, 5.0) for _ in range(5)}) > 1
    assert len({continue_prompt(trained, "1011=", 8, 0.0) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        (("", 5, 0.0), DataError, "the prompt is empty; give at least one character"),
        (("12", 5, 0.0), DataError, "does not know a part of '12'"),
        (("1", 0, 0.0), ConfigError, "max-new-tokens is 0; use 1 or more"),
        (("1", 5, -1.0), ConfigError, "temperature is -1.0; use 0 for greedy answers, or more"),
    ],
)
def test_prompts_that_make_no_sense(
    trained: Path, arguments: Any, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        continue_prompt(trained, *arguments)


def test_a_missing_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        continue_prompt(tmp_path / "absent", "1", 5, 0.0)


# The demo


def test_demo_trains_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"steps": 3, "batch": 4, "log_every": 1, "evaluate_examples": 4}
    monkeypatch.setitem(demo_module.COMMON, "training", training)
    monkeypatch.setitem(demo_module.COMMON, "model", {"layers": 2, "width": 16, "heads": 2})
    monkeypatch.setattr(demo_module, "LENGTHS", (16, 32, 64))
    monkeypatch.setattr(demo_module, "GENERATED", 4)
    text = demo(tmp_path, examples=4)
    assert text.rstrip().endswith(f"Figure: {tmp_path / 'demo.png'}")
    rows = cells(text)
    assert (
        [row[0] for row in rows]
        == list(demo_module.MODELS)
        == ["Transformer", "TurboConn", "T²MLR"]
    )
    assert (tmp_path / "demo.md").read_text().strip() in text
    assert image.imread(tmp_path / "demo.png").size
    found = json.loads((tmp_path / "demo.json").read_text())
    for row in rows:
        model = found[row[0]]
        shares = [f"{100 * each['correct'] / each['total']:.1f}%" for each in model["accuracies"]]
        assert row[1:4] == shares and row[4] == f"{model['parameters']:,}"
        assert model["seconds_per_step"] > 0 and model["seconds_per_token"] > 0
    assert found["Transformer"]["parameters"] < found["TurboConn"]["parameters"]

    # Trained once: the second time it only measures.
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert len(written) == 3
    demo(tmp_path, examples=4)
    assert {path: path.stat().st_mtime_ns for path in written} == written


# Another test than the recipe's


def test_a_file_is_read_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = {"steps": 2, "save_every": None}
    task = {"kind": "arithmetic", "template": "bare", "max_operands": 4}
    folder = train(
        tiny.recipe(tmp_path, task=task, training=training, evaluation={"lengths": [4]}), 0
    )
    rows = [{"input": f"(({a} + -2) - (3 * 1)) =", "target": str(a - 5)} for a in range(10)] * 30
    bench, problems = tmp_path / "bbh.json", tmp_path / "gsm8k.jsonl"
    bench.write_text(json.dumps({"examples": rows}))
    problems.write_text(json.dumps({"question": "(1+2)=", "answer": "#### 3"}))

    assert (
        main(
            [
                "eval",
                str(folder),
                "--task=bbh-arithmetic",
                "--task.template=bare",
                f"--data={bench}",
            ]
        )
        == 0
    )
    ((length, decoding, right, total, _),) = cells(capsys.readouterr().out)
    assert (length, decoding, total) == ("all", "greedy", "300")
    (result,) = json.loads((folder / "accuracy-bbh-arithmetic-bbh.json").read_text())
    assert result["correct"] == int(right) and int(right) < 300
    assert not (folder / "accuracy.json").exists(), "the run's own results are another file's"

    arguments = [
        "eval",
        str(folder),
        "--task=bbh-arithmetic",
        "--task.template=bare",
        "--data",
        str(bench),
    ]
    assert main([*arguments, "--evaluation.examples=7"]) == 0
    assert cells(capsys.readouterr().out)[0][3] == "7"
    assert main(["eval", str(folder), "--task=gsm8k", f"--data={problems}"]) == 2
    assert "does not know a part of 'Question:" in capsys.readouterr().err
    assert main(["eval", str(folder), f"--data={problems}"]) == 2
    assert "unknown key task.test" in capsys.readouterr().err
