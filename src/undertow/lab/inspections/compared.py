"""Runs beside each other, from what they logged."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from undertow.errors import CheckpointError
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.run import Experiment
from undertow.lab.study.study import runs_in

Shares = dict[tuple[int | None, float], float]
"""Accuracy by length and temperature."""


@dataclass(frozen=True)
class Compared:
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
        return self.recipe.task.longest

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


def read_run(path: Path | str) -> Compared:
    """What a finished run left behind.

    Raises:
        CheckpointError: the run has not finished, or was not evaluated.
    """
    experiment = Experiment(path)
    accuracies: list[Shares] = []
    ends = []
    for run in experiment.runs:
        if not run.accuracy_file.is_file():
            raise CheckpointError(f"{run.folder} has no accuracy.json; run: undertow eval {path}")
        accuracies.append({(a.length, a.temperature): a.share for a in run.accuracies()})
        if not run.seconds_per_step():
            raise CheckpointError(
                f"{run.log_file} has no seconds_per_step, so the run cannot be compared"
            )
        ended = [entry for entry in run.log() if entry.get("event") == "end"]
        ends += [entry for entry in ended if {"tokens", "groups"} <= entry.keys()]
    if any(shares.keys() != accuracies[0].keys() for shares in accuracies):
        raise CheckpointError(
            f"the seeds of {path} were not tested alike; run: undertow eval {path}"
        )
    seconds = experiment.seconds_per_step()
    assert seconds is not None
    return Compared(
        experiment.runs[0].recipe(),
        accuracies,
        statistics.mean(entry["tokens"] for entry in ends) if ends else None,
        statistics.mean(entry["groups"] for entry in ends) if ends else None,
        seconds,
    )


def read_runs(paths: Sequence[Path]) -> tuple[list[Path], list[Compared]]:
    """The folders of some runs, a study's standing for those of its runs, and what they left."""
    folders = [run for path in paths for run in runs_in(path)]
    return folders, [read_run(folder) for folder in folders]


def labels(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """The names of some runs, or their paths if two would be called the same."""
    return list(names) if len(set(names)) == len(names) else [str(path) for path in paths]
