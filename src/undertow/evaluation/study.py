"""A study: every combination of some choices, each trained and evaluated with every seed; one table and one figure of it.

    undertow study recipes/cpu/gradient-depth-s3.yaml

Several runs go on at a time, in processes of their own. The same command goes on where it was interrupted.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from undertow.config import from_mapping, to_mapping
from undertow.errors import ConfigError
from undertow.evaluation.report import curves_figure, table
from undertow.evaluation.run import evaluate_folder, evaluate_loss
from undertow.files import write_text
from undertow.training.build import quiet_libraries
from undertow.training.log import read_log
from undertow.training.recipe import Recipe
from undertow.training.run import LOG, MODEL, run_folder, train, versions


@dataclass(frozen=True)
class Study:
    """A grid of recipes."""

    name: str
    """Name of the study, and of the folder that its runs' folders are made in."""
    recipe: dict[str, Any]
    """What all runs have in common: a recipe without a name."""
    axes: dict[str, dict[str, dict[str, Any]]]
    """For each axis the choices, by label: what a choice sets in the recipe, by dotted key."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each combination is trained once a seed."""
    workers: int = 2
    """Runs at a time, each with training.threads threads, or one."""
    output: str = "runs"
    """Folder that the study's folder is made in."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; use 1 or more")
        if not self.seeds:
            raise ConfigError("seeds is empty; give at least one seed")
        empty = [axis for axis, choices in self.axes.items() if not choices]
        if not self.axes or empty:
            raise ConfigError(f"axes{'.' + empty[0] if empty else ''} is empty; give at least one choice")

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """The labels of every combination, one of each axis."""
        return itertools.product(*self.axes.values())

    def variant(self, labels: Sequence[str]) -> Recipe:
        """The recipe of one combination.

        Raises:
            ConfigError: a choice sets a key that recipes do not have, or a value that does not fit.
        """
        mapping: dict[str, Any] = deepcopy(self.recipe)
        for axis, label in zip(self.axes.values(), labels, strict=True):
            for key, value in axis[label].items():
                section = mapping
                *parents, last = key.split(".")
                for parent in parents:
                    section = section.setdefault(parent, {})
                section[last] = deepcopy(value)
        mapping |= {
            "name": "_".join(re.sub(r"[^\w.]+", "-", label).strip("-") for label in labels),
            "seeds": list(self.seeds),
        }
        return from_mapping(Recipe, mapping | {"output": str(self.folder)})


@dataclass(frozen=True)
class Finding:
    """One combination over its seeds.

    Attributes:
        labels: its choices.
        measures: by name, one value a seed: "loss" (held-out loss at the end), "test loss", "accuracy at 12" and the like.
        curves: for each seed the steps and the held-out losses of its log.
        seconds: the median over its logs of the seconds a step.
    """

    labels: tuple[str, ...]
    measures: Mapping[str, Sequence[float]]
    curves: Sequence[Sequence[tuple[int, float]]]
    seconds: float


def study(settings: Study) -> str:
    """Train what is not trained yet, and write `summary.json`, `summary.md` and `losses.png`; returns the table.

    Raises:
        ConfigError: a combination is no recipe.
        UndertowError: a run cannot be made.
    """
    recipes = {labels: settings.variant(labels) for labels in settings.combinations()}  # mistakes come first
    with ProcessPoolExecutor(settings.workers, get_context("spawn")) as pool:
        jobs = [pool.submit(train_and_evaluate, recipe, seed) for seed in settings.seeds for recipe in recipes.values()]
        try:
            for number, job in enumerate(as_completed(jobs), 1):
                print(f"{number}/{len(jobs)} {job.result()}", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    found = [finding(labels, recipe) for labels, recipe in recipes.items()]
    record = {
        "study": to_mapping(settings),
        "versions": versions(),
        "findings": [vars(one) for one in found],
    }
    write_text(settings.folder / "summary.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    text = findings_table(list(settings.axes), found)
    write_text(settings.folder / "summary.md", text + "\n")
    curves_figure(
        {one.labels: one.curves for one in found}, settings.folder / "losses.png", settings.name, "held-out loss (nats)"
    )
    return text


def train_and_evaluate(recipe: Recipe, seed: int) -> Path:
    """Train and evaluate one recipe with one seed, unless that is done; what it prints goes to a file beside its folder."""
    folder = run_folder(recipe, seed)
    if (folder / MODEL).is_dir() and evaluated(folder):
        return folder
    quiet_libraries()
    torch.set_num_threads(recipe.training.threads or 1)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.output").open("w") as output, redirect_stdout(output), redirect_stderr(output):
        train(recipe, seed)
        (evaluate_loss if recipe.task.measured_by == "loss" else evaluate_folder)(folder, recipe)
    return folder


def evaluated(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("accuracy.json", "loss.json"))


def finding(labels: tuple[str, ...], recipe: Recipe) -> Finding:
    """What the folders of a combination's seeds say."""
    measures: dict[str, list[float]] = {}
    curves, seconds = [], []
    for seed in recipe.seeds:
        folder = run_folder(recipe, seed)
        log = read_log(folder / LOG)
        curve = [(int(entry["step"]), float(entry["eval_loss"])) for entry in log if "eval_loss" in entry]
        curves.append(curve)
        seconds += [entry["seconds_per_step"] for entry in log if "seconds_per_step" in entry]
        values = {"loss": curve[-1][1]} if curve else {}
        if (folder / "loss.json").is_file():
            values["test loss"] = json.loads((folder / "loss.json").read_text())["loss"]
        if (folder / "accuracy.json").is_file():
            for entry in json.loads((folder / "accuracy.json").read_text()):
                suffix = "" if entry["length"] is None else f" at {entry['length']}"
                kind = "accuracy" if entry["temperature"] == 0 else f"accuracy, temperature {entry['temperature']:g},"
                values[kind + suffix] = entry["correct"] / entry["total"]
                if entry.get("symbols"):
                    values["symbols" + suffix] = entry["right_symbols"] / entry["symbols"]
        for name, value in values.items():
            measures.setdefault(name, []).append(value)
    return Finding(labels, measures, curves, statistics.median(seconds) if seconds else float("nan"))


def findings_table(axes: Sequence[str], found: Sequence[Finding]) -> str:
    """A row a combination: the mean of each measure over the seeds, with the smallest and the largest."""
    names = list(dict.fromkeys(name for one in found for name in one.measures))
    rows = []
    for one in found:
        cells = [spread(name, one.measures.get(name, [])) for name in names]
        rows.append([*one.labels, *cells, f"{1000 * one.seconds:.0f}"])
    return table([*axes, *names, "ms a step"], rows)


def spread(name: str, values: Sequence[float]) -> str:
    if not values:
        return ""
    digits, scale = (4, 1.0) if "loss" in name else (1, 100.0)
    mean, low, high = (f"{scale * f(values):.{digits}f}" for f in (statistics.mean, min, max))
    return f"{mean} ({low} to {high})"
