"""How far gradients reach back through a solver: a choice of its own, which `train()` and `eval()`
never change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from undertow.errors import ConfigError


@dataclass(frozen=True)
class Gradient:
    """A parsed gradient setting.

    Attributes:
        kind: "full", "truncated" or "adjoint".
        steps: how many steps of the solver a truncated gradient reaches back, or how many
            vector-Jacobian products an adjoint one takes at most; None for all.
        tolerance: of an adjoint one: stop when a product changes the solution by less than this
            share.
    """

    kind: str
    steps: int | None = None
    tolerance: float | None = None

    @classmethod
    @cache  # each forward asks
    def parse(cls, text: str) -> Gradient:
        """Read "full", "truncated(n)", "adjoint(n)" or "adjoint(tolerance)", a tolerance being
        below 1.

        Raises:
            ConfigError: the text is none of these, or the number does not fit.
        """
        match = re.fullmatch(r"\s*(full|truncated|adjoint)\s*(?:\(\s*([^()\s]+)\s*\))?\s*", text)
        if match is None or (match[1] == "full") != (match[2] is None):
            raise ConfigError(
                f'gradient is {text!r}; write "full", "truncated(n)", "adjoint(n)" or '
                '"adjoint(tolerance)"'
            )
        kind, number = match[1], match[2]
        if number is None:
            return cls(kind)
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(
                f"gradient is {text!r}, but {number!r} is no number; write one"
            ) from None
        if kind == "adjoint" and 0 < value < 1:
            return cls(kind, tolerance=value)
        least = 1 if kind == "truncated" else 0
        if value != int(value) or value < least:
            raise ConfigError(
                f"gradient is {text!r}; the number of steps must be whole and at least {least}"
            )
        return cls(kind, int(value))
