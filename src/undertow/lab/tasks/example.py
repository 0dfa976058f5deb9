"""One prompt and what should follow it, or stand at its positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Example:
    """One prompt with the text that belongs to it."""

    prompt: str
    """What the model is given."""
    completion: str
    """What it should write after the prompt, without an end token; or the labels, see `aligned`."""
    length: int = 0
    """The task's own size of this example: bits, operands, solution steps or group elements; 0 if
    it has none."""
    aligned: bool = False
    """Whether the completion is one label for each symbol of the prompt, or for each of its last
    ones, at that symbol's own position. Both then have one character a symbol."""
