"""Language modelling on local text files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NoReturn

import torch
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.tasks.base import Measure, Task, check_split
from undertow.tasks.encode import known_ids
from undertow.tasks.example import Example, Split

_PIECE = 2**16  # characters that are tokenized at a time, and the rest of their last line


@dataclass(frozen=True)
class Text(Task):
    """Text to predict token by token. A model built from scratch reads characters, a pretrained one its own tokens.

    Of each file the first 90 % are the train split, the next 5 % the valid split and the last 5 % the test
    split, in characters, each cut after the last line that ends before that; where no line ends, it is cut
    inside one. A split of all files together is cut into windows of `context` tokens, always the same ones; the
    last may be shorter. A window's first token is given and the others are predicted.
    """

    kind: ClassVar[str] = "text"
    measured_by: ClassVar[Measure] = "loss"

    files: tuple[str, ...] = ()
    """Paths of text files in UTF-8."""
    context: int = 128
    """Tokens of a window; at least 2."""

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ConfigError(
                f"context is {self.context}, but must be at least 2, as a token is predicted from another; raise it."
            )

    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
        """How many windows the split holds; see `Task.size`. Raises DataError if the text is too short for one."""
        if tokenizer is None:
            raise ConfigError(f"The {self.kind} task counts windows of tokens; give size() the tokenizer.")
        tokens = len(self._tokens(split, tokenizer))
        whole, rest = divmod(tokens, self.context)
        windows = whole + (rest > 1)  # from a single token nothing is predicted
        if not windows:
            raise DataError(
                f"The {split} split of {', '.join(self.files)} holds {tokens} tokens, too few for a window; give more text."
            )
        return windows

    def encode(self, split: Split, index: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
        """Return window `index` as `input_ids` and, the same, as `labels`."""
        windows = self.size(split, tokenizer)
        if not 0 <= index < windows:
            raise DataError(
                f"There is no {self.kind} window {index}, as the {split} split holds {windows}; "
                f"ask for a smaller index, counted from 0."
            )
        start = index * self.context
        window: list[int] = self._tokens(split, tokenizer)[start : start + self.context].tolist()
        return {"input_ids": window, "labels": list(window)}

    def rough_length(self, split: Split, index: int) -> int:
        """The context, as windows are alike."""
        return self.context

    def example(self, split: Split, index: int, length: int | None = None) -> NoReturn:
        """There are none: raises ConfigError."""
        raise ConfigError(f"The {self.kind} task has windows of text and no prompts with answers; use encode().")

    def score(self, example: Example, generated_text: str) -> NoReturn:
        """There is nothing to score: raises ConfigError."""
        raise ConfigError(f"The {self.kind} task has no answers to score; measure its loss.")

    def characters(self) -> str:
        """Every character of the files, sorted."""
        return "".join(sorted(set().union(*(_read(*file) for file in self._files()))))

    def _tokens(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
        check_split(split)
        return _encoded(self._files(), split, tokenizer)

    def _files(self) -> tuple[tuple[Path, int], ...]:
        """The files with the times of their last change, so that a changed file is read again."""
        if not self.files:
            raise ConfigError(f"The {self.kind} task needs the field 'files'; give it the paths of text files.")
        found = []
        for path in self.files:
            file = Path(path).expanduser()
            try:
                found.append((file, file.stat().st_mtime_ns))
            except OSError as error:
                raise _unreadable(file, error) from error
        return tuple(found)


@lru_cache(maxsize=8)
def _encoded(files: tuple[tuple[Path, int], ...], split: Split, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The token ids of a split, [tokens]."""
    text = "".join(_part(_read(*file), split) for file in files)
    pieces = [
        torch.tensor(known_ids(piece, tokenizer, add_special_tokens=False), dtype=torch.long) for piece in _pieces(text)
    ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.long)


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of whole lines: a tokenizer's work on a text takes hundreds of times the text's memory."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


@lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text; give a text file.") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not text:
        raise DataError(f"{path} is empty; give a file with text.")
    return text


def _part(text: str, split: Split) -> str:
    train = _cut(text, 0, 90)
    valid = _cut(text, train, 95)
    return {"train": text[:train], "valid": text[train:valid], "test": text[valid:]}[split]


def _cut(text: str, start: int, percent: int) -> int:
    """Where a split from `start` on ends: behind its last line break in the first `percent` of the text, if any."""
    limit = len(text) * percent // 100
    return text.rfind("\n", start, limit) + 1 or limit


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror}); check the paths in files.")
