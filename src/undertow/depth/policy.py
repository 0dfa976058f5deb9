"""How many iterations' keys and values a depth-aware cache keeps for each token, counted in
iterations.

Every policy keeps iteration `i` in the slot `slot(i)`, and the first `slots(depth)` iterations in
slots of their own.
"""

from __future__ import annotations

from typing import ClassVar

from undertow.depth.loop import Iterations
from undertow.settings import settings


@settings
class Full:
    """Keep every iteration: decoding then equals one pass over the whole text."""

    kind: ClassVar[str] = "full"

    def slots(self, depth: int) -> int:
        return depth

    def slot(self, iteration: int) -> int:
        return iteration


@settings
class Budget:
    """Keep the last `iterations` of them: iteration i overwrites iteration i - n (arXiv 2502.05171,
    section 6.2)."""

    kind: ClassVar[str] = "budget"

    iterations: Iterations = 4
    """How many to keep."""

    def slots(self, depth: int) -> int:
        return min(depth, self.iterations)

    def slot(self, iteration: int) -> int:
        return iteration % self.iterations


@settings
class Last:
    """Keep the last iteration only: all iterations of later tokens read it."""

    kind: ClassVar[str] = "last"

    def slots(self, depth: int) -> int:
        return 1

    def slot(self, iteration: int) -> int:
        return 0


@settings
class Anchor:
    """Keep the first iterations for good and the later ones in turn."""

    kind: ClassVar[str] = "anchor"

    first: Iterations = 8
    """Iterations from the first on that are never overwritten."""
    turning: Iterations = 4
    """Slots that the later ones share in turn."""

    def slots(self, depth: int) -> int:
        return min(depth, self.first + self.turning)

    def slot(self, iteration: int) -> int:
        return (
            iteration
            if iteration < self.first
            else self.first + (iteration - self.first) % self.turning
        )


CachePolicy = Full | Budget | Last | Anchor
