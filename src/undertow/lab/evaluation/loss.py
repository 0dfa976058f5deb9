"""Loss and perplexity a token of language modelling."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from undertow.lab.evaluation.accuracy import evaluating, progress
from undertow.lab.runs.results import Loss
from undertow.lab.tasks import PadCollator, Split, Task, TaskDataset, model_inputs
from undertow.lab.tasks.encode import IGNORED


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
