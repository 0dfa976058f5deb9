"""Whether a recipe's examples fit its model and its model fits this machine: told before anything
is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.runs.loading import ADAPTER, check_tokens, context_of, load_tokenizer
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.run import Run
from undertow.lab.tasks import TaskDataset
from undertow.lab.tasks.encode import encode
from undertow.lab.training.build import count_parameters, outline, tokenizer_for
from undertow.lab.training.machine import check_memory

MOST_GENERATED = 10_000_000
"""The most examples of a task without end that are asked for at a time."""


def check_fit(recipe: Recipe) -> None:
    """Make sure that a recipe can be trained and evaluated here, by a look at its data and an
    outline of its model. Where each seed is trained already, the data alone counts.

    Raises:
        CheckpointError: the tokenizer gives ids that the pretrained model has no embedding for.
        ConfigError: the model takes more memory than there is, or more is asked for than can be
            looked at.
        DataError: the test split is malformed, or an example is longer than the model reads.
    """
    check_data(recipe)
    path = recipe.model.path
    adapter = path is not None and (Path(path) / ADAPTER).is_file()
    # What an adapter's base model is, is known when it is loaded.
    if adapter or all(Run.of(recipe, seed).finished for seed in recipe.seeds):
        return
    model = outline(recipe)
    tokenizer = tokenizer_for(recipe) if path is None else load_tokenizer(path)
    counts = count_parameters(model)
    check_memory(counts["parameters"], counts["trainable"])
    check_model(recipe, model, tokenizer)


def check_model(recipe: Recipe, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make sure that a model reads all tokens and the longest examples of a recipe.

    Raises:
        CheckpointError, DataError: as `check_fit`.
    """
    if recipe.model.path is not None:
        check_tokens(model, tokenizer, recipe.model.path)
    context = context_of(model)
    task = recipe.task
    if context is None or task.windows:
        return
    longest = task.longest
    if longest is not None and recipe.training.max_tokens is None:
        try:
            tokens = len(encode(task.example("train", 0, longest), tokenizer)["input_ids"])
        except DataError:  # none is of that length
            tokens = 0
        if tokens > context:
            raise DataError(
                f"a training example of length {longest} has {tokens} tokens, but the model reads "
                f"{context} at most; raise model.positions, shorten the examples, or leave such "
                "ones out by training.max_tokens"
            )
    for length in recipe.evaluation.lengths:
        tokens = len(encode(task.example("test", 0, length), tokenizer)["input_ids"])
        if tokens > context:
            raise DataError(
                f"evaluation.lengths holds {length}, of which an example has {tokens} tokens, but "
                f"the model reads {context} at most; leave that length out, or raise "
                "model.positions"
            )
    size = task.size("test") if task.measured_by == "answers" else None
    if size is not None:
        count = min(size, recipe.evaluation.examples)
        TaskDataset(task, "test", tokenizer, count, max_tokens=context).check_lengths()


def check_data(recipe: Recipe) -> None:
    """Refuse more examples of a task without end than can be drawn, and look at the test split, so
    that what is wrong with it is not told after a training only.

    Raises:
        ConfigError: evaluation.examples or training.evaluate_examples is too large.
        ConfigError, DataError: there is no such file, it is malformed, or there is no test example
            of a length.
    """
    for key, count in (
        ("evaluation.examples", recipe.evaluation.examples),
        ("training.evaluate_examples", recipe.training.evaluate_examples),
    ):
        if recipe.task.endless and count > MOST_GENERATED:
            raise ConfigError(
                f"{key} is {count}, and {recipe.task.kind} is generated without end; use "
                f"{MOST_GENERATED:,} or fewer"
            )
    recipe.task.check("test")
    for length in recipe.evaluation.lengths:
        recipe.task.example("test", 0, length)
