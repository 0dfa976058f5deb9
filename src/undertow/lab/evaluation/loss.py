"""Loss and perplexity a token of language modelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from undertow.errors import CheckpointError
from undertow.lab.evaluation.accuracy import evaluating, progress
from undertow.lab.tables import table
from undertow.lab.tasks import PadCollator, Split, Task, TaskDataset, model_inputs
from undertow.lab.tasks.encode import IGNORED
from undertow.reading import read_json


@dataclass(frozen=True)
class Loss:
    """The mean cross-entropy of predicted tokens.

    Attributes:
        loss: in nats a token.
        tokens: how many were predicted.
        windows: how many windows they stand in, and of how many the split has.
        left_out: how many of the split are too long.
    """

    loss: float
    tokens: int
    windows: int
    of: int
    left_out: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def loss_per_token(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    examples: int = 256,
    batch: int = 128,
    split: Split = "test",
    max_tokens: int | None = None,
    overlong: Literal["error", "skip"] = "error",
) -> Loss:
    """The mean loss over all predicted tokens of the first `examples` items of a split, which must
    have an end.

    One teacher-forced forward for `batch` items at a time, with the exact rollout unless a prefill
    solver is set. Every token counts alike, whatever the length of its item. Items of more than
    `max_tokens` tokens are refused or left out (see `TaskDataset`).

    Raises:
        ConfigError: the split has no end.
        DataError: its files cannot be read, or hold too little, or an item is too long.
    """
    dataset, collate = (
        TaskDataset(task, split, tokenizer, max_tokens=max_tokens, overlong=overlong),
        PadCollator(tokenizer),
    )
    windows = min(examples, len(dataset))
    total, tokens = 0.0, 0
    with evaluating(model):
        for start in progress(range(0, windows, batch), "measuring"):
            items = collate([dataset[i] for i in range(start, min(start + batch, windows))])
            inputs = model_inputs(items, model.device)
            logits = model(**inputs, use_cache=False).logits[:, :-1].float()
            labels = items["labels"][:, 1:].to(logits.device)
            total += float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
                )
            )
            tokens += int((labels != IGNORED).sum())
    return Loss(total / tokens, tokens, windows, len(dataset), dataset.skipped)


def read_loss(path: Path) -> float:
    """The loss a token, in nats, that an evaluation wrote down.

    Raises:
        CheckpointError: the file is damaged.
    """
    mend = "the file is damaged; run `undertow eval` again"
    held = read_json(path, CheckpointError, mend)
    loss = held.get("loss") if isinstance(held, dict) else None
    if not isinstance(loss, int | float) or isinstance(loss, bool):
        raise CheckpointError(f"{path} has no number as 'loss'; {mend}")
    return float(loss)


def loss_table(losses: Mapping[str, Loss]) -> str:
    """Loss and perplexity by the name of the model."""
    return table(
        ["model", "loss", "perplexity", "tokens", "windows", "of"],
        [
            [name, f"{loss.loss:.4f}", f"{loss.perplexity:.3f}", loss.tokens, loss.windows, loss.of]
            for name, loss in losses.items()
        ],
    )
