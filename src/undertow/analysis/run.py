"""Inspect a finished run."""

from __future__ import annotations

from pathlib import Path

from undertow.analysis.fidelity import fidelity_table, measure_fidelity, recommendation
from undertow.config import from_mapping, load_yaml
from undertow.errors import ConfigError
from undertow.evaluation.run import seed_folders
from undertow.tasks import PadCollator
from undertow.training.build import load, quiet_libraries
from undertow.training.recipe import Recipe
from undertow.training.run import MODEL, RECIPE


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
