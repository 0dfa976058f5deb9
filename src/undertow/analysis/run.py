"""Inspect finished runs, or a recipe before it runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from undertow.analysis.choices import Choices, choices_figure, choices_table, measure_choices, pooled
from undertow.analysis.fidelity import fidelity_table, measure_fidelity, recommendation
from undertow.config import from_mapping, load_yaml
from undertow.errors import ConfigError
from undertow.evaluation.report import table
from undertow.evaluation.run import seed_folders
from undertow.files import write_text
from undertow.tasks import PadCollator
from undertow.training.build import count_parameters, load, outline, quiet_libraries
from undertow.training.recipe import Recipe
from undertow.training.run import MODEL, RECIPE, load_recipe


def inspect_fidelity(run: Path, examples: int) -> str:
    """How faithful each solver setting is on a run's model and the first held-out examples of its task.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: its model has no recurrence, or there are no examples.
    """
    if examples < 1:
        raise ConfigError(f"examples is {examples}; compare on 1 or more")
    quiet_libraries()
    folder = seed_folders(run)[0]
    recipe = from_mapping(Recipe, load_yaml(folder / RECIPE))
    model, tokenizer = load(str(folder / MODEL))
    size = recipe.task.size("valid", tokenizer)
    numbers = range(examples if size is None else min(examples, size))
    batch = PadCollator(tokenizer)([recipe.task.encode("valid", number, tokenizer) for number in numbers])
    found = measure_fidelity(model.train(), batch)
    return f"{fidelity_table(found)}\n\n{recommendation(found)}"


def inspect_choices(run: Path, examples: int) -> str:
    """How each seed's model spreads probability over the possible answers, with a file and a figure.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: its task has no fixed choices, or there are no examples.
    """
    if examples < 1:
        raise ConfigError(f"examples is {examples}; ask 1 or more")
    quiet_libraries()
    by_seed: dict[str, list[Choices]] = {}
    for folder in seed_folders(run):
        recipe = from_mapping(Recipe, load_yaml(folder / RECIPE))
        model, tokenizer = load(str(folder / MODEL))
        found = measure_choices(model, tokenizer, recipe.task, recipe.evaluation.lengths, examples)
        write_text(folder / "choices.json", json.dumps([dataclasses.asdict(one) for one in found], indent=1) + "\n")
        by_seed[folder.name] = found
    if recipe.evaluation.lengths:
        choices_figure(by_seed, run / "choices.png", recipe.name, f"{recipe.task.kind}: length")
    seeds = f" (mean of {len(by_seed)} seeds)" if len(by_seed) > 1 else ""
    number = len(recipe.task.choices())
    return f"{recipe.name}{seeds}\n\n{choices_table(pooled(list(by_seed.values())), number)}"


def inspect_parameters(path: Path, overrides: list[str]) -> str:
    """What a recipe would train, counted without its weights.

    Raises:
        ConfigError, CheckpointError: the recipe is wrong, or there is no config of its pretrained model.
    """
    quiet_libraries()
    recipe = load_recipe(path, overrides)
    counts = count_parameters(outline(recipe))
    return f"{recipe.name}\n\n" + table(["parameters", "number"], [[name, f"{count:,}"] for name, count in counts.items()])
