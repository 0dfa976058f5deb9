"""Runs beside each other, from what they logged: accuracy by length (TurboConn, Figure 4), and its
price (Table 1)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from undertow.config import load_config
from undertow.errors import CheckpointError, ConfigError
from undertow.files import write_text
from undertow.lab.evaluation.accuracy import read_accuracies
from undertow.lab.evaluation.figures import new_axes, save_figure
from undertow.lab.evaluation.run import seed_folders
from undertow.lab.runs.folder import LOG, RECIPE
from undertow.lab.runs.log import read_log
from undertow.lab.runs.recipe import Recipe
from undertow.lab.study.study import runs_in
from undertow.lab.tables import spread, table
from undertow.paths import takes_paths

Shares = dict[tuple[int | None, float], float]
"""Accuracy by length and temperature."""


@dataclass(frozen=True)
class Run:
    """What the seeds of a run logged.

    Attributes:
        accuracies: of each seed.
        tokens: mean tokens of a batch's rows, padding included; None in a log that does not say.
        groups: mean groups of tokens that an exact rollout of a batch goes through, one after
            another; 1 without recurrence.
        seconds_per_step: the median over the log's lines, and of these over seeds.
    """

    recipe: Recipe
    accuracies: list[Shares]
    tokens: float | None
    groups: float | None
    seconds_per_step: float

    @property
    def trained(self) -> int | None:
        """The longest trained length, of a task that has one."""
        return getattr(self.recipe.task, "max_length", None) or getattr(
            self.recipe.task, "max_operands", None
        )

    def lengths(self) -> list[int]:
        return sorted(
            {
                length
                for length, temperature in self.accuracies[0]
                if length is not None and temperature == 0
            }
        )

    def shares(self, length: int | None, temperature: float = 0.0) -> list[float]:
        """The accuracy of each seed."""
        return [shares[length, temperature] for shares in self.accuracies]

    def perfect(self) -> int:
        """The longest tested length up to which every seed answered everything right; 0 if none."""
        longest = 0
        for length in self.lengths():
            if min(self.shares(length)) < 1:
                break
            longest = length
        return longest

    def overall(self, temperature: float) -> list[float]:
        """The accuracy of each seed, the mean over the tested lengths if there are any; empty if
        none was measured."""
        by_seed = [
            [share for (_, t), share in shares.items() if t == temperature]
            for shares in self.accuracies
        ]
        return [statistics.mean(found) for found in by_seed if found]


@takes_paths
def read_run(path: Path) -> Run:
    """What a finished run left behind.

    Raises:
        CheckpointError: it has not finished, or was not evaluated.
    """
    accuracies: list[Shares] = []
    steps, ends = [], []
    folders = seed_folders(path)
    for folder in folders:
        file = folder / "accuracy.json"
        if not file.is_file():
            raise CheckpointError(f"{folder} has no accuracy.json; run: undertow eval {path}")
        accuracies.append(
            {(each.length, each.temperature): each.share for each in read_accuracies(file)}
        )
        entries = read_log(folder / LOG)
        seconds = [entry["seconds_per_step"] for entry in entries if "seconds_per_step" in entry]
        if not seconds:
            raise CheckpointError(
                f"{folder / LOG} has no seconds_per_step, so the run cannot be compared"
            )
        steps.append(statistics.median(seconds))
        ends += [
            entry
            for entry in entries
            if entry.get("event") == "end" and {"tokens", "groups"} <= entry.keys()
        ]
    if any(shares.keys() != accuracies[0].keys() for shares in accuracies):
        raise CheckpointError(
            f"the seeds of {path} were not tested alike; run: undertow eval {path}"
        )
    return Run(
        load_config(Recipe, folders[0] / RECIPE),
        accuracies,
        statistics.mean(entry["tokens"] for entry in ends) if ends else None,
        statistics.mean(entry["groups"] for entry in ends) if ends else None,
        statistics.median(steps),
    )


@takes_paths
def compare_lengths(paths: Sequence[Path], output: Path) -> str:
    """Accuracy by length of several runs: a table, `lengths.json` and the figure `lengths.png`.

    A study's folder stands for its runs.

    Raises:
        ConfigError: a run was tested without lengths, or the runs at no length in common.
    """
    paths = [run for path in paths for run in runs_in(path)]
    runs = [read_run(path) for path in paths]
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
    write_text(output / "lengths.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    length_figure(runs, output / "lengths.png")
    seeds = ", ".join(
        f"{name}: {len(run.accuracies)}" for name, run in zip(names, runs, strict=True)
    )
    return (
        "Greedy accuracy by length, mean over seeds (lowest - highest). Seeds: "
        f"{seeds}\n\n{table(['length', *names], rows)}"
    )


def labels(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """The names of some runs, or their paths if two would be called the same."""
    return list(names) if len(set(names)) == len(names) else [str(path) for path in paths]


def length_figure(runs: Sequence[Run], path: Path) -> None:
    """One curve a run, the mean over its seeds, in a band from the lowest to the highest."""
    figure, axes = new_axes()
    for run, marker in zip(runs, "osD^vP*X" * len(runs), strict=False):
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


@takes_paths
def compare_latency(paths: Sequence[Path], output: Path) -> str:
    """Recursions, time of a step and accuracy of several runs: a table like the paper's Table 1,
    and `latency.json`.

    One row a run, over its seeds: of accuracies the mean, with the lowest and the highest. A
    study's folder stands for its runs. Times are over the first run's without a recurrence.
    Recursions are the groups of tokens that the exact rollout of a batch goes through; with another
    solver in training there is no such number.

    Raises:
        ConfigError: no run is without a recurrence.
    """
    runs = [read_run(run) for path in paths for run in runs_in(path)]
    base = next((run for run in runs if run.recipe.recurrence is None), None)
    if base is None:
        raise ConfigError(
            "none of these runs is without a recurrence; add the Transformer's, whose time is the "
            "measure"
        )
    temperatures = sorted({t for run in runs for shares in run.accuracies for _, t in shares})
    header = ["run", "seeds", "tokens", "recursions", "s a step", "x Transformer"]
    header += ["greedy" if t == 0 else f"at temperature {t:g}" for t in temperatures]
    rows: list[list[object]] = []
    found = []
    for run in runs:
        exact = run.recipe.recurrence is None or run.recipe.solver.kind == "sequential"
        recursions = run.groups if exact else None
        entry = {
            "run": run.recipe.name,
            "seeds": len(run.accuracies),
            "tokens": run.tokens,
            "recursions": recursions,
            "seconds_per_step": run.seconds_per_step,
            "over_transformer": run.seconds_per_step / base.seconds_per_step,
            "accuracy_by_seed": {t: run.overall(t) for t in temperatures},
        }
        found.append(entry)
        rows.append(
            [
                run.recipe.name,
                len(run.accuracies),
                *(
                    "-" if number is None else f"{number:.2f}"
                    for number in (run.tokens, recursions)
                ),
                f"{run.seconds_per_step:.4f}",
                f"{run.seconds_per_step / base.seconds_per_step:.2f}",
                *(spread(shares) if (shares := run.overall(t)) else "-" for t in temperatures),
            ]
        )
    write_text(output / "latency.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return table(header, rows)


def times(perfect: int, trained: int | None) -> str:
    return str(perfect) if trained is None else f"{perfect} ({perfect / trained:.1f}x)"
