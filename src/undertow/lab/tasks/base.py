"""What a task is: a numbered source of items to learn from and be tested on, split into train,
valid and test."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.encode import encode
from undertow.lab.tasks.example import Example, Split
from undertow.registry import family
from undertow.settings import settings

Template = Literal["paper", "bare"]
Measure = Literal["answers", "labels", "loss"]

# A split holding a hundredth of all candidates is missed by this many draws about once in 10^43.
_ATTEMPTS = 10_000
# The longest example, in any task's own unit: what is longer takes seconds to draw, and no model
# here reads it.
_LONGEST = 100_000
Length = Annotated[int, Field(ge=1, le=_LONGEST)]
"""A setting that is a length of examples."""


@family
@settings
class Task(ABC):
    """A source of numbered items that knows data and text, and no model.

    Subclasses are frozen dataclasses whose fields are the whole configuration: two equal tasks give
    equal items. Most items are the examples that `example` returns, encoded.
    """

    kind: ClassVar[str]
    measured_by: ClassVar[Measure] = "answers"
    """What evaluation measures: generated answers, the labels of all positions, or the loss a
    token."""
    scores_tokens: ClassVar[bool] = False
    """Whether evaluation also counts the tokens of right answers that are the likeliest ones after
    all before them."""
    endless: ClassVar[bool] = False
    """Whether items are generated without end, in any length that is asked for."""
    windows: ClassVar[bool] = False
    """Whether items are cut to a number of tokens, so that none is too long."""
    ordered_lazily: ClassVar[bool] = False
    """Whether items may be too many for a list of them; they must be windows."""

    @property
    def longest(self) -> int | None:
        """The longest trained length, in the task's own unit; None where there is no such limit."""
        return None

    @property
    def writes_chains(self) -> bool:
        """Whether its answers hold a chain of thought, which `undertow chains` may write anew."""
        return False

    @abstractmethod
    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> int | None:
        """How many items the split holds; None if they are generated without end.

        Only text that is cut into windows of tokens needs the tokenizer for that.
        """

    @abstractmethod
    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """Return example `index` of the split: always the same one for the same task and arguments.

        `length` asks for one of exactly that size, also beyond the sizes trained on; tasks that
        read a data set accept None only. Raises ConfigError for arguments that make no sense and
        DataError if there is no such example.
        """

    @abstractmethod
    def score(self, example: Example, generated_text: str) -> bool:
        """Whether the text generated after the prompt (special tokens removed) has the right final
        answer."""

    @abstractmethod
    def characters(self) -> str | None:
        """Every character that the items can hold, sorted; None for text that needs a pretrained
        tokenizer."""

    def encode(
        self, split: Split, index: int, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, list[int]]:
        """Return `input_ids` and `labels` of item `index` of the split; see
        `undertow.lab.tasks.encode.encode`."""
        return encode(self.example(split, index), tokenizer)

    def first(
        self, split: Split, tokenizer: PreTrainedTokenizerBase, count: int
    ) -> tuple[list[dict[str, list[int]]], int | None]:
        """The first items of the split, `count` at most, and its size: for a look at the data that
        reads little of it."""
        size = self.size(split, tokenizer)
        number = count if size is None else min(count, size)
        return [self.encode(split, index, tokenizer) for index in range(number)], size

    def check(self, split: Split) -> None:
        """Look at the source of a split, so that what is wrong with it is told before a training.

        Raises:
            ConfigError, DataError: there is no such file, or it is malformed.
        """
        self.size(split)

    def seeded(self, seed: int) -> Task:
        """The task as it is trained with a seed: one that draws its examples draws others."""
        return self

    def has_documents(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether an item may hold several documents that have nothing to do with each other."""
        return False

    def rough_length(self, split: Split, index: int) -> int:
        """A cheap measure of how long an item is, for batches of similar length: the example's
        characters."""
        example = self.example(split, index)
        return len(example.prompt) + len(example.completion)

    def left_out(
        self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Mapping[str, int]:
        """How many rows of the split's files are no items, by reason; none where nothing is
        filtered."""
        return {}

    def choices(self) -> tuple[str, ...]:
        """The answers that there can be, without blanks, where they are a few known ones; none
        otherwise."""
        return ()


@settings(kw_only=True)
class GeneratedTask(Task):
    """A task whose examples are drawn at random, without end.

    An example belongs to the split that a hash of its prompt names (`split_of`), so the splits
    share no prompt, whatever the seed and however many examples are taken.
    """

    endless: ClassVar[bool] = True

    seed: int = 0
    """Seed of the examples. Other seeds draw other examples, but never move a prompt to another
    split."""

    def seeded(self, seed: int) -> GeneratedTask:
        """See `Task.seeded`."""
        return replace(self, seed=self.seed + seed)

    @abstractmethod
    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one example from the generator, of the given size or, if None, of a random trained
        one."""

    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """None: there is always another example."""
        check_split(split)

    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """See `Task.example`. Candidates are drawn until one falls in the split.

        Without `length` each candidate has a new random size, so a size with no prompt in this
        split is left out.
        """
        check_split(split)
        if index < 0:
            raise ConfigError(
                f"The example's index is {index}, but must be at least 0; count examples from 0."
            )
        if length is not None and length < 1:
            raise ConfigError(
                f"The example's length is {length}, but must be at least 1; ask for a longer one."
            )
        if length is not None:
            check_longest(length=length)
        generator = random.Random(_stable_hash(f"{self.kind}|{self.seed}|{split}|{index}|{length}"))
        for _ in range(_ATTEMPTS):
            example = self.draw(generator, length)
            if split_of(example.prompt) == split:
                return example
        size = "the configured lengths" if length is None else f"length {length}"
        raise DataError(
            f"None of {_ATTEMPTS} draws of {self.kind} at {size} falls in the {split} split, which "
            f"seems to hold no such prompt; ask for a greater length."
        )

    def score(self, example: Example, generated_text: str) -> bool:
        """Whether the first line of the generated text is the answer and nothing else but
        blanks."""
        return first_line(generated_text) == example.completion.strip()


@settings(kw_only=True)
class PromptedTask(GeneratedTask):
    """A generated task whose question is put in words, and answered."""

    template: Template = "paper"
    """Layout of the prompt: 'paper' is that of the TurboConn paper, 'bare' a compact one for small
    models."""


def split_of(text: str) -> Split:
    """Return the split that a hash of the text names: 90 % are train, 5 % valid and 5 % test."""
    share = _stable_hash(text) % 100
    return "train" if share < 90 else "valid" if share < 95 else "test"


def paper_prompt(question: str, text: str) -> str:
    """Lay out a prompt as the TurboConn paper does (appendix A.4); the completion starts with a
    blank."""
    return f"Question: {question}\nInput: {text}\nAnswer:"


def text_field(row: Mapping[str, object], name: str) -> str:
    """Return a text of a data set's row; raises ValueError, to be completed with the row's place,
    if there is none."""
    if name not in row:
        raise ValueError(
            f"the row has no {name!r}, only {', '.join(map(repr, row)) or 'nothing at all'}"
        )
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {str(value)[:80]} without quotes, but must be a text")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value


def first_line(text: str) -> str:
    """Return the first line of the text that is not empty, without blanks around it."""
    return text.strip().partition("\n")[0].strip()


def check_order(task: Task, least: str, most: str) -> None:
    """Raise ConfigError if the smaller of two settings is the larger one."""
    if getattr(task, most) < getattr(task, least):
        raise ConfigError(
            f"{most} is {getattr(task, most)}, but must be at least {least}, "
            f"{getattr(task, least)}; raise it."
        )


def check_longest(**lengths: int) -> None:
    """Raise ConfigError for a length that no example can have, by its name."""
    for name, length in lengths.items():
        if length > _LONGEST:
            raise ConfigError(
                f"{name} is {length}, but examples have {_LONGEST:,} parts at most; lower it."
            )


def check_split(split: str) -> None:
    """Raise ConfigError if there is no split of this name."""
    if split not in get_args(Split):
        raise ConfigError(
            f"The split is {split!r}, but must be 'train', 'valid' or 'test'; choose one of them."
        )


def _stable_hash(text: str) -> int:
    """Hash the text to 64 bits, alike on every machine and in every process (Python's own hash is
    salted)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
