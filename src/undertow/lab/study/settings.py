"""A grid of recipes: every combination of some choices, with every seed."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from undertow.errors import ConfigError
from undertow.lab.runs.recipe import Recipe, Seed, check_place, check_seeds
from undertow.mapping import apply_overrides, from_mapping
from undertow.plugins import full_name
from undertow.settings import settings

MOST_RUNS = 10_000


@settings
class Study:
    """A grid of recipes."""

    name: str
    """Name of the study, and of the folder that its runs' folders are made in."""
    recipe: dict[str, Any]
    """What all runs have in common: a recipe without a name."""
    axes: dict[str, dict[str, dict[str, Any]]]
    """For each axis the choices, by label: what a choice sets in the recipe, by dotted key."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Each combination is trained once a seed."""
    workers: PositiveInt = 2
    """Runs at a time on a CPU, each with training.threads threads, or one. Where there are GPUs,
    each has a run."""
    output: str = "runs"
    """Folder that the study's folder is made in."""

    def __post_init__(self) -> None:
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

    def with_plugins(self, names: Sequence[str]) -> Study:
        """The same study, whose runs have these plugins beside their own."""
        plugins = [*self.recipe.get("plugins", ()), *map(full_name, names)]
        return replace(self, recipe=self.recipe | {"plugins": plugins}) if names else self

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
