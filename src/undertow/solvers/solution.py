"""The pass at a solution: output and gradient, once the states are found without a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from undertow.solvers.base import RecurrentBlock
from undertow.solvers.gradients import Adjoint, Gradient


def pass_at_solution(
    block: RecurrentBlock,
    states: torch.Tensor,
    gradient: Gradient,
    counted: Callable[[int], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, T, D]`` and states ``[B, T, W]`` of one pass with a graph at `states`, with an
    adjoint gradient.

    The fixed-point map is one sweep and the scan along time, so the temporal residual is part of
    each product. `counted` is told in the backward pass how many products it took; see `Adjoint`.
    """
    received = block.received_from(states).detach().requires_grad_()
    output, readings = block.sweep(received, last=True)
    states = block.scan(readings)
    steps = gradient.steps if gradient.steps is not None else -(-block.tokens // block.lag)
    if steps > 0 and output.requires_grad:
        output = Adjoint.apply(
            output, block.received_from(states), received, steps, gradient.tolerance, counted
        )
    return output, states.detach()


def relative_change(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The norm of the change over the norm of what it led to."""
    with torch.no_grad():
        return (new - old).norm() / new.norm().clamp_min(torch.finfo(new.dtype).tiny)
