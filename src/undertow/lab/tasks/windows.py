"""A row of tokens cut into windows: what text and shards have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Protocol

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.base import Measure, Task
from undertow.lab.tasks.encode import IGNORED
from undertow.lab.tasks.example import Example, Split


class Row(Protocol):
    """The tokens of a split, one after the other."""

    @property
    def total(self) -> int:
        """How many tokens there are."""

    @property
    def documents(self) -> int:
        """Of how many documents they are."""

    @property
    def empty(self) -> int:
        """Documents that are left out, as there is nothing but blanks in them."""

    def stretch(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """The ids from `start` to `stop`, cut off at the end, and where in them documents begin,
        but for one that begins at `start`."""


class Windows(Task):
    """A task whose items are windows of `context` tokens, always the same ones; the last may be
    shorter.

    Nothing of one document reaches another in its window, neither by attention nor by a recurrence:
    positions start again with each, and its first token is given and not predicted.
    """

    measured_by: ClassVar[Measure] = "loss"
    windows: ClassVar[bool] = True
    context: int  # a field of every kind, which has it where it wants it

    @abstractmethod
    def tokens(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Row:
        """The tokens of a split.

        Raises:
            DataError: they cannot be read.
        """

    @abstractmethod
    def described(self, split: Split) -> str:
        """What messages call the source of a split."""

    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
        """How many windows the split holds; see `Task.size`. Raises DataError if the text is too
        short for one."""
        if tokenizer is None:
            raise ConfigError(
                f"The {self.kind} task counts windows of tokens; give size() the tokenizer."
            )
        tokens = self.tokens(split, tokenizer).total
        whole, rest = divmod(tokens, self.context)
        windows = whole + (rest > 1)  # from a single token nothing is predicted
        if not windows:
            raise DataError(
                f"The {split} split of {self.described(split)} holds {tokens} tokens, too few "
                "for a window; give more text."
            )
        return windows

    def encode(
        self, split: Split, index: int, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, list[int]]:
        """Return window `index` as `input_ids` and, the same but for the first tokens of documents,
        as `labels`.

        Where a document begins inside the window, there are `position_ids` too, which start again
        there.
        """
        windows = self.size(split, tokenizer)
        if not 0 <= index < windows:
            raise DataError(
                f"There is no {self.kind} window {index}, as the {split} split holds {windows}; "
                f"ask for a smaller index, counted from 0."
            )
        return window_of(self.tokens(split, tokenizer), index, self.context)

    def left_out(
        self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Mapping[str, int]:
        """See `Task.left_out`."""
        if tokenizer is None:
            raise ConfigError(
                f"The {self.kind} task counts what it tokenizes; give left_out() the tokenizer."
            )
        empty = self.tokens(split, tokenizer).empty
        return {"there is no text in them": empty} if empty else {}

    def has_documents(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """See `Task.has_documents`: in windows, where any split has several."""
        splits: tuple[Split, ...] = ("train", "valid", "test")
        return any(self.tokens(split, tokenizer).documents > 1 for split in splits)

    def rough_length(self, split: Split, index: int) -> int:
        """The context, as windows are alike."""
        return self.context

    def example(self, split: Split, index: int, length: int | None = None) -> NoReturn:
        """There are none: raises ConfigError."""
        raise ConfigError(
            f"The {self.kind} task has windows of text and no prompts with answers; use encode()."
        )

    def score(self, example: Example, generated_text: str) -> NoReturn:
        """There is nothing to score: raises ConfigError."""
        raise ConfigError(f"The {self.kind} task has no answers to score; measure its loss.")


def window_of(tokens: Row, index: int, context: int) -> dict[str, list[int]]:
    """A window of so many tokens; see `Windows.encode`."""
    window, borders = tokens.stretch(index * context, (index + 1) * context)
    labels = list(window)
    item: dict[str, Any] = {"input_ids": window, "labels": labels}
    if borders:
        for border in borders:
            labels[border] = IGNORED
        spans = zip([0, *borders], [*borders, len(window)], strict=True)
        item["position_ids"] = [position for begin, end in spans for position in range(end - begin)]
    return item
