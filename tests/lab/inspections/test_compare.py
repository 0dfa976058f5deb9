"""Runs beside each other: what stands in their logs, and nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from matplotlib import image

from undertow.cli.main import main
from undertow.errors import CheckpointError, ConfigError
from undertow.lab.evaluation.run import evaluate
from undertow.lab.inspections.compared import read_run
from undertow.lab.inspections.latency import compare_latency
from undertow.lab.inspections.lengths import compare_lengths
from undertow.lab.runs.log import read_log
from undertow.lab.training import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer and a TurboConn run, the latter of two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    training = {"steps": 3, "save_every": None, "bucket_by_length": False}
    evaluation = {"lengths": [8, 9], "examples": 8, "temperature": 1.0}
    task = {"kind": "parity", "template": "bare", "min_length": 8, "max_length": 8}
    for name, recurrence, seeds in (
        ("plain", None, (0,)),
        ("lag-4", tiny.TURBOCONN | {"lag": 4}, (0, 1)),
    ):
        recipe = tiny.recipe(
            folder,
            name=name,
            task=task,
            recurrence=recurrence,
            solver="sequential",
            training=training,
            evaluation=evaluation,
        )
        for seed in seeds:
            train(recipe, seed)
        evaluate(folder / name, [])
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def write_accuracy(folder: Path, shares: dict[int, float]) -> None:
    rows = [
        {"length": n, "temperature": 0.0, "correct": int(100 * s), "total": 100}
        for n, s in shares.items()
    ]
    (folder / "accuracy.json").write_text(json.dumps(rows))


def cells(text: str) -> list[list[str]]:
    return [
        [c.strip() for c in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_a_run_logs_how_long_its_batches_were(runs: Path) -> None:
    for name, groups in (("plain", 1), ("lag-4", 3)):
        (end,) = [
            entry
            for entry in read_log(runs / name / "seed-0" / "log.jsonl")
            if entry.get("event") == "end"
        ]
        assert (end["tokens"], end["groups"]) == (11, groups)


def test_latency(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(runs / name) for name in ("lag-4", "plain")]
    assert main(["inspect", "latency", *paths]) == 0
    header, _, turboconn, plain = cells(capsys.readouterr().out)
    assert header == [
        "run",
        "seeds",
        "tokens",
        "recursions",
        "s a step",
        "x Transformer",
        "greedy",
        "at temperature 1",
    ]
    assert turboconn[:4] == ["lag-4", "2", "11.00", "3.00"] and plain[:4] == [
        "plain",
        "1",
        "11.00",
        "1.00",
    ]
    assert plain[5] == "1.00"
    found = {
        entry["run"]: entry for entry in json.loads((runs / "lag-4" / "latency.json").read_text())
    }
    ratio = found["lag-4"]["seconds_per_step"] / found["plain"]["seconds_per_step"]
    assert (
        found["lag-4"]["over_transformer"] == pytest.approx(ratio)
        and turboconn[5] == f"{ratio:.2f}"
    )
    greedy = [
        entry["correct"] / entry["total"]
        for seed in (0, 1)
        for entry in json.loads((runs / "lag-4" / f"seed-{seed}" / "accuracy.json").read_text())
        if entry["temperature"] == 0
    ]
    by_seed = found["lag-4"]["accuracy_by_seed"]["0.0"]
    assert by_seed == pytest.approx([sum(greedy[:2]) / 2, sum(greedy[2:]) / 2])
    low, high = min(by_seed), max(by_seed)
    assert turboconn[6] == (
        f"{sum(greedy) / 4:.1%}" + (f" ({low:.1%} - {high:.1%})" if low < high else "")
    )
    with pytest.raises(ConfigError, match="none of these runs is without a recurrence"):
        compare_latency([runs / "lag-4"], runs)


def test_the_folder_of_a_study_stands_for_its_runs_in_its_order(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = {"model": {"plain": {}, "lag-4": {"recurrence": tiny.TURBOCONN | {"lag": 4}}}}
    study = {"name": "grid", "recipe": {"task": "parity"}, "axes": axes}
    (runs / "summary.json").write_text(json.dumps({"study": study}))
    for what in ("latency", "choices"):
        assert main(["inspect", what, str(runs)]) == 0
        _, _, *rows = cells(capsys.readouterr().out)
        assert list(dict.fromkeys(row[0] for row in rows)) == ["plain", "lag-4"]
    assert len(json.loads((runs / "latency.json").read_text())) == 2
    assert main(["inspect", "lengths", str(runs)]) == 0
    assert cells(capsys.readouterr().out)[0] == ["length", "plain", "lag-4"]


def test_another_solver_has_no_recursions(runs: Path) -> None:
    for folder in (runs / "lag-4").glob("seed-*"):
        recipe = folder / "recipe.yaml"
        text = recipe.read_text()
        assert "kind: sequential" in text
        recipe.write_text(
            text.replace("kind: sequential", "kind: scan").replace("  gradient: full\n", "")
        )
    row = cells(compare_latency([runs / "plain", runs / "lag-4"], runs))[3]
    assert row[0] == "lag-4" and row[3] == "-"


def test_lengths(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_accuracy(runs / "plain" / "seed-0", {8: 1.0, 16: 0.5, 24: 0.5})
    write_accuracy(runs / "lag-4" / "seed-0", {8: 1.0, 16: 1.0, 24: 1.0, 32: 0.9})
    write_accuracy(runs / "lag-4" / "seed-1", {8: 1.0, 16: 1.0, 24: 0.8, 32: 1.0})
    output = tmp_path / "together"
    arguments = [
        "inspect",
        "lengths",
        str(runs / "plain"),
        str(runs / "lag-4"),
        f"--output={output}",
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "Seeds: plain: 1, lag-4: 2" in text
    assert cells(text)[2:] == [
        ["8", "100.0%", "100.0%"],
        ["16", "50.0%", "100.0%"],
        ["24", "50.0%", "90.0% (80.0% - 100.0%)"],
        ["perfect to", "8 (1.0x)", "16 (2.0x)"],
    ]
    found = json.loads((output / "lengths.json").read_text())
    assert found["lag-4"] == {
        "trained": 8,
        "perfect": 16,
        "accuracy": {"8": [1.0, 1.0], "16": [1.0, 1.0], "24": [1.0, 0.8], "32": [0.9, 1.0]},
    }
    assert image.imread(output / "lengths.png").size


@pytest.mark.parametrize("compare", [compare_lengths, compare_latency])
def test_runs_that_were_not_tested_are_refused(runs: Path, compare: Any) -> None:
    path = runs / "plain" / "seed-0" / "accuracy.json"
    path.unlink()
    with pytest.raises(CheckpointError, match=r"has no accuracy\.json; run: undertow eval"):
        compare([runs / "plain"], runs)


def test_runs_that_were_tested_otherwise_are_refused(runs: Path) -> None:
    path = runs / "plain" / "seed-0" / "accuracy.json"
    path.write_text(json.dumps([{"length": None, "temperature": 0.0, "correct": 1, "total": 2}]))
    with pytest.raises(ConfigError, match="was tested without lengths"):
        compare_lengths([runs / "plain"], runs)
    assert read_run(runs / "plain").overall(0.0) == [0.5]
    write_accuracy(runs / "plain" / "seed-0", {10: 1.0})
    with pytest.raises(ConfigError, match="at no length in common"):
        compare_lengths([runs / "plain", runs / "lag-4"], runs)
    write_accuracy(runs / "lag-4" / "seed-1", {10: 1.0})
    with pytest.raises(CheckpointError, match="were not tested alike"):
        read_run(runs / "lag-4")
