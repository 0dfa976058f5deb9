"""What a task is: a numbered source of prompts with checkable answers, split into train, valid and test."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from undertow.errors import ConfigError, DataError

Split = Literal["train", "valid", "test"]
Template = Literal["paper", "bare"]

# A split holding a hundredth of all candidates is missed by this many draws about once in 10^43.
_ATTEMPTS = 10_000


@dataclass(frozen=True)
class Example:
    """One prompt with the text that should follow it."""

    prompt: str
    """What the model is given."""
    completion: str
    """What it should write after the prompt, without an end token."""
    length: int
    """The task's own size of this example: bits, operands or solution steps."""


@dataclass(frozen=True)
class Task(ABC):
    """A source of examples that knows data and text, and no model.

    Subclasses are frozen dataclasses whose fields are the whole configuration: two equal tasks give equal
    examples.
    """

    kind: ClassVar[str]

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """How many examples the split holds; None if they are generated without end."""

    @abstractmethod
    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """Return example `index` of the split: always the same one for the same task and arguments.

        `length` asks for one of exactly that size, also beyond the sizes trained on; tasks that read a data
        set accept None only. Raises ConfigError for arguments that make no sense and DataError if there is
        no such example.
        """

    @abstractmethod
    def score(self, example: Example, generated_text: str) -> bool:
        """Whether the text generated after the prompt (special tokens removed) has the right final answer."""

    @abstractmethod
    def characters(self) -> str | None:
        """Every character that prompts and completions can hold, sorted; None for free text."""

    def choices(self) -> tuple[str, ...]:
        """The answers that there can be, without blanks, where they are a few known ones; none otherwise."""
        return ()


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """A task whose examples are drawn at random, without end.

    An example belongs to the split that a hash of its prompt names (`split_of`), so the splits share no
    prompt, whatever the seed and however many examples are taken.
    """

    template: Template = "paper"
    """Layout of the prompt: 'paper' is that of the TurboConn paper, 'bare' a compact one for small models."""
    seed: int = 0
    """Seed of the examples. Other seeds draw other examples, but never move a prompt to another split."""

    def __post_init__(self) -> None:
        if self.template not in get_args(Template):
            raise ConfigError(f"template is {self.template!r}, but must be 'paper' or 'bare'; choose one of them.")

    @abstractmethod
    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one example from the generator, of the given size or, if None, of a random trained one."""

    def size(self, split: Split) -> int | None:
        """None: there is always another example."""
        check_split(split)
        return None

    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """See `Task.example`. Candidates are drawn until one falls in the split.

        Without `length` each candidate has a new random size, so a size with no prompt in this split is
        left out.
        """
        check_split(split)
        if index < 0:
            raise ConfigError(f"The example's index is {index}, but must be at least 0; count examples from 0.")
        if length is not None and length < 1:
            raise ConfigError(f"The example's length is {length}, but must be at least 1; ask for a longer one.")
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
        """Whether the first line of the generated text is the answer and nothing else but blanks."""
        return first_line(generated_text) == example.completion.strip()


def split_of(text: str) -> Split:
    """Return the split that a hash of the text names: 90 % are train, 5 % valid and 5 % test."""
    share = _stable_hash(text) % 100
    return "train" if share < 90 else "valid" if share < 95 else "test"


def paper_prompt(question: str, text: str) -> str:
    """Lay out a prompt as the TurboConn paper does (appendix A.4); the completion starts with a blank."""
    return f"Question: {question}\nInput: {text}\nAnswer:"


def first_line(text: str) -> str:
    """Return the first line of the text that is not empty, without blanks around it."""
    return text.strip().partition("\n")[0].strip()


def check_split(split: str) -> None:
    """Raise ConfigError if there is no split of this name."""
    if split not in get_args(Split):
        raise ConfigError(f"The split is {split!r}, but must be 'train', 'valid' or 'test'; choose one of them.")


def _stable_hash(text: str) -> int:
    """Hash the text to 64 bits, alike on every machine and in every process (Python's own hash is salted)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
