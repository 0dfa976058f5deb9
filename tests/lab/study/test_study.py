"""Studies: the grid, what is found before anything trains, what is made of the runs, and going on
after an interruption."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from matplotlib import image

from undertow import Auto, Scan, Sequential, TurboConn
from undertow.cli.main import main
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.lab.evaluation.figures import curves_figure
from undertow.lab.evaluation.run import evaluate
from undertow.lab.runs.log import read_log
from undertow.lab.runs.recipe import load_recipe
from undertow.lab.runs.run import Run
from undertow.lab.study import pool as study_module
from undertow.lab.study.findings import Finding, finding, findings_table
from undertow.lab.study.pool import end_with_parent, train_and_evaluate
from undertow.lab.study.settings import Study
from undertow.lab.study.study import study
from undertow.mapping import from_mapping, load_yaml, to_mapping

SHIPPED = sorted((Path(__file__).parents[3] / "recipes").rglob("study-*.yaml"))
RECIPE: dict[str, Any] = {
    "task": {"kind": "parity", "template": "bare", "max_length": 8},
    "solver": "sequential",
    "model": {"layers": 1, "width": 16, "heads": 2, "positions": 64},
    "training": {
        "steps": 2,
        "batch": 2,
        "log_every": 1,
        "evaluate_every": 1,
        "evaluate_examples": 4,
        "save_every": 1,
    },
    "evaluation": {"lengths": [6], "examples": 4},
}
TURBOCONN: dict[str, Any] = {
    "kind": "turboconn",
    "connections": [[0, 0]],
    "lag": 1,
    "alpha": 1.0,
    "rank": 4,
}
AXES: dict[str, Any] = {
    "recurrence": {"none": {}, "TurboConn": {"recurrence": TURBOCONN}},
    "rate": {"fast": {"training.learning_rate": 1e-2}},
}


def settings(output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "grid",
        "recipe": RECIPE,
        "axes": AXES,
        "seeds": [0, 1],
        "workers": 1,
        "output": str(output),
    } | changes


def grid(output: Path, **changes: Any) -> Study:
    return from_mapping(Study, settings(output, **changes))


def recipe_with(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """The common recipe; a section that is given changes only the keys that it names."""
    return RECIPE | {
        name: {**RECIPE.get(name, {}), **section} for name, section in sections.items()
    }


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go on in a thread: a process of their own imports all of PyTorch."""
    monkeypatch.setattr(
        study_module, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers)
    )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that a study called `train` for."""
    found: list[Path] = []
    train = study_module.train

    def spy(recipe: Any, seed: int) -> Path:
        found.append(Run.of(recipe, seed).folder)
        return train(recipe, seed)

    monkeypatch.setattr(study_module, "train", spy)
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of a Markdown table, without its rule."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [lines[0], *lines[2:]]


# --- the grid


def test_the_grid_is_the_product_of_the_axes(tmp_path: Path) -> None:
    axes = {
        "recurrence": {
            "T²MLR (whole)": {"recurrence": tiny.T2MLR},
            "TurboConn": {"recurrence": TURBOCONN},
        },
        "solver": {
            "exact": {"solver": "sequential"},
            "scan(2,1)": {"solver": {"kind": "scan", "sweeps": 2}},
            "auto": {"solver": "auto", "training.steps": 9},
        },
    }
    made = grid(tmp_path, axes=axes, seeds=[3, 5])
    assert list(made.combinations()) == [(a, b) for a in axes["recurrence"] for b in axes["solver"]]
    recipes = {labels: made.variant(labels) for labels in made.combinations()}
    assert [recipe.name for recipe in recipes.values()] == [
        "T²MLR-whole_exact",
        "T²MLR-whole_scan-2-1",
        "T²MLR-whole_auto",
        "TurboConn_exact",
        "TurboConn_scan-2-1",
        "TurboConn_auto",
    ]
    for (first, second), recipe in recipes.items():
        assert isinstance(recipe.recurrence, TurboConn) == (first == "TurboConn")
        assert (
            recipe.solver == {"exact": Sequential(), "scan(2,1)": Scan(2), "auto": Auto()}[second]
        )
        assert recipe.training.steps == (9 if second == "auto" else 2)
        assert (recipe.seeds, recipe.output) == ((3, 5), str(tmp_path / "grid"))
        assert to_mapping(recipe.model) == to_mapping(made.variant(("TurboConn", "exact")).model)
    assert made.recipe == RECIPE, "making one combination changes nothing for the next"


@pytest.mark.parametrize(
    ("recipe", "choice", "expected"),
    [
        (RECIPE, {"model.width": 32}, {"model.width": 32}),
        (
            RECIPE,
            {"evaluation": {"lengths": [7]}},
            {"evaluation.lengths": [7], "evaluation.examples": 256},
        ),
        (
            RECIPE | {"task": "parity"},
            {"task.max_length": 5},
            {"task.kind": "parity", "task.max_length": 5},
        ),
        (
            RECIPE,
            {"solver.sweeps": 4, "solver.kind": "scan"},
            {"solver.kind": "scan", "solver.sweeps": 4},
        ),
        (RECIPE | {"solver": "scan"}, {"solver.sweeps": 4}, {"solver.sweeps": 4}),
        (
            RECIPE | {"solver": {"kind": "scan", "sweeps": 4}},
            {"solver.kind": "jacobi"},
            {"solver.forward": 16},
        ),
        (
            RECIPE | {"recurrence": None},
            {"recurrence": TURBOCONN, "recurrence.lag": 2},
            {"recurrence.lag": 2},
        ),
        (RECIPE | {"recurrence": TURBOCONN}, {"recurrence": None}, {"recurrence": None}),
        (
            RECIPE,
            {"training.learning_rate": 1e-05, "training.evaluate_every": None},
            {"training.learning_rate": 1e-5},
        ),
    ],
)
def test_a_choice_sets_dotted_keys(
    recipe: Any, choice: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    """As `--section.key=value` does on the command line."""
    variant = to_mapping(grid(tmp_path, recipe=recipe, axes={"a": {"b": choice}}).variant(["b"]))
    for key, value in expected.items():
        found: Any = variant
        for part in key.split("."):
            found = found[part]
        assert found == value, key


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_studies_are_grids_of_recipes(path: Path) -> None:
    made = from_mapping(Study, load_yaml(path))
    assert path.stem == f"study-{made.name}"
    recipes = [made.variant(labels) for labels in made.combinations()]
    assert len({recipe.name for recipe in recipes}) == len(recipes) > 1
    assert from_mapping(Study, to_mapping(made)) == made


# --- mistakes, all found before anything trains


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"axes": {"a": {"b": {"training.step": 3}}}},
            "unknown key training.step; did you mean 'steps'?",
        ),
        (
            {"axes": {"a": {"b": {"trainig.steps": 3}}}},
            "unknown key trainig; did you mean 'training'?",
        ),
        (
            {"axes": {"a": {"b": {"training.steps": "many"}}}},
            "training.steps: expected whole number, got 'many'",
        ),
        (
            {"axes": {"a": {"b": {"training.steps.more": 3}}}},
            "training.steps is 2, which has no keys",
        ),
        (
            {"axes": {"a": {"b": {"solver": {"kind": "scan", "sweeps": 0}}}}},
            "solver: sweeps is 0; use 1 or more",
        ),
        ({"axes": {"a": {"b": 3}}}, "axes.a.b: expected {text: anything, ...}, got 3"),
        ({"axes": {"a": {}}}, "axes.a is empty; give at least one choice"),
        ({"axes": {}}, "axes is empty; give at least one choice"),
        (
            {"axes": {"a": {"x(1)": {}, "x-1": {}}}},
            "x(1) and x-1 would share the folder x-1; give one another label",
        ),
        (
            {"axes": {"a": {"b_c": {}, "b": {}}, "d": {"e": {}, "c_e": {}}}},
            "would share the folder b_c_e; give one another",
        ),
        ({"axes": {"a": {"+": {}}}}, "name is ''"),
        (
            {"recipe": RECIPE | {"name": "x"}},
            "recipe.name is set, but a study sets it itself; remove it",
        ),
        (
            {"recipe": RECIPE | {"seeds": [4]}},
            "recipe.seeds is set, but a study sets it itself; remove it",
        ),
        (
            {"recipe": RECIPE | {"output": "x"}},
            "recipe.output is set, but a study sets it itself; remove it",
        ),
        (
            {"axes": {"a": {"b": {"seeds": [4]}}}},
            "axes.a.b.seeds is set, but a study sets it itself; remove it",
        ),
        ({"recipe": {}}, "missing task, which must be given"),
        ({"seeds": []}, "seeds is empty; give at least one seed"),
        ({"seeds": [1, 1]}, "seeds holds 1 twice"),
        ({"name": "../../escaped"}, "name is '../../escaped'; it names a folder in output"),
        ({"name": "/absolute"}, "name is '/absolute'; it names a folder in output"),
        ({"name": "."}, "name is '.'; it names a folder in output"),
        ({"name": ""}, "name is ''; it names a folder in output"),
        ({"axes": {"a": {"..": {}}}}, "name is '..'; it names a folder in output"),
        (
            {"axes": {str(n): {str(m): {} for m in range(10)} for n in range(9)}},
            "axes and seeds make 2,000,000,000 runs",
        ),
        ({"seeds": [0, -1]}, "seeds holds -1; use 0 or more"),
        ({"workers": 0}, "workers is 0; use 1 or more"),
        ({"recipes": {}}, "unknown key recipes; did you mean 'recipe'?"),
    ],
)
def test_a_mistake_is_found_before_anything_trains(
    changes: dict[str, Any],
    expected: str,
    tmp_path: Path,
    in_this_process: None,
    trained: list[Path],
) -> None:
    if "a" in changes.get("axes", {}):  # beside a choice that is right
        changes["axes"]["a"] = {"right": {}, **changes["axes"]["a"]} if changes["axes"]["a"] else {}
    with pytest.raises(ConfigError) as caught:
        study(grid(tmp_path, **changes))
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not trained and not list(tmp_path.iterdir())


def test_the_folder_of_another_study_is_refused_before_anything_trains(
    tmp_path: Path, in_this_process: None, trained: list[Path]
) -> None:
    """Its runs would be told as those of this one."""
    study(grid(tmp_path, axes={"a": {"b": {}}}, seeds=[0]))
    trained.clear()
    summary = (tmp_path / "grid" / "summary.json").read_bytes()
    changed = recipe_with(training={"learning_rate": 0.5})
    with pytest.raises(
        CheckpointError,
        match=r"b/seed-0 was made by another recipe, whose training.learning_rate is 0.001",
    ):
        study(grid(tmp_path, recipe=changed, axes={"a": {"new": {}, "b": {}}}, seeds=[0]))
    assert not trained and (tmp_path / "grid" / "summary.json").read_bytes() == summary


# --- a whole study


def check_summary(made: Study, text: str) -> None:
    """Compare what a study wrote with the folders of its runs."""
    assert (made.folder / "summary.md").read_text() == text + "\n"
    record = json.loads((made.folder / "summary.json").read_text())
    assert from_mapping(Study, record["study"]) == made
    assert record["versions"]["torch"]
    header, *lines = rows(text)
    assert header == [*made.axes, "loss", "accuracy at 6", "ms a step"]
    assert [tuple(found["labels"]) for found in record["findings"]] == list(made.combinations())
    for line, found in zip(lines, record["findings"], strict=True):
        folder = made.folder / "_".join(found["labels"])
        assert line[: len(made.axes)] == found["labels"]
        losses, shares, seconds = [], [], []
        for seed in made.seeds:
            log = read_log(folder / f"seed-{seed}" / "log.jsonl")
            losses.append(
                [(each["step"], each["eval_loss"]) for each in log if "eval_loss" in each]
            )
            seconds += [each["seconds_per_step"] for each in log if "seconds_per_step" in each]
            (result,) = json.loads((folder / f"seed-{seed}" / "accuracy.json").read_text())
            shares.append(result["correct"] / result["total"])
            assert (result["length"], result["total"]) == (6, 4)
        assert found["curves"] == [[list(point) for point in curve] for curve in losses]
        assert [point[0] for point in losses[0]] == [1, 2]
        last = [curve[-1][1] for curve in losses]
        assert found["measures"] == {"loss": last, "accuracy at 6": shares}
        assert line[-3] == f"{sum(last) / len(last):.4f} ({min(last):.4f} to {max(last):.4f})"
        assert line[-2] == (
            f"{100 * sum(shares) / len(shares):.1f} ({100 * min(shares):.1f} to "
            f"{100 * max(shares):.1f})"
        )
        assert line[-1] == f"{1000 * statistics.median(seconds):.0f}"
    assert image.imread(made.folder / "losses.png").ndim == 3


def test_a_study_in_processes_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = grid(tmp_path)
    text = study(made)
    output = capfd.readouterr()
    assert [line.partition(" ")[0] for line in output.err.splitlines()] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]
    assert not output.out
    check_summary(made, text)
    kept = {
        path.relative_to(made.folder).as_posix()
        for path in made.folder.rglob("*")
        if path.is_file()
    }
    runs = [f"{name}/seed-{seed}" for name in ("none_fast", "TurboConn_fast") for seed in (0, 1)]
    assert {f"{run}/log.jsonl" for run in runs} | {f"{run}.output" for run in runs} <= kept
    assert not [name for name in kept if "checkpoint" in name]
    first, other = (read_log(made.folder / run / "log.jsonl") for run in runs[:2])
    assert first[0]["threads"] == 1
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in (first, other)]
    assert losses[0] != losses[1], "the seeds are the same"


def test_the_same_study_again_trains_nothing_anew(
    tmp_path: Path, in_this_process: None, trained: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grid(tmp_path, axes={"rate": AXES["rate"]}, seeds=[0])
    text = study(made)
    assert len(trained) == 1
    check_summary(made, text)
    before = {
        path: path.stat().st_mtime_ns for path in made.folder.rglob("seed-*/*") if path.is_file()
    }
    assert before
    trained.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            ThreadPoolExecutor,
            "submit",
            lambda *_: pytest.fail("a process was started for nothing"),
        )
        assert study(made) == text

    # More seeds and another choice train what is new.
    larger = grid(
        tmp_path,
        axes={"rate": AXES["rate"] | {"slow": {"training.learning_rate": 1e-4}}},
        seeds=[1, 0],
    )
    check_summary(larger, study(larger))
    assert [path.relative_to(larger.folder).as_posix() for path in trained] == [
        "fast/seed-1",
        "slow/seed-1",
        "slow/seed-0",
    ]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_evaluation_is_made_of_the_same_models(
    tmp_path: Path, in_this_process: None
) -> None:
    study(grid(tmp_path, axes={"a": {"b": {}}}))
    changed = grid(
        tmp_path, recipe=recipe_with(evaluation={"lengths": [7, 8]}), axes={"a": {"b": {}}}
    )
    weights = [
        path.stat().st_mtime_ns for path in sorted(changed.folder.rglob("model.safetensors"))
    ]
    assert rows(study(changed))[0] == ["a", "loss", "accuracy at 7", "accuracy at 8", "ms a step"]
    assert [
        path.stat().st_mtime_ns for path in sorted(changed.folder.rglob("model.safetensors"))
    ] == weights
    assert load_recipe(changed.folder / "b" / "seed-1" / "recipe.yaml", []).evaluation.lengths == (
        7,
        8,
    )


def test_another_evaluation_by_hand_is_not_the_study_s(
    tmp_path: Path, in_this_process: None
) -> None:
    made = grid(tmp_path, axes={"a": {"b": {}}}, seeds=[0])
    text = study(made)
    evaluate(made.folder / "b", ["--evaluation.lengths=[7]", "--evaluation.examples=2"])
    assert study(made) == text


def test_an_evaluation_that_was_interrupted_is_made_again(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grid(tmp_path, axes={"a": {"b": {}}}, seeds=[0])
    study(made)
    changed = grid(
        tmp_path, recipe=recipe_with(evaluation={"lengths": [7]}), axes={"a": {"b": {}}}, seeds=[0]
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            study_module, "evaluate_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            study(changed)
    assert "accuracy at 7" in rows(study(changed))[0], (
        "the evaluation before it was taken for this one"
    )


def test_an_unfinished_run_is_resumed(
    tmp_path: Path, in_this_process: None, trained: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grid(tmp_path, seeds=[0])
    with monkeypatch.context() as patch:
        tiny.interrupt(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            study(made)
    assert [path.name for path in (made.folder / "none_fast" / "seed-0").glob("checkpoint-*")] == [
        "checkpoint-1"
    ]
    assert len(trained) == 1 and not (made.folder / "summary.json").exists()
    check_summary(made, study(made))
    log = read_log(made.folder / "none_fast" / "seed-0" / "log.jsonl")
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2]
    assert [entry.get("event") for entry in log].count("start") == 2
    whole = grid(tmp_path / "whole", seeds=[0])
    study(whole)
    for name in ("none_fast", "TurboConn_fast"):
        one, other = (
            tiny.weights(each.folder / name / "seed-0" / "model") for each in (made, whole)
        )
        assert tiny.equal(one, other)


def test_a_run_that_was_trained_but_not_evaluated(
    tmp_path: Path, in_this_process: None, trained: list[Path]
) -> None:
    made = grid(tmp_path, seeds=[0], axes={"a": {"b": {}}})
    study(made)
    (made.folder / "b" / "seed-0" / "accuracy.json").unlink()
    check_summary(made, study(made))


def test_what_a_run_prints_goes_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def talkative(recipe: Any, seed: int) -> None:
        print("a word")
        raise ConfigError("no more")

    monkeypatch.setattr(study_module, "train", talkative)
    recipe = grid(tmp_path).variant(("none", "fast"))
    with pytest.raises(ConfigError, match="no more"):
        train_and_evaluate(recipe, 7)
    assert (tmp_path / "grid" / "none_fast" / "seed-7.output").read_text() == "a word\n"
    assert capsys.readouterr().out == ""


# --- a run that fails


def test_a_failed_run_surfaces_as_its_own_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On the command line, with processes: one sentence, exit code 2, and no run is started after
    it."""
    path = tmp_path / "study.yaml"
    wrong = {"training.max_tokens": 2}  # which only drawing the examples tells
    axes = {"a": {"wrong": wrong, "right": {}, "also right": {}}}
    path.write_text(yaml.safe_dump(settings(tmp_path, axes=axes, seeds=[0]), sort_keys=False))
    assert main(["study", str(path)]) == 2
    output = capfd.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("undertow: ") and "raise training.max_tokens" in line
    assert not output.out
    assert [each.name for each in (tmp_path / "grid").iterdir()] == ["wrong"], "it went on training"
    assert not list((tmp_path / "grid" / "wrong").glob("seed-0/*"))


def test_a_process_that_is_killed(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(recipe: Any, seed: int) -> None:
        raise BrokenProcessPool(
            "A process in the process pool was terminated abruptly"
        )  # as the pool says it

    monkeypatch.setattr(study_module, "train", killed)
    with pytest.raises(
        ConfigError,
        match=r"was killed, as it is when memory runs out; workers is 1: use fewer, and the same",
    ):
        study(grid(tmp_path))


def work_on(alive: Connection, before: Callable[[], None] | None) -> None:
    """What a process of a study does, without the training: it holds `alive` open as long as it
    lives."""
    if before:
        before()
    alive.send("working")
    time.sleep(30)


def start_work(alive: Connection, before: Callable[[], None] | None) -> None:
    """What a study does: it starts a process and waits for it."""
    worker = get_context("spawn").Process(target=work_on, args=(alive, before))
    worker.start()
    alive.close()
    worker.join()


@pytest.mark.parametrize("before", [end_with_parent, None], ids=["", "negative control"])
def test_the_processes_of_a_study_that_is_killed_end_with_it(
    before: Callable[[], None] | None,
) -> None:
    context = get_context("spawn")
    seen, alive = context.Pipe(duplex=False)
    parent = context.Process(target=start_work, args=(alive, before))
    parent.start()
    alive.close()
    assert seen.recv() == "working"
    parent.kill()
    ended = seen.poll(
        timeout=20 if before else 2
    )  # the end of the pipe can be read once nobody holds it open
    assert ended == bool(before)
    if ended:
        with pytest.raises(EOFError):
            seen.recv()


def test_a_model_that_cannot_be_built_is_told_before_any_run(
    tmp_path: Path, in_this_process: None
) -> None:
    wrong = {"recurrence": TURBOCONN | {"connections": [[5, 0]]}}
    with pytest.raises(ConfigError, match="layer 5"):
        study(grid(tmp_path, axes={"a": {"right": {}, "wrong": wrong}}, seeds=[0]))
    assert not (tmp_path / "grid").exists()


def test_runs_that_succeed_are_kept_beside_one_that_fails(
    tmp_path: Path, in_this_process: None
) -> None:
    wrong = {"training.max_tokens": 2}
    with pytest.raises(DataError, match=r"raise training\.max_tokens"):
        study(grid(tmp_path, axes={"a": {"right": {}, "wrong": wrong}}, seeds=[0]))
    assert (tmp_path / "grid" / "right" / "seed-0" / "accuracy.json").is_file()
    assert not (tmp_path / "grid" / "summary.json").exists()


# --- tables and figures


def write_run(folder: Path, losses: list[float], **files: Any) -> None:
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"event": "start"}]
    for step, loss in enumerate(losses, 1):
        lines += [
            {"step": step, "loss": 9.0, "seconds_per_step": step / 1000},
            {"step": step, "eval_loss": loss},
        ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_a_run_that_diverges_is_a_finding(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {
        "slow": {"training.learning_rate": 1e-3},
        "fast": {"training.learning_rate": 1e38, "training.warmup_steps": 0},
    }
    made = grid(tmp_path, axes={"rate": rates}, seeds=[0])
    header, slow, fast = rows(study(made))
    assert header[-1] == "diverged seeds"
    assert slow[-1] == "" and fast[-1] == "1"
    assert fast[1:-2] == [""] * len(fast[1:-2])
    output = (made.folder / "fast" / "seed-0.output").read_text()
    assert "training has diverged; lower training.learning_rate, which is 1e+38" in output
    assert not (made.folder / "fast" / "seed-0" / "model").exists()
    monkeypatch.setattr(study_module, "train_and_evaluate", None)  # nothing is trained again
    assert rows(study(made)) == [header, slow, fast]


def test_a_finding_holds_what_the_folders_say(tmp_path: Path) -> None:
    made = grid(tmp_path)
    recipe = made.variant(("none", "fast"))
    for seed, losses in enumerate(([3.0, 1.5], [2.0, 0.5])):
        results = [
            {
                "length": 6,
                "temperature": 0.0,
                "correct": 1 + seed,
                "total": 4,
                "right_symbols": 5,
                "symbols": 8,
            },
            {
                "length": None,
                "temperature": 0.0,
                "correct": 3,
                "total": 4,
                "right_symbols": None,
                "symbols": None,
            },
            {"length": 6, "temperature": 0.5, "correct": seed, "total": 4},
            {"length": None, "temperature": 1.0, "correct": 4, "total": 4},
        ]
        write_run(
            Run.of(recipe, seed).folder,
            losses,
            accuracy=results,
            loss={"loss": 1.25 + seed, "perplexity": 3.0},
        )
    found = finding(("none", "fast"), recipe)
    assert found.measures == {
        "loss": [1.5, 0.5],
        "test loss": [1.25, 2.25],
        "accuracy at 6": [0.25, 0.5],
        "symbols at 6": [0.625, 0.625],
        "accuracy": [0.75, 0.75],
        "accuracy at 6, temperature 0.5": [0.0, 0.25],
        "accuracy, temperature 1": [1.0, 1.0],
    }
    assert found.curves == [[(1, 3.0), (2, 1.5)], [(1, 2.0), (2, 0.5)]]
    assert found.seconds == 0.0015


def test_the_table_has_a_row_a_combination() -> None:
    found = [
        Finding(("a", "x"), {"loss": [1.5, 0.5], "accuracy": [0.25, 0.5]}, [[], []], 0.0126),
        Finding(("b", "y"), {"loss": [2.0, 2.0], "symbols": [1.0, 0.9]}, [[], []], 2.0),
    ]
    assert rows(findings_table(["one", "two"], found)) == [
        ["one", "two", "loss", "accuracy", "symbols", "ms a step"],
        ["a", "x", "1.0000 (0.5000 to 1.5000)", "37.5 (25.0 to 50.0)", "", "13"],
        ["b", "y", "2.0000 (2.0000 to 2.0000)", "", "95.0 (90.0 to 100.0)", "2000"],
    ]


Curves = dict[tuple[str, ...], list[list[tuple[int, float]]]]
FALLING, RISING = [(1, 3.0), (2, 2.0), (3, 1.0)], [(1, 1.0), (3, 3.0)]


@pytest.mark.parametrize(
    ("curves", "panels", "colors"),
    [
        ({("a",): [FALLING, RISING], ("b",): [RISING]}, 1, 2),
        ({("a", "x"): [FALLING], ("a", "y"): [RISING], ("b", "x"): [RISING]}, 2, 2),
        ({("a", "x"): [FALLING], ("b", "x"): [FALLING], ("c", "x"): [RISING]}, 3, 1),
        ({("a", "x", "1"): [[(1, 2.0)]], ("a", "x", "2"): [FALLING]}, 1, 2),
        ({("a",): [[], FALLING], ("b",): [[]]}, 1, 1),
        ({("a", "x"): [[], []], ("b", "x"): [[]]}, 2, 0),
    ],
)
@pytest.mark.filterwarnings("error")
def test_curves_are_drawn(curves: Curves, panels: int, colors: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "curves.png"
    curves_figure(curves, path, "title", "nats")
    assert [each.name for each in path.parent.iterdir()] == ["curves.png"]
    pixels = image.imread(path)
    assert pixels.shape[:2] == (600, max(1050, 675 * panels))
    for number, color in enumerate(((31, 119, 180), (255, 127, 14), (44, 160, 44))):
        near = (
            abs(255 * pixels[..., :3] - [0.8 * part + 0.2 * 255 for part in color]).max(axis=-1) < 8
        )  # on white
        assert (near.sum() > 50) == (number < colors), f"curves of colour {number}"
    before = path.read_bytes()
    curves_figure({labels: seeds[:0] for labels, seeds in curves.items()}, path, "title", "nats")
    assert (path.read_bytes() != before) == (colors > 0), "a figure takes the place of an old one"


def test_each_gpu_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert study_module.places(3) == ["", "", ""]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert study_module.places(3) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1a2b")
    assert study_module.places(1) == ["5", "GPU-1a2b"]


def visible(_: int) -> str:
    time.sleep(0.5)  # so that the other process takes one too
    return os.environ.get("CUDA_VISIBLE_DEVICES", "none")


def test_a_worker_sees_its_place_alone() -> None:
    context = get_context("fork")
    queue = context.SimpleQueue()
    for place in ("3", "4"):
        queue.put(place)
    with ProcessPoolExecutor(2, context, study_module.begin_worker, (queue,)) as workers:
        assert set(workers.map(visible, range(8))) <= {"3", "4"}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") not in ("3", "4")
