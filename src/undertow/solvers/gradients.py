"""How far gradients reach back through a solver: a choice of its own, which `train()` and `eval()` never change."""

from __future__ import annotations

import re
from dataclasses import dataclass

from undertow.errors import ConfigError


@dataclass(frozen=True)
class Gradient:
    """A parsed gradient setting: ``full``, or ``truncated`` to `steps` steps of the solver."""

    kind: str
    steps: int | None = None

    @classmethod
    def parse(cls, text: str) -> Gradient:
        """Read "full" or "truncated(n)".

        Raises:
            ConfigError: the text is neither, or n is below 1.
        """
        if text.strip() == "full":
            return cls("full")
        match = re.fullmatch(r"\s*truncated\(\s*(-?\d+)\s*\)\s*", text)
        if match is None:
            raise ConfigError(f'gradient is {text!r}; write "full" or "truncated(n)"')
        steps = int(match[1])
        if steps < 1:
            raise ConfigError(f"gradient is truncated to {steps} steps; use 1 or more")
        return cls("truncated", steps)
