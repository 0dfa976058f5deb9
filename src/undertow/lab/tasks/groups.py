"""Running products of group elements: state tracking with a label at every position (T²MLR; the S5
word problem)."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations, product
from typing import Any, ClassVar, Literal

from undertow.errors import ConfigError
from undertow.lab.tasks.base import GeneratedTask, Length, Measure, check_order
from undertow.lab.tasks.example import Example
from undertow.registry import register

Group = Literal["S3", "S5", "A5", "Z60", "A4xZ5"]

# One character an element, 120 of them: the identity is 0. Of Latin-1, the letters.
SYMBOLS = string.digits + string.ascii_uppercase + string.ascii_lowercase
SYMBOLS += "".join(letter for letter in map(chr, range(0xC0, 0x100)) if letter.isalpha())


@register
class GroupTracking(GeneratedTask):
    """Random elements of a group, min_length..max_length of them; the label of each position is the
    product so far.

    The state starts as the identity and becomes `state ∘ x` with each element x, from left to
    right. For permutations `(p ∘ q)(i) = p(q(i))`: the new state is the old one with its entries
    rearranged by x, `[state[i] for i in x]`. Elements are drawn uniformly, and so is the length.

    S5 and A5 are not solvable, so constant-depth models are not expected to track them at all
    lengths; Z60 and A4xZ5 have as many elements as A5, but are solvable. S3 is small enough to
    learn in minutes. Guessing is right once in as many symbols as the group has elements.
    """

    kind: ClassVar[str] = "group_tracking"
    measured_by: ClassVar[Measure] = "labels"

    group: Group = "S5"
    """S3 (6 elements), S5 (120), A5 (60), Z60 (60) or A4xZ5 (60): symmetric, alternating, cyclic, a
    direct product."""
    min_length: Length = 1
    """Fewest elements in a sequence; at least 1."""
    max_length: Length = 32
    """Most elements in a sequence; 32 in the T²MLR paper's retrieval task."""
    swaps: bool = False
    """Draw only those elements of S3 or S5 that exchange two entries, and the identity: 11 of S5's
    120. Every state is still reached, but there are 120 times 11 transitions to learn in place of
    120 times 120."""

    def __post_init__(self) -> None:
        if self.swaps and self.group not in ("S3", "S5"):
            raise ConfigError(
                f"swaps is true, but {self.group} has no swap of two entries; use S3 or S5, or "
                "leave it out."
            )
        check_order(self, "min_length", "max_length")

    @property
    def longest(self) -> int:
        """See `Task.longest`."""
        return self.max_length

    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one sequence; see `GeneratedTask.draw`."""
        count = generator.randint(self.min_length, self.max_length) if length is None else length
        table = multiplication_table(self.group)
        elements = generator.choices(
            swaps(self.group) if self.swaps else range(len(table)), k=count
        )
        states, state = [], 0
        for element in elements:
            state = table[state][element]
            states.append(state)
        return Example(_written(elements), _written(states), count, aligned=True)

    def characters(self) -> str:
        """See `Task.characters`."""
        return "".join(sorted(SYMBOLS[: len(multiplication_table(self.group))]))


@cache
def multiplication_table(group: Group) -> tuple[tuple[int, ...], ...]:
    """Return the table of a group: entry [a][b] is the number of a ∘ b. Element 0 is the identity.

    Permutations are numbered in lexicographic order, starting from 0 1 2 ...; the elements (p, z)
    of A4xZ5 by p first, then by z.
    """
    match group:
        case "S3":
            return _table(_permutations(3), _composed)
        case "S5":
            return _table(_permutations(5), _composed)
        case "A5":
            return _table(_even_permutations(5), _composed)
        case "Z60":
            return _table(range(60), lambda a, b: (a + b) % 60)
        case "A4xZ5":
            pairs = list(product(_even_permutations(4), range(5)))
            return _table(pairs, lambda a, b: (_composed(a[0], b[0]), (a[1] + b[1]) % 5))


def swaps(group: Group) -> list[int]:
    """The numbers of the identity and of the permutations of S3 or S5 that exchange two entries."""
    elements = _permutations(3 if group == "S3" else 5)
    return [
        number
        for number, p in enumerate(elements)
        if sum(i != entry for i, entry in enumerate(p)) in (0, 2)
    ]


def _table(
    elements: Sequence[Any], compose: Callable[[Any, Any], Any]
) -> tuple[tuple[int, ...], ...]:
    number = {element: i for i, element in enumerate(elements)}
    return tuple(tuple(number[compose(a, b)] for b in elements) for a in elements)


def _permutations(count: int) -> list[tuple[int, ...]]:
    return list(permutations(range(count)))


def _even_permutations(count: int) -> list[tuple[int, ...]]:
    def inversions(p: tuple[int, ...]) -> int:
        return sum(p[i] > p[j] for j in range(count) for i in range(j))

    return [p for p in _permutations(count) if inversions(p) % 2 == 0]


def _composed(p: tuple[int, ...], q: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(p[i] for i in q)


def _written(elements: Sequence[int]) -> str:
    return "".join(SYMBOLS[element] for element in elements)
