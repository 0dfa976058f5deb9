"""Accuracy by length of several runs (TurboConn, Figure 4)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from undertow.errors import ConfigError
from undertow.files import write_json
from undertow.lab.evaluation.figures import MARKERS, new_axes, save_figure
from undertow.lab.inspections.compared import Compared, labels, read_runs
from undertow.lab.inspections.inspection import OUTPUT, inspection
from undertow.lab.tables import spread, table


@inspection(
    "lengths",
    "accuracy by length of several runs, with the length up to which all is right",
    OUTPUT,
    together=True,
)
def compare_lengths(paths: Sequence[Path], output: Path | None = None) -> str:
    """Accuracy by length of several runs: a table, `lengths.json` and the figure `lengths.png`.

    A study's folder stands for its runs.

    Raises:
        ConfigError: a run was tested without lengths, or the runs at no length in common.
    """
    output = output or paths[0]
    paths, runs = read_runs(paths)
    for run, path in zip(runs, paths, strict=True):
        if not run.lengths():
            raise ConfigError(
                f"{path} was tested without lengths; run: undertow eval {path} "
                "--evaluation.lengths=[10,20]"
            )
    lengths = sorted(set.intersection(*(set(run.lengths()) for run in runs)))
    if not lengths:
        raise ConfigError(
            "the runs were tested at no length in common; test them with the same "
            "evaluation.lengths"
        )
    names = labels([run.recipe.name for run in runs], paths)
    rows: list[list[object]] = [
        [length, *(spread(run.shares(length)) for run in runs)] for length in lengths
    ]
    rows.append(["perfect to", *(times(run.perfect(), run.trained) for run in runs)])
    found = {
        name: {
            "trained": run.trained,
            "perfect": run.perfect(),
            "accuracy": {length: run.shares(length) for length in run.lengths()},
        }
        for name, run in zip(names, runs, strict=True)
    }
    write_json(output / "lengths.json", found)
    length_figure(runs, output / "lengths.png")
    seeds = ", ".join(
        f"{name}: {len(run.accuracies)}" for name, run in zip(names, runs, strict=True)
    )
    return (
        "Greedy accuracy by length, mean over seeds (lowest - highest). Seeds: "
        f"{seeds}\n\n{table(['length', *names], rows)}"
    )


def length_figure(runs: Sequence[Compared], path: Path) -> None:
    """One curve a run, the mean over its seeds, in a band from the lowest to the highest."""
    figure, axes = new_axes()
    for run, marker in zip(runs, itertools.cycle(MARKERS), strict=False):
        lengths = run.lengths()
        shares = [[100 * share for share in run.shares(length)] for length in lengths]
        (line,) = axes.plot(
            lengths,
            [statistics.mean(s) for s in shares],
            marker=marker,
            markersize=4,
            label=run.recipe.name,
        )
        axes.fill_between(
            lengths,
            [min(s) for s in shares],
            [max(s) for s in shares],
            color=line.get_color(),
            alpha=0.15,
            linewidth=0,
        )
    for trained in {run.trained for run in runs} - {None}:
        axes.axvline(trained, color="0.5", linestyle="--", linewidth=1)
    axes.set(
        xlabel=f"{runs[0].recipe.task.kind}: length (dashed: longest trained)",
        ylabel="accuracy (%)",
        ylim=(0, 103),
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left")
    save_figure(figure, path)


def times(perfect: int, trained: int | None) -> str:
    return str(perfect) if trained is None else f"{perfect} ({perfect / trained:.1f}x)"
