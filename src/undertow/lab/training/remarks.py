"""What is to be known of a training before it starts, though it can be done."""

from __future__ import annotations

from typing import get_args

from transformers import PreTrainedTokenizerBase

from undertow.lab.runs.recipe import Recipe, TrainingSection
from undertow.lab.tasks import Split, TaskDataset

# In so few steps one without a rate is worth a remark.
FEW_STEPS = 10


def remarks(
    recipe: Recipe, sets: dict[str, TaskDataset], tokenizer: PreTrainedTokenizerBase, steps: int
) -> list[str]:
    """What was left out of the sets, and settings that a paper advises against or that leave little
    of so many steps."""
    found = [
        f"{examples.skipped:,} of {len(examples) + examples.skipped:,} {name} examples are left "
        f"out: they have more than training.max_tokens, {recipe.training.max_tokens}"
        for name, examples in sets.items()
        if examples.skipped
    ]
    splits: tuple[Split, ...] = get_args(Split)[:2]
    for split in splits:
        for reason, count in recipe.task.left_out(split, tokenizer).items():
            found.append(f"{count:,} rows of the {split} split are left out: {reason}")
    if recipe.recurrence is not None:
        pretrained, rate = recipe.model.path is not None, recipe.training.learning_rate
        advice = recipe.recurrence.advice(pretrained, rate)
        found += [] if advice is None else [advice]
    return found + warmup_remarks(recipe.training, steps)


def warmup_remarks(section: TrainingSection, steps: int) -> list[str]:
    """What a warm-up leaves of a short training."""
    if section.warmup_steps >= steps:
        return [
            f"training.warmup_steps is {section.warmup_steps}, but there are {steps} steps: the "
            f"rate never gets to {section.learning_rate:g}, and is 0 in the first step; take a "
            "shorter warm-up"
        ]
    if section.warmup_steps and steps <= FEW_STEPS:
        return [
            f"the first of the {steps} steps has learning rate 0, as the warm-up begins there; "
            "warmup_steps: 0 has none"
        ]
    return []
