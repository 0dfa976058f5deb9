"""Multi-step arithmetic modulo 10 (TurboConn, section 4 and appendix A.4.2), in the style of
BIG-bench."""

from __future__ import annotations

import random
from typing import ClassVar

from undertow.lab.tasks.base import Length, PromptedTask, check_order, paper_prompt
from undertow.lab.tasks.example import Example
from undertow.registry import register

_QUESTION = "Evaluate this expression modulo 10."
_UNARY_MINUS_PROBABILITY = 0.15


@register
class MultiStepArithmetic(PromptedTask):
    """Expressions of digits, +, -, * and unary minus; the answer is their value modulo 10 (Python's
    %).

    The paper does not say how its expressions are drawn. Here the number of operands is uniform in
    min_operands..max_operands and divided uniformly between the two sides of each operator;
    operators and digits are uniform, and any part, down to a single digit, gets a unary minus with
    probability 0.15.

    The text reads as Python does: parentheses stand around every part but the left operand of an
    equal operator (`8 + 2 + 9`), and around what a unary minus applies to (`-(1)`). An example's
    length is its number of operands. With the default lengths, always answering 0 is right one time
    in five.

    There are only ten prompts of one operand, so that a split holds one of them or none, over and
    over: of few operands, test by length, from two on.
    """

    kind: ClassVar[str] = "arithmetic"

    min_operands: Length = 1
    """Fewest digits in an expression; at least 1."""
    max_operands: Length = 30
    """Most digits in an expression; 30 in the TurboConn paper."""

    def __post_init__(self) -> None:
        check_order(self, "min_operands", "max_operands")

    @property
    def longest(self) -> int:
        """See `Task.longest`."""
        return self.max_operands

    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one expression; see `GeneratedTask.draw`."""
        operands = (
            generator.randint(self.min_operands, self.max_operands) if length is None else length
        )
        text, _, value = _draw_part(generator, operands)
        if self.template == "bare":
            return Example(f"({text})=".replace(" ", ""), str(value), operands)
        return Example(paper_prompt(_QUESTION, f"({text}) ="), f" {value}", operands)

    def choices(self) -> tuple[str, ...]:
        """See `Task.choices`."""
        return tuple("0123456789")

    def characters(self) -> str:
        """See `Task.characters`."""
        alphabet = "0123456789+-*()="
        return "".join(
            sorted(set(alphabet if self.template == "bare" else paper_prompt(_QUESTION, alphabet)))
        )


def _draw_part(generator: random.Random, operands: int) -> tuple[str, str, int]:
    """Draw a part of an expression: its text, the operator outside parentheses (or '') and its
    value.

    Values are kept modulo 10 throughout, which +, - and * allow.
    """
    if operands == 1:
        value = generator.randrange(10)
        text, operator = str(value), ""
    else:
        left_operands = generator.randint(1, operands - 1)
        left, left_operator, left_value = _draw_part(generator, left_operands)
        right, right_operator, right_value = _draw_part(generator, operands - left_operands)
        operator = generator.choice("+-*")
        # Python groups equal operators from the left, so only a left operand can do without
        # parentheses.
        left = left if left_operator in ("", operator) else f"({left})"
        right = f"({right})" if right_operator else right
        text = f"{left} {operator} {right}"
        signed = -right_value if operator == "-" else right_value
        value = (left_value * right_value if operator == "*" else left_value + signed) % 10
    if generator.random() < _UNARY_MINUS_PROBABILITY:
        return f"-({text})", "", -value % 10
    return text, operator, value
