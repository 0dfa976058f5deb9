"""From examples to token ids: encoding, a map-style data set and a padding collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.tasks.base import Example, Split, Task, check_split

IGNORED = -100
"""The label of tokens that carry no loss, as in torch.nn.functional.cross_entropy."""


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the prompt's token ids as the model sees them when it generates.

    Whatever the tokenizer puts in front (a BOS token) stays; an EOS token that it appends is removed.
    Raises DataError if the tokenizer does not know a part of the prompt.
    """
    ids = _known_ids(prompt, tokenizer, add_special_tokens=True)
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def encode(example: Example, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> dict[str, list[int]]:
    """Return `input_ids` and `labels` of an example: prompt, completion, EOS; the prompt's labels are masked.

    Prompt and completion are tokenised apart and then joined, so that no token spans the border and the
    prompt's tokens at generation (`encode_prompt`) are a prefix of the training sequence. Labels are not
    shifted.

    Raises DataError for an example of more than `max_tokens` tokens (nothing is ever cut) and for text that
    the tokenizer does not know; ConfigError for a tokenizer without an EOS token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("The tokenizer has no EOS token, but completions must end with one; set its eos_token.")
    prompt = encode_prompt(example.prompt, tokenizer)
    answer = _known_ids(example.completion, tokenizer, add_special_tokens=False)
    completion = [*answer, tokenizer.eos_token_id]
    tokens = len(prompt) + len(completion)
    if max_tokens is not None and tokens > max_tokens:
        raise DataError(
            f"The example with the prompt {_shown(example.prompt)} has {tokens} tokens, but max_tokens is "
            f"{max_tokens}; raise it, or leave such examples out."
        )
    return {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}


class TaskDataset(Dataset[dict[str, list[int]]]):
    """Examples `start`, `start + 1`, ... of a task's split, encoded when they are asked for.

    Args:
        task: where the examples come from.
        split: 'train', 'valid' or 'test'.
        tokenizer: encodes them; see `encode`.
        count: how many; None takes all from `start` on, which needs a task that has an end.
        start: index of the first, for instance to resume a stream.
        max_tokens: the most tokens an example may have; None sets no limit.
        overlong: what to do with longer ones: 'error' raises DataError when one is asked for; 'skip' encodes
            every example once on construction, leaves the longer ones out, and counts them in `skipped`.

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
            raise ConfigError(f"overlong is {overlong!r}, but must be 'error' or 'skip'; choose one of them.")
        self.task, self.split, self.tokenizer, self.max_tokens = task, split, tokenizer, max_tokens
        self.indices: Sequence[int] = _indices(task, split, count, start)
        self.skipped = 0
        if overlong == "skip" and max_tokens is not None:
            asked = len(self.indices)
            self.indices = [i for i in self.indices if len(self._encode(i)["input_ids"]) <= max_tokens]
            self.skipped = asked - len(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> dict[str, list[int]]:
        index = self.indices[position]
        item = self._encode(index)
        tokens = len(item["input_ids"])
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise DataError(
                f"The {self.task.kind} {self.split} example {index} has {tokens} tokens, but max_tokens is "
                f"{self.max_tokens}; raise it, or skip such examples with overlong='skip'."
            )
        return item

    def example(self, position: int) -> Example:
        """Return the example behind an item, for instance to score what a model generates for it."""
        return self.task.example(self.split, self.indices[position])

    def lengths(self) -> list[int]:
        """Return the number of characters of every example: a cheap measure for length bucketing."""
        examples = (self.example(position) for position in range(len(self)))
        return [len(example.prompt) + len(example.completion) for example in examples]

    def _encode(self, index: int) -> dict[str, list[int]]:
        return encode(self.task.example(self.split, index), self.tokenizer)


@dataclass(frozen=True)
class PadCollator:
    """Joins encoded examples into one batch, padded on the right.

    A call takes a list of `encode`'s results and returns `input_ids`, `attention_mask` and `labels`, each
    an int64 tensor [batch, tokens]. Padding has mask 0 and no loss. Raises ConfigError if the tokenizer has
    neither a padding nor an EOS token.
    """

    tokenizer: PreTrainedTokenizerBase
    """Its padding token fills the rows; its EOS token, if it has no padding token."""
    pad_to_multiple: int = 1
    """The number of tokens is rounded up to a multiple of this; 1 pads to the longest example."""

    def __post_init__(self) -> None:
        if self.pad_to_multiple < 1:
            raise ConfigError(f"pad_to_multiple is {self.pad_to_multiple}, but must be at least 1; raise it.")
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
        return batch

    def _pad_id(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ConfigError("The tokenizer has neither a padding nor an EOS token; set its pad_token.")


def _indices(task: Task, split: Split, count: int | None, start: int) -> range:
    size = task.size(split)
    if count is None and size is None:
        raise ConfigError(f"count is missing, but {task.kind} is generated without end; say how many examples to take.")
    stop = size if count is None else start + count
    assert stop is not None
    if start < 0 or stop < start or (size is not None and stop > size):
        held = "has no end" if size is None else f"holds {size}"
        raise ConfigError(
            f"start is {start} and count is {count}, but the {split} split of {task.kind} {held}; choose examples inside it."
        )
    return range(start, stop)


def _known_ids(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    # Many byte-level tokenizers name their BOS or EOS token as the unknown one too, and never need it.
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if unknown.intersection(ids):
        raise DataError(
            f"The tokenizer does not know a part of {_shown(text)}; use one built with all characters of the task."
        )
    return ids


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
