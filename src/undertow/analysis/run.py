"""Inspect finished runs, or a recipe before it runs."""

from __future__ import annotations

from pathlib import Path

from undertow.analysis.fidelity import fidelity_table, measure_fidelity, recommendation
from undertow.config import from_mapping, load_yaml
from undertow.errors import ConfigError
from undertow.evaluation.report import table
from undertow.evaluation.run import seed_folders
from undertow.tasks import PadCollator
from undertow.tasks.encode import encode
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
    batch = PadCollator(tokenizer)([encode(recipe.task.example("valid", i), tokenizer) for i in range(examples)])
    found = measure_fidelity(model.train(), batch)
    return f"{fidelity_table(found)}\n\n{recommendation(found)}"


def inspect_parameters(path: Path, overrides: list[str]) -> str:
    """What a recipe would train, counted without its weights.

    Raises:
        ConfigError, CheckpointError: the recipe is wrong, or there is no config of its pretrained model.
    """
    quiet_libraries()
    recipe = load_recipe(path, overrides)
    counts = count_parameters(outline(recipe))
    return f"{recipe.name}\n\n" + table(["parameters", "number"], [[name, f"{count:,}"] for name, count in counts.items()])
