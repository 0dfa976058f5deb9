"""What inspections look at: a run's model, and the first examples of a split of its task."""

from __future__ import annotations

from typing import Any

import torch

from undertow.errors import ConfigError
from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.run import Experiment, Run
from undertow.lab.tasks import PadCollator, Split, Task


def of_run(run: Run, examples: int) -> tuple[Recipe, Any, Any]:
    """The recipe, model and tokenizer of a run, to look at some examples with.

    Raises:
        ConfigError: there are no examples.
    """
    if examples < 1:
        raise ConfigError(f"examples is {examples}; use 1 or more")
    quiet_libraries()
    return run.recipe(), *run.load()


def first_items(task: Task, split: Split, tokenizer: Any, examples: int) -> list[dict[str, Any]]:
    """The first examples of a split, encoded; all of them if it holds fewer."""
    size = task.size(split, tokenizer)
    count = examples if size is None else min(examples, size)
    return [task.encode(split, index, tokenizer) for index in range(count)]


def batches_of(
    experiment: Experiment, examples: int, *splits: Split
) -> tuple[Any, Recipe, list[list[dict[str, torch.Tensor]]]]:
    """The first seed's model, the recipe, and batches of the first examples of some splits of its
    task, the shortest first."""
    recipe, model, tokenizer = of_run(experiment.runs[0], examples)
    collate, found = PadCollator(tokenizer), []
    for split in splits:
        items = first_items(recipe.task, split, tokenizer, examples)
        items.sort(key=lambda item: len(item["input_ids"]))
        found.append([collate(items[start : start + 32]) for start in range(0, len(items), 32)])
    return model, recipe, found
