"""Parity: whether a sequence of bits holds an odd number of ones (TurboConn, appendix A.4.1)."""

from __future__ import annotations

import random
from typing import ClassVar

from undertow.lab.tasks.base import Length, PromptedTask, check_order, paper_prompt
from undertow.lab.tasks.example import Example
from undertow.registry import register

_QUESTION = "Output the parity of this sequence."


@register
class Parity(PromptedTask):
    """Random bits, min_length..max_length of them; the answer is 1 if the number of ones is odd.

    The 'paper' template writes `Input: 1 0 0 1` and completes it with ` 0`; 'bare' writes `1001=`
    and `0`. An example's length is its number of bits, drawn uniformly. Guessing is right half the
    time.
    """

    kind: ClassVar[str] = "parity"

    min_length: Length = 1
    """Fewest bits in a sequence; at least 1."""
    max_length: Length = 70
    """Most bits in a sequence; 70 in the TurboConn paper."""

    def __post_init__(self) -> None:
        check_order(self, "min_length", "max_length")

    @property
    def longest(self) -> int:
        """See `Task.longest`."""
        return self.max_length

    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one sequence; see `GeneratedTask.draw`."""
        count = generator.randint(self.min_length, self.max_length) if length is None else length
        bits = format(generator.getrandbits(count), f"0{count}b")
        answer = str(bits.count("1") % 2)
        if self.template == "bare":
            return Example(f"{bits}=", answer, count)
        return Example(paper_prompt(_QUESTION, " ".join(bits)), f" {answer}", count)

    def choices(self) -> tuple[str, ...]:
        """See `Task.choices`."""
        return ("0", "1")

    def characters(self) -> str:
        """See `Task.characters`."""
        return "".join(
            sorted(set("01=" if self.template == "bare" else paper_prompt(_QUESTION, "0 1")))
        )
