"""What a study's runs found: measures by combination, over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.run import Run
from undertow.lab.tables import table


@dataclass(frozen=True)
class Finding:
    """One combination over its seeds.

    Attributes:
        labels: its choices.
        measures: by name, one value a seed: "loss" (held-out loss at the end), "test loss",
            "accuracy at 12" and the like.
        curves: for each seed the steps and the held-out losses of its log.
        seconds: the median over its logs of the seconds a step.
        diverged: how many seeds ended because the loss was no number any more; they have no
            measures.
    """

    labels: tuple[str, ...]
    measures: Mapping[str, Sequence[float]]
    curves: Sequence[Sequence[tuple[int, float]]]
    seconds: float
    diverged: int = 0


def finding(labels: tuple[str, ...], recipe: Recipe) -> Finding:
    """What the folders of a combination's seeds say."""
    measures: dict[str, list[float]] = {}
    curves = []
    seconds = []
    lost = 0
    for seed in recipe.seeds:
        run = Run.of(recipe, seed)
        if run.diverged():
            lost += 1
            continue
        curve = [(int(e["step"]), float(e["eval_loss"])) for e in run.log() if "eval_loss" in e]
        curves.append(curve)
        seconds += run.seconds_per_step()
        values = {"loss": curve[-1][1]} if curve else {}
        if (loss := run.loss()) is not None:
            values["test loss"] = loss
        for entry in run.accuracies():
            suffix = "" if entry.length is None else f" at {entry.length}"
            sampled = "" if entry.temperature == 0 else f", temperature {entry.temperature:g}"
            values[f"accuracy{suffix}{sampled}"] = entry.share
            if entry.symbols and entry.symbol_share is not None:
                values["symbols" + suffix] = entry.symbol_share
        for name, value in values.items():
            measures.setdefault(name, []).append(value)
    return Finding(
        labels, measures, curves, statistics.median(seconds) if seconds else float("nan"), lost
    )


def findings_table(axes: Sequence[str], found: Sequence[Finding]) -> str:
    """A row a combination: the mean of each measure over the seeds, with the smallest and the
    largest."""
    names = list(dict.fromkeys(name for one in found for name in one.measures))
    rows, some = [], any(one.diverged for one in found)
    for one in found:
        cells = [spread(name, one.measures.get(name, [])) for name in names]
        rows.append(
            [
                *one.labels,
                *cells,
                f"{1000 * one.seconds:.0f}",
                *([one.diverged or ""] if some else []),
            ]
        )
    return table([*axes, *names, "ms a step", *(["diverged seeds"] if some else [])], rows)


def spread(name: str, values: Sequence[float]) -> str:
    if not values:
        return ""
    digits, scale = (4, 1.0) if "loss" in name else (1, 100.0)
    mean, low, high = (f"{scale * f(values):.{digits}f}" for f in (statistics.mean, min, max))
    return f"{mean} ({low} to {high})"
