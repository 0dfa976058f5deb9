"""How far gradients reach back through a solver: a choice of its own, which `train()` and `eval()`
never change."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Annotated

from pydantic import Field, NonNegativeInt

from undertow.errors import ConfigError
from undertow.settings import AsText, settings


class Gradient(AsText):
    """A gradient setting. Recipes, saved models and Python may write it as a short text."""

    forms = "full, truncated(n), adjoint(n) or adjoint(tolerance)"

    @classmethod
    def from_text(cls, text: str) -> Gradient:
        """Read what `forms` says, a tolerance being below 1.

        Raises:
            ConfigError: the text is none of these, or the number does not fit.
        """
        match = re.fullmatch(r"\s*(full|truncated|adjoint)\s*(?:\(([^()]*)\))?\s*", text)
        kind, given = (match[1], match[2]) if match else ("", None)
        if given is None and kind == "full":
            return Full()
        if given is None and kind == "truncated":
            return LastSweeps()
        if given is None or kind == "full":
            raise ConfigError(f"gradient is {text!r}; write {cls.forms}")
        try:
            numbers = [float(number) for number in given.split(",")]
        except ValueError:
            raise ConfigError(
                f"gradient is {text!r}, but {given!r} is no number; write {cls.forms}"
            ) from None
        tolerance = numbers.pop() if kind == "adjoint" and 0 < numbers[-1] < 1 else None
        counted = all(number >= 0 and number.is_integer() for number in numbers)
        if len(numbers) > 1 or not counted:
            raise ConfigError(
                f"gradient is {text!r}; the number of steps must be whole, and at least 0: write "
                f"{cls.forms}"
            )
        steps = int(numbers[0]) if numbers else None
        return Truncated(steps or 0) if kind == "truncated" else Adjoint(steps, tolerance)

    def __str__(self) -> str:
        return self.to_text()

    @abstractmethod
    def reach(self, sweeps: int, backward: int) -> int:
        """How many of a parallel solver's last sweeps carry gradient; `backward` is its own
        number."""


@settings
class Full(Gradient):
    """Back through everything that the solver did."""

    def to_text(self) -> str:
        return "full"

    def reach(self, sweeps: int, backward: int) -> int:
        return sweeps


@settings
class Truncated(Gradient):
    """Back through the last sweeps of a parallel solver; through the rollout, as in truncated
    backpropagation through time, with the state cut after every so many groups of lag tokens."""

    steps: NonNegativeInt
    """Sweeps or groups."""

    def to_text(self) -> str:
        return f"truncated({self.steps})"

    def reach(self, sweeps: int, backward: int) -> int:
        return self.steps


@settings
class LastSweeps(Gradient):
    """Back through as many of the last sweeps as the solver's `backward` says: the papers' way to
    put it."""

    def to_text(self) -> str:
        return "truncated"

    def reach(self, sweeps: int, backward: int) -> int:
        return backward


@settings
class Adjoint(Gradient):
    """No gradient through what the solver did: the adjoint of the fixed point that it found, by
    vector-Jacobian products on the graph of one pass.

    ceil(tokens / lag) products are exact. With a tolerance there are as many as it takes until one
    changes the sum by less than that share of it; with both, no more than `products`.
    """

    products: NonNegativeInt | None = None
    """Vector-Jacobian products; as many as are exact if left out."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the sum; no product is left out for its size if left out."""

    def __post_init__(self) -> None:
        if self.products is None and self.tolerance is None:
            raise ConfigError("an adjoint gradient has neither products nor a tolerance; give one")

    def to_text(self) -> str:
        given = [each for each in (self.products, self.tolerance) if each is not None]
        return f"adjoint({', '.join(map(str, given))})"

    def reach(self, sweeps: int, backward: int) -> int:
        return 0

    def most(self, groups: int) -> int:
        """The most products to take in a sequence of so many groups of lag tokens."""
        return groups if self.products is None else self.products
