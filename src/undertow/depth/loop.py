"""The loop of a recurrent-depth model: which iterations run, and which of them carry gradient.

    s_i = core(inject(s_{i-1}, e)),  i = 1..r

What one iteration computes is the caller's: a native model's core, or the looped layers of a hosted
one.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch.utils.checkpoint import checkpoint

from undertow.errors import ConfigError

# One iteration: the state ``[B, T, D]`` before it and its number, counted from 0, to the state
# after it.
Iteration = Callable[[torch.Tensor, int], torch.Tensor]

MOST_ITERATIONS = 100_000
Iterations = Annotated[int, Field(ge=1, le=MOST_ITERATIONS)]
"""A setting that is a number of iterations."""


def check_depth(name: str, value: int) -> None:
    """Refuse anything but a number of iterations."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ConfigError(f"{name} is {value!r}; use a whole number of iterations, 1 or more")
    if value > MOST_ITERATIONS:
        raise ConfigError(f"{name} is {value!r}; use {MOST_ITERATIONS:,} iterations or fewer")


@dataclass(frozen=True)
class Steps:
    """The iterations of one forward: the first ones without gradient, the last ones with it."""

    without_gradient: int
    with_gradient: int

    def __post_init__(self) -> None:
        for name in ("without_gradient", "with_gradient"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; use a whole number")
        if min(self.without_gradient, self.with_gradient) < 0 or self.total < 1:
            raise ConfigError(
                f"depth is {self.without_gradient} iterations without gradient and "
                f"{self.with_gradient} with it; neither may be negative, and together there must "
                "be at least 1"
            )

    @property
    def total(self) -> int:
        return self.without_gradient + self.with_gradient

    @classmethod
    def of(cls, depth: int, backward: int) -> Steps:
        """`depth` iterations, of which the last `backward` carry gradient, or all where there are
        fewer."""
        check_depth("depth", depth)
        depth = int(depth)  # NumPy's
        graded = min(depth, backward)
        return cls(depth - graded, graded)


def steps_from(depth: int | tuple[int, int] | Steps | None, default: int, backward: int) -> Steps:
    """What a model's `depth` argument means: a number of iterations, a pair (without, with
    gradient), or the default.

    Raises:
        ConfigError: it is below 1, or none of these.
    """
    if depth is None:
        depth = default
    if isinstance(depth, Steps):
        return depth
    if isinstance(depth, tuple | list):
        if len(depth) != 2 or not all(
            isinstance(part, numbers.Integral) and not isinstance(part, bool) for part in depth
        ):
            raise ConfigError(
                f"depth is {depth!r}; a pair gives the iterations without gradient and those with "
                "it"
            )
        return Steps(*map(int, depth))
    return Steps.of(depth, backward)


def iterate(
    iteration: Iteration,
    state: torch.Tensor,
    steps: Steps,
    start: int = 0,
    checkpointing: bool = False,
    watch: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Run iterations `start` to `steps.total` on `state` ``[B, T, D]`` and return the last state.

    Backpropagation is truncated: earlier iterations run without a graph. That follows from `steps`
    alone, never from `train()` or `eval()`. What the iterations share, such as the embeddings that
    each injects, gets the gradient of those that carry it. With `checkpointing` each of these keeps
    its input only and is computed again in the backward pass. `watch` is called after each
    iteration with its number and the states before and after it.
    """
    wanted = torch.is_grad_enabled()
    for index in range(start, steps.total):
        graded = wanted and index >= steps.without_gradient
        before = state
        with torch.set_grad_enabled(graded):
            if graded and checkpointing:
                state = checkpoint(iteration, state, index, use_reentrant=False)
            else:
                state = iteration(state, index)
        if watch is not None:
            watch(index, before, state)
    return state
