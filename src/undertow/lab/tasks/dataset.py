"""A task's items as a map-style data set, and the collator that pads them to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.base import Task, check_split
from undertow.lab.tasks.encode import IGNORED
from undertow.lab.tasks.example import Example, Split


class TaskDataset(Dataset[dict[str, list[int]]]):
    """Items `start`, `start + 1`, ... of a task's split, encoded when they are asked for.

    Args:
        task: where the examples come from.
        split: 'train', 'valid' or 'test'.
        tokenizer: encodes them; see `Task.encode`.
        count: how many; None takes all from `start` on, which needs a task that has an end.
        start: index of the first, for instance to resume a stream.
        max_tokens: the most tokens an example may have; None sets no limit.
        overlong: what to do with longer ones: 'error' raises DataError when one is asked for;
            'skip' encodes every example once on construction, leaves the longer ones out, and
            counts them in `skipped`.

    Raises ConfigError for a count or start outside the split.
    """

    def __init__(
        self,
        task: Task,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        count: int | None = None,
        start: int = 0,
        max_tokens: int | None = None,
        overlong: Literal["error", "skip"] = "error",
    ) -> None:
        check_split(split)
        if overlong not in ("error", "skip"):
            raise ConfigError(
                f"overlong is {overlong!r}, but must be 'error' or 'skip'; choose one of them."
            )
        self.task = task
        self.split = split
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        size = task.size(split, tokenizer)
        stop = size if count is None else start + count
        if stop is None:
            raise ConfigError(
                f"count is missing, but {task.kind} is generated without end; say how many "
                "examples to take."
            )
        if start < 0 or stop < start or (size is not None and stop > size):
            held = "has no end" if size is None else f"holds {size}"
            raise ConfigError(
                f"start is {start} and count is {count}, but the {split} split of {task.kind} "
                f"{held}; choose examples inside it."
            )
        self.indices: Sequence[int] = range(start, stop)
        self.skipped = 0
        if overlong == "skip" and max_tokens is not None:
            asked = len(self.indices)
            self.indices = [
                i
                for i in self.indices
                if len(task.encode(split, i, tokenizer)["input_ids"]) <= max_tokens
            ]
            self.skipped = asked - len(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> dict[str, list[int]]:
        index = self.indices[position]
        item = self.task.encode(self.split, index, self.tokenizer)
        tokens = len(item["input_ids"])
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise DataError(
                f"The {self.task.kind} {self.split} example {index} has {tokens} tokens, but at "
                f"most {self.max_tokens} may be read; leave such examples out: training.max_tokens "
                "in a recipe, overlong='skip' in Python."
            )
        return item

    def example(self, position: int) -> Example:
        """Return the example behind an item, for instance to score what a model generates for
        it."""
        return self.task.example(self.split, self.indices[position])

    def check_lengths(self, lengths: Sequence[int] | None = None) -> None:
        """Encode the items that look too long, so that one that is raises DataError now and not
        when its turn comes.

        An item looks too long if its characters and a token at either end are more than
        `max_tokens`: few tokens have less than one character. `lengths` are those of `lengths()`,
        where they are known already.
        """
        if self.max_tokens is not None:
            for position, length in enumerate(self.lengths() if lengths is None else lengths):
                if length + 2 > self.max_tokens:
                    self[position]

    def lengths(self) -> list[int]:
        """Return a cheap measure of every item's length, for length bucketing; see
        `Task.rough_length`."""
        return [self.task.rough_length(self.split, index) for index in self.indices]


@dataclass(frozen=True)
class PadCollator:
    """Joins encoded examples into one batch, padded on the right.

    A call takes a list of `encode`'s results and returns `input_ids`, `attention_mask` and
    `labels`, each an int64 tensor [batch, tokens]. Padding has mask 0 and no loss. Where an example
    is packed, `position_ids` that start again with each document take the place of the mask, which
    would keep transformers from telling documents apart; padding then stands at position 0, a
    document of its own. A model must be called without a cache to see them.

    Raises ConfigError if the tokenizer has neither a padding nor an EOS token.
    """

    tokenizer: PreTrainedTokenizerBase
    """Its padding token fills the rows; its EOS token, if it has no padding token."""
    pad_to_multiple: int = 1
    """The number of tokens is rounded up to a multiple of this; 1 pads to the longest example."""

    def __post_init__(self) -> None:
        if self.pad_to_multiple < 1:
            raise ConfigError(
                f"pad_to_multiple is {self.pad_to_multiple}, but must be at least 1; raise it."
            )
        self._pad_id()

    def __call__(self, items: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(item["input_ids"]) for item in items)
        tokens = -(-longest // self.pad_to_multiple) * self.pad_to_multiple
        shape = (len(items), tokens)
        batch = {
            "input_ids": torch.full(shape, self._pad_id()),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
            "labels": torch.full(shape, IGNORED),
        }
        for row, item in enumerate(items):
            end = len(item["input_ids"])
            batch["input_ids"][row, :end] = torch.tensor(item["input_ids"])
            batch["attention_mask"][row, :end] = 1
            batch["labels"][row, :end] = torch.tensor(item["labels"])
        if any("position_ids" in item for item in items):
            del batch["attention_mask"]
            batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
            for row, item in enumerate(items):
                end = len(item["input_ids"])
                batch["position_ids"][row, :end] = torch.tensor(
                    item.get("position_ids", range(end))
                )
        return batch

    def _pad_id(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ConfigError(
            "The tokenizer has neither a padding nor an EOS token; set its pad_token."
        )


def model_inputs(
    batch: Mapping[str, torch.Tensor], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """What of a batch a model is called with to get its logits: all but the labels."""
    return {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}


def real_tokens(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Which tokens of a batch are no padding, [batch, tokens]. Of a packed row's end, positions of
    0 count as padding."""
    if "attention_mask" in batch:
        return batch["attention_mask"].bool()
    return batch["position_ids"].flip(1).cumsum(1).flip(1) > 0
