"""What a recipe would train."""

from __future__ import annotations

from pathlib import Path

from undertow.lab.inspections.inspection import inspection
from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.recipe import load_recipe
from undertow.lab.tables import table
from undertow.lab.training.build import count_parameters, outline


@inspection("parameters", "how many a recipe would train, without loading any", settings=True)
def inspect_parameters(path: Path, overrides: list[str]) -> str:
    """What a recipe would train, counted without its weights.

    Raises:
        ConfigError, CheckpointError: the recipe is wrong, or there is no config of its pretrained
            model.
    """
    quiet_libraries()
    recipe = load_recipe(path, overrides)
    counts = count_parameters(outline(recipe))
    return f"{recipe.name}\n\n" + table(
        ["parameters", "number"], [[name, f"{count:,}"] for name, count in counts.items()]
    )
