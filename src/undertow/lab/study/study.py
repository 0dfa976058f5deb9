"""A study: every combination of some choices, each trained and evaluated with every seed; one table
and one figure of it.

    undertow study recipes/cpu/study-gradients-s3.yaml

Several runs go on at a time, in processes of their own. The same command goes on where it was
interrupted.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from undertow.config import apply_overrides, from_mapping, load_config, to_mapping
from undertow.errors import CheckpointError, ConfigError, DivergedError, Interrupted
from undertow.files import read_json, write_text
from undertow.lab.evaluation.accuracy import read_accuracies
from undertow.lab.evaluation.figures import curves_figure
from undertow.lab.evaluation.loss import read_loss
from undertow.lab.evaluation.run import check_recipe, evaluate_folder, evaluate_loss
from undertow.lab.runs.folder import LOG, MODEL, RECIPE, check_folder, run_folder, versions
from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.lock import locked
from undertow.lab.runs.log import diverged, read_log
from undertow.lab.runs.recipe import Recipe, check_place, check_seeds
from undertow.lab.signals import hearing, stop
from undertow.lab.tables import table
from undertow.lab.training.run import train
from undertow.paths import takes_paths

EVALUATIONS = ("accuracy.json", "loss.json")
SUMMARY = "summary.json"
GOES_ON = (
    "finished runs are kept, and the same command goes on with the others from their last "
    "checkpoints"
)
MOST_RUNS = 10_000


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
        check_place(self.name, self.output)
        check_seeds(self.seeds)
        empty = [axis for axis, choices in self.axes.items() if not choices]
        if not self.axes or empty:
            raise ConfigError(
                f"axes{'.' + empty[0] if empty else ''} is empty; give at least one choice"
            )
        count = math.prod(map(len, self.axes.values())) * len(self.seeds)
        if count > MOST_RUNS:
            raise ConfigError(f"axes and seeds make {count:,} runs; use {MOST_RUNS:,} or fewer")
        choices = {
            f"axes.{axis}.{label}": self.axes[axis][label]
            for axis in self.axes
            for label in self.axes[axis]
        }
        for where, keys in {"recipe": self.recipe, **choices}.items():
            for key in ("name", "seeds", "output"):
                if key in keys:
                    raise ConfigError(
                        f"{where}.{key} is set, but a study sets it itself; remove it"
                    )

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
        choices = [axis[label] for axis, label in zip(self.axes.values(), labels, strict=True)]
        settings = [
            f"--{key}={json.dumps(value, ensure_ascii=False)}"
            for keys in choices
            for key, value in keys.items()
        ]
        own = {
            "name": "_".join(re.sub(r"[^\w.]+", "-", label).strip("-") for label in labels),
            "seeds": list(self.seeds),
            "output": str(self.folder),
        }
        return from_mapping(Recipe, apply_overrides(self.recipe, settings) | own)

    def recipes(self) -> dict[tuple[str, ...], Recipe]:
        """The recipe of every combination, by its labels.

        Raises:
            ConfigError: a combination is no recipe, or two would share a folder.
        """
        found = {labels: self.variant(labels) for labels in self.combinations()}
        owners: dict[str, tuple[str, ...]] = {}
        for labels, recipe in found.items():
            owner = owners.setdefault(recipe.name, labels)
            if owner != labels:
                both = f"{', '.join(owner)} and {', '.join(labels)}"
                raise ConfigError(
                    f"{both} would share the folder {recipe.name}; give one another label"
                )
        return found


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


def study(settings: Study) -> str:
    """Train what is not trained yet, and write `summary.json`, `summary.md` and `losses.png`;
    returns the table.

    Raises:
        ConfigError: a combination is no recipe.
        DataError: a test file is malformed.
        CheckpointError: a run's folder was made by another recipe.
        UndertowError: a run cannot be made. Those that are under way are finished first.
    """
    recipes = settings.recipes()
    for recipe in recipes.values():
        check_recipe(recipe)
    with locked(settings.folder):
        make(settings, recipes)
        return summary(settings, recipes)


def make(settings: Study, recipes: Mapping[tuple[str, ...], Recipe]) -> None:
    """Train and evaluate what is not yet. SIGINT and SIGTERM are passed on to the runs, which save
    a checkpoint each."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)
        if len(heard) > 1:
            for process in active_children():
                process.kill()
            raise Interrupted(number, GOES_ON)

    jobs = [
        (recipe, seed)
        for seed in settings.seeds
        for recipe in recipes.values()
        if not finished(recipe, seed)
    ]
    waiting, number = iter(jobs), 0
    workers = max(1, min(settings.workers, len(jobs)))
    with hearing(hear), ProcessPoolExecutor(workers, get_context("spawn"), begin_worker) as pool:
        # Only as many as go on at a time are handed over: a pool runs what it holds even after a
        # failure or a signal.
        running = {
            pool.submit(train_and_evaluate, *job)
            for job in itertools.islice(waiting, settings.workers)
        }
        while running:
            done, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
            for job in done:
                try:
                    folder = job.result()
                except Interrupted as error:
                    heard.append(error.number)
                    continue
                except BrokenProcessPool as error:
                    if heard:
                        continue
                    raise ConfigError(
                        "the process of a run was killed, as it is when memory runs out; workers "
                        f"is {settings.workers}: use fewer, and the same command goes on"
                    ) from error
                number += 1
                print(f"{number}/{len(jobs)} {folder}", file=sys.stderr, flush=True)
            if heard:
                for (
                    process
                ) in active_children():  # again and again, as one may have been between two runs
                    process.terminate()
            else:
                running |= {
                    pool.submit(train_and_evaluate, *job)
                    for job in itertools.islice(waiting, len(done))
                }
    if heard:
        raise Interrupted(heard[0], GOES_ON)


def summary(settings: Study, recipes: Mapping[tuple[str, ...], Recipe]) -> str:
    """Write what the runs' folders say, and return it as a table."""
    found = [finding(labels, recipe) for labels, recipe in recipes.items()]
    record = {
        "study": to_mapping(settings),
        "versions": versions(),
        "findings": [vars(one) for one in found],
    }
    write_text(settings.folder / SUMMARY, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    text = findings_table(list(settings.axes), found)
    write_text(settings.folder / "summary.md", text + "\n")
    curves_figure(
        {one.labels: one.curves for one in found},
        settings.folder / "losses.png",
        settings.name,
        "held-out loss (nats)",
    )
    return text


@takes_paths
def runs_in(path: Path) -> list[Path]:
    """The folders of a finished study's runs, in the study's order; of any other folder, that
    folder itself."""
    if not (path / SUMMARY).is_file():
        return [path]
    summary = read_json(path / SUMMARY)
    try:
        settings = from_mapping(
            Study, summary["study"] if isinstance(summary, dict) and "study" in summary else summary
        )
    except ConfigError as error:
        raise CheckpointError(
            f"{path / SUMMARY} holds no study ({error}); run `undertow study` again"
        ) from error
    return [path / recipe.name for recipe in settings.recipes().values()]


def finished(recipe: Recipe, seed: int) -> bool:
    """Whether a run is trained, and evaluated as the recipe says.

    Raises:
        CheckpointError: its folder was made by another recipe.
    """
    folder = run_folder(recipe, seed)
    mended = check_folder(folder, recipe)
    for name in EVALUATIONS:
        if (folder / name).is_dir():
            raise CheckpointError(
                f"{folder / name} is a folder, where a run's results belong; move it away"
            )
    if diverged(folder / LOG):
        return not mended
    if not (folder / MODEL).is_dir() or not any((folder / name).is_file() for name in EVALUATIONS):
        return False
    return load_config(Recipe, folder / RECIPE).evaluation == recipe.evaluation


def begin_worker() -> None:
    """Leave signals to the process that started this one, which passes them on, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # between two runs
    end_with_parent()


def end_with_parent() -> None:
    """End this process when the one that started it ends, however it ends.

    A pool's process would finish its run first, beside whatever is started next. Nothing on disk is
    lost by that: the same command goes on from the last checkpoint.
    """
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def train_and_evaluate(recipe: Recipe, seed: int) -> Path:
    """Train and evaluate one recipe with one seed; what it prints goes to a file beside its
    folder."""
    folder = run_folder(recipe, seed)
    quiet_libraries()
    torch.set_num_threads(recipe.training.threads or 1)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for name in EVALUATIONS:  # they are not what the recipe that is saved next says
        (folder / name).unlink(missing_ok=True)
    printed = folder.parent / f"{folder.name}.output"
    with (
        printed.open("w") as output,
        redirect_stdout(output),
        redirect_stderr(output),
        hearing(stop, [signal.SIGTERM]),
    ):
        try:
            train(recipe, seed)
        except DivergedError as error:  # a finding like others
            print(error)
            return folder
        (evaluate_loss if recipe.task.measured_by == "loss" else evaluate_folder)(folder, recipe)
    return folder


def finding(labels: tuple[str, ...], recipe: Recipe) -> Finding:
    """What the folders of a combination's seeds say."""
    measures: dict[str, list[float]] = {}
    curves, seconds, lost = [], [], 0
    for seed in recipe.seeds:
        folder = run_folder(recipe, seed)
        log = read_log(folder / LOG)
        if diverged(folder / LOG):
            lost += 1
            continue
        curve = [
            (int(entry["step"]), float(entry["eval_loss"])) for entry in log if "eval_loss" in entry
        ]
        curves.append(curve)
        seconds += [entry["seconds_per_step"] for entry in log if "seconds_per_step" in entry]
        values = {"loss": curve[-1][1]} if curve else {}
        if (folder / "loss.json").is_file():
            values["test loss"] = read_loss(folder / "loss.json")
        if (folder / "accuracy.json").is_file():
            for entry in read_accuracies(folder / "accuracy.json"):
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
