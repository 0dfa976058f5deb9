"""A run: the folder that one seed of a recipe is trained in, and an experiment: all its seeds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from undertow.errors import CheckpointError
from undertow.files import remove_leftovers, write_json
from undertow.lab.runs.checkpoints import checkpoints, remove
from undertow.lab.runs.loading import load
from undertow.lab.runs.lock import locked
from undertow.lab.runs.log import read_log
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.results import Accuracy, read_accuracies, read_loss
from undertow.lab.runs.versions import versions
from undertow.manifest import check_model
from undertow.mapping import load_config, load_yaml, save_yaml, to_mapping
from undertow.plugins import load_plugins

# What may be another after a training has diverged, and still go on from its last good checkpoint.
REMEDIES = (
    "training.learning_rate",
    "training.warmup_steps",
    "training.clip",
    "training.gate_multiplier",
    "training.beta2",
    "training.weight_decay",
    "training.schedule",
    "training.floor",
    "training.restart_every",
    "training.precision",
    "recurrence.alpha",
)
# What of a recipe's training does not decide the weights.
ASIDE = (
    "log_every",
    "save_every",
    "evaluate_every",
    "compare_every",
    "threads",
    "compile",
    "sharding",
    "report_to",
)
# Seconds to wait for a process that writes into the same folder.
WAIT = 60.0


class Run:
    """A folder with one training: its recipe, versions, log, checkpoints, model and results.

    Whatever reads or writes a run's files does so by this. Files are written whole or not at all.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.recipe_file = self.folder / "recipe.yaml"
        self.log_file = self.folder / "log.jsonl"
        self.model_folder = self.folder / "model"
        self.accuracy_file = self.folder / "accuracy.json"
        self.loss_file = self.folder / "loss.json"

    @classmethod
    def of(cls, recipe: Recipe, seed: int) -> Run:
        """The run of a recipe's seed, made or not."""
        return cls(Path(recipe.output) / recipe.name / f"seed-{seed}")

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        """Whether its training came to its end: a folder called model is there."""
        return self.model_folder.is_dir()

    @property
    def results(self) -> list[Path]:
        """The files that its own evaluation may write."""
        return [self.accuracy_file, self.loss_file]

    def beside(self) -> list[Run]:
        """The runs of all seeds of this experiment, this one among them, that have a recipe."""
        return [Run(path.parent) for path in sorted(self.folder.parent.glob("seed-*/recipe.yaml"))]

    # What it holds

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe that it was made by, with `--section.key=value` overrides applied.

        Raises:
            CheckpointError: it is damaged.
            ConfigError: an override is wrong, or a plugin is not there.
        """
        self.load_plugins()
        try:
            made_by = load_config(Recipe, self.recipe_file)
        except ValueError as error:  # of a key, of YAML or of its encoding
            raise self._damaged(error) from error
        return load_config(Recipe, self.recipe_file, overrides) if overrides else made_by

    def load(self, depth: int | None = None) -> tuple[Any, PreTrainedTokenizerBase]:
        """Its model in fp32 and the tokenizer, set to run `depth` iterations; as many as it was
        trained with if None.

        Raises:
            CheckpointError: there is no model, or it is damaged.
            ConfigError: the depth is below 1, or the model has no recurrence in depth.
        """
        self.load_plugins()
        return load(str(self.model_folder), depth)

    def load_plugins(self) -> None:
        """Import the plugins that its recipe names, none of which may be in its own folder or its
        experiment's: a folder from elsewhere shall not bring code.

        Raises:
            CheckpointError: the recipe is damaged.
            ConfigError: one is there, or is missing.
        """
        if self.recipe_file.is_file():
            try:
                held = load_yaml(self.recipe_file).get("plugins")
            except ValueError as error:
                raise self._damaged(error) from error
            names = [str(name) for name in held] if isinstance(held, list) else []
            folder = self.folder.resolve()
            load_plugins(names, outside=folder.parent if "seed-" in folder.name else folder)

    def _damaged(self, error: ValueError) -> CheckpointError:
        return CheckpointError(
            f"{self.recipe_file} is damaged ({error}); write the recipe that the run was made "
            "by there, or remove its folder"
        )

    def log(self) -> list[dict[str, Any]]:
        """The entries of its log, oldest first; see `read_log`."""
        return read_log(self.log_file)

    def seconds_per_step(self) -> list[float]:
        """The medians that its log has, a line each."""
        return [entry["seconds_per_step"] for entry in self.log() if "seconds_per_step" in entry]

    def diverged(self) -> bool:
        """Whether it ended because it diverged."""
        return any(entry.get("event") == "diverged" for entry in self.log()[-1:])

    def has_diverged(self) -> bool:
        """Whether it diverged at any time, whatever became of it."""
        return any(entry.get("event") == "diverged" for entry in self.log())

    def accuracies(self) -> tuple[Accuracy, ...]:
        """What its last evaluation found; none if it measured no accuracy."""
        return read_accuracies(self.accuracy_file) if self.accuracy_file.is_file() else ()

    def loss(self) -> float | None:
        """The loss a token, in nats, that its last evaluation found; None if it measured none."""
        return read_loss(self.loss_file) if self.loss_file.is_file() else None

    # What is written into it

    def locked(self, wait: float = 0.0) -> AbstractContextManager[None]:
        """Hold it for this process; see `lock.locked`."""
        return locked(self.folder, wait)

    def save_versions(self) -> None:
        """Write down what it is trained with."""
        write_json(self.folder / "versions.json", versions())

    def save_recipe(self, recipe: Recipe) -> None:
        """Write down what it is trained by."""
        save_yaml(recipe, self.recipe_file)

    def write_results(self, name: str, results: Any, recipe: Recipe | None = None) -> None:
        """Write a JSON file of results, and with a recipe down in the folder's how its model was
        evaluated last: what a study and comparisons go by. Another process that writes there is
        waited for."""
        with self.locked(WAIT):
            self.clean()
            write_json(self.folder / name, results)
            if recipe is not None and (made_by := self.recipe()).evaluation != recipe.evaluation:
                evaluated = dataclasses.replace(made_by, evaluation=recipe.evaluation)
                self.save_recipe(evaluated)

    def clean(self) -> None:
        """Remove what a killed command left: half-written files, and checkpoints beside a model
        that is whole.

        Raises:
            CheckpointError: the model is not what was saved, so its checkpoints stay.
        """
        remove_leftovers(self.folder)
        if self.finished and (old := checkpoints(self.folder)):
            check_model(self.model_folder)
            for path in old:
                remove(path)

    def check(self, recipe: Recipe) -> dict[str, Any]:
        """Refuse to go on in the folder of another experiment, or beside seeds of another.

        Once a seed has diverged, the remedies against that may change: its own, and those of the
        others beside it, of which the finished ones stay as they are. Those in which this run's own
        recipe differs are returned, as they were, by key.

        Raises:
            CheckpointError: the recipe that this run, or another seed's beside it, was made with
                differs in what it trains, or cannot be read.
        """
        model, now = self.model_folder, trained_part(recipe)
        if model.exists() and not model.is_dir():  # better known before a training than after it
            raise CheckpointError(
                f"{model} is a file, where the model's folder belongs; move it away"
            )
        if not self.recipe_file.exists() and (model.exists() or checkpoints(self.folder)):
            raise CheckpointError(
                f"{self.folder} has lost its {self.recipe_file.name}, so what it was trained by is "
                "not known; put it back, or remove the folder"
            )
        changed: dict[str, Any] = {}
        for run in self.beside():
            before = trained_part(run.recipe())
            differing = {k: before.get(k) for k in now | before if before.get(k) != now.get(k)}
            for key, value in differing.items():
                if key not in REMEDIES or not run.may_change():
                    raise CheckpointError(
                        f"{run.folder} was made by another recipe, whose {key} is {value} and not "
                        f"{now.get(key)}; choose another name or remove the folder"
                    )
            if run.folder == self.folder:
                changed = differing
        return changed

    def may_change(self) -> bool:
        """Whether a seed of the experiment has diverged, so that a remedy may be another than in
        this folder."""
        seeds = [Run(path.parent) for path in self.folder.parent.glob("seed-*/log.jsonl")]
        return any(
            run.has_diverged() for run in seeds if run.folder != self.folder or not self.finished
        )


class Experiment:
    """A folder with the finished runs of a recipe's seeds; that of a single run stands for it.

    Raises:
        CheckpointError: there is no finished run there.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        alone = Run(self.folder)
        found = [alone] if alone.recipe_file.is_file() else []
        found = found or [Run(path) for path in sorted(self.folder.glob("seed-*"))]
        self.runs = [run for run in found if run.finished]
        if not self.runs:
            what = "it has no recipe.yaml" if self.folder.exists() else "there is no such folder"
            if found:
                what = "its training has not finished; run `undertow train` again"
            raise CheckpointError(f"{self.folder} is no finished run: {what}")

    @property
    def name(self) -> str:
        return self.folder.name

    def seconds_per_step(self) -> float | None:
        """The median over its runs of the medians over their logs; None if none says so."""
        found = [statistics.median(s) for run in self.runs if (s := run.seconds_per_step())]
        return statistics.median(found) if found else None


def trained_part(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides the weights, by dotted key."""
    sections = to_mapping(recipe)
    solved = recipe.recurrence is not None or recipe.model.path is not None  # which may have one
    kept: dict[str, Any] = {}
    for name in ("task", "model", "recurrence", "depth", "solver", "lora", "training"):
        section = sections[name]
        if name == "solver" and not solved:
            continue
        if isinstance(section, dict):
            kept |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            kept[name] = section
    for key in ASIDE:
        kept.pop(f"training.{key}", None)
    return kept
