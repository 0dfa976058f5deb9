"""The order in which a task's examples are trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.runs.recipe import Recipe, TrainingSection
from undertow.lab.tasks import Task, TaskDataset
from undertow.lab.training.machine import check_order
from undertow.lab.training.order import Shuffled

# Batches among which examples are sorted by length: enough to save padding, few enough to stay well
# mixed.
BUCKET_BATCHES = 50


def training_set(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    section: TrainingSection,
    seed: int,
    context: int | None = None,
) -> tuple[Subset[dict[str, list[int]]], int]:
    """The examples of the whole training in their order, and how many of the split were too long.

    A pure function of its arguments, so that a resumed run goes on with the batch after the last
    one. A finite number of examples is shuffled anew for each pass. The training has as many
    examples as fill its optimiser steps.

    `context` is the most tokens that the model reads. An example of more is an error, unless
    training.max_tokens leaves it out; what is looked through for such ones here is a data set, and
    of a task without end what is put into batches by length.

    Raises:
        ConfigError: epochs of a task that has no end, or a training.max_tokens beyond the context.
        DataError: every example is too long, or one is and training.max_tokens is not set.
    """
    limit = most_tokens(section, context)
    a_step = section.batch * section.accumulate
    wanted = section.steps * a_step
    if section.epochs is None and not task.ordered_lazily:
        check_order(wanted)
    size = task.size("train", tokenizer)
    count = size if section.examples is None else section.examples
    endless = count is None
    if endless and section.epochs is not None:
        raise ConfigError(
            f"training.epochs is set, but {task.kind} is generated without end; set "
            "training.examples as well"
        )
    if task.ordered_lazily and section.max_tokens is not None:
        raise ConfigError(
            f"training.max_tokens leaves nothing out of {task.kind}, which are cut to windows; set "
            "task.context in its place"
        )
    dataset = TaskDataset(
        task.seeded(seed),
        "train",
        tokenizer,
        wanted if endless else count,
        max_tokens=limit,
        overlong="error" if section.max_tokens is None else "skip",
    )
    if not len(dataset):
        raise DataError(
            f"no training example is left: all {dataset.skipped} have more than "
            f"{section.max_tokens} tokens; raise training.max_tokens"
        )
    if section.epochs is not None:
        wanted = -(-section.epochs * len(dataset) // a_step) * a_step
        if not task.ordered_lazily:
            check_order(wanted)
    if task.ordered_lazily:  # windows are alike, so there is nothing to put together by length
        return Subset(dataset, Shuffled(len(dataset), wanted, seed)), dataset.skipped
    lengths = dataset.lengths() if section.bucket_by_length or not endless else []
    if section.max_tokens is None and not task.windows:
        dataset.check_lengths(lengths)
    generator = random.Random(seed)
    order: list[int] = []
    while len(order) < wanted:
        passed = list(range(len(dataset)))
        if not endless:
            generator.shuffle(passed)
        order += passed
    order = order[:wanted]
    if section.bucket_by_length:
        order = list(bucketed(order, lengths, section.batch, generator))
    return Subset(dataset, order), dataset.skipped


def held_out_set(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, context: int | None
) -> TaskDataset:
    """The first examples of the valid split, for the loss on them in training.

    Raises:
        DataError: it has none, which is better known before the training than after it.
    """
    task, section = recipe.task, recipe.training
    size = task.size("valid", tokenizer)
    count = section.evaluate_examples if size is None else min(section.evaluate_examples, size)
    examples = TaskDataset(
        task,
        "valid",
        tokenizer,
        count,
        max_tokens=most_tokens(section, context),
        overlong="error" if section.max_tokens is None else "skip",
    )
    if len(examples):
        examples[0]
    if section.max_tokens is None and size is not None and not task.windows:
        examples.check_lengths()
    return examples


def most_tokens(section: TrainingSection, context: int | None) -> int | None:
    """The most tokens of an example: training.max_tokens, or what the model can read.

    Raises:
        ConfigError: the model cannot read so many.
    """
    if section.max_tokens is not None and context is not None and section.max_tokens > context:
        raise ConfigError(
            f"training.max_tokens is {section.max_tokens}, but the model reads {context} tokens at "
            "most; lower it to that"
        )
    return context if section.max_tokens is None else section.max_tokens


def bucketed(
    order: Sequence[int], lengths: Sequence[int], batch: int, generator: random.Random
) -> Iterator[int]:
    """The same examples, so that every run of `batch` has similar lengths, with the batches in
    random order."""
    span = batch * BUCKET_BATCHES
    for start in range(0, len(order), span):
        chunk = sorted(order[start : start + span], key=lambda index: lengths[index])
        batches = [chunk[i : i + batch] for i in range(0, len(chunk), batch)]
        generator.shuffle(batches)
        for members in batches:
            yield from members


def check_documents(model: Any) -> None:
    """Make sure that nothing of a packed document reaches the next one, by trying it.

    Raises:
        ConfigError: it does, or the model takes no position ids.
    """
    name, parameter = model.config.model_type, next(model.parameters())
    two = (
        torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 3, 4, 5, 6]], device=parameter.device)
        % model.config.vocab_size
    )
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]] * 2, device=parameter.device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=two, position_ids=positions, use_cache=False).logits
    except TypeError as error:
        raise ConfigError(
            f"{name} takes no position ids, so it cannot read packed documents; use one file of "
            "text"
        ) from error
    finally:
        model.train(training)
    if not torch.allclose(logits[0, 2:], logits[1, 2:], atol=1e-4, rtol=1e-3):
        raise ConfigError(
            f"{name} does not keep packed documents apart; use another architecture, or one file "
            "of text"
        )
