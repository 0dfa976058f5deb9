"""The last pass of a solver, which gives the output, and the adjoint gradient of states that were
found without a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from undertow.solvers.agreement import largest
from undertow.solvers.base import RecurrentBlock, Solution
from undertow.solvers.gradients import Adjoint, Gradient


def last_pass(
    block: RecurrentBlock,
    states: torch.Tensor,
    gradient: Gradient,
    counted: Callable[[int], None] | None = None,
) -> Solution:
    """The output of one pass from `states` ``[B, T, W]``, and the states that it makes of them.

    Where gradients are on and `gradient` is an adjoint, the pass has a graph at `states` alone. The
    fixed-point map is one sweep and the scan along time, so the temporal residual is part of each
    product. `counted` is told in the backward pass how many products it took; see `FixedPoint`.
    """
    received = block.received_from(states)
    if not isinstance(gradient, Adjoint) or not torch.is_grad_enabled():
        output, readings = block.sweep(received, last=True)
        states = block.scan(readings)
    else:
        received = received.detach().requires_grad_()
        output, readings = block.sweep(received, last=True)
        states = block.scan(readings)
        most = gradient.most(-(-block.tokens // block.lag))
        if most > 0 and output.requires_grad:
            image = block.received_from(states)
            output = FixedPoint.apply(output, image, received, most, gradient.tolerance, counted)
        states = states.detach()
    return Solution(output, states, exact_prefix=block.tokens, received=received.detach())


class FixedPoint(torch.autograd.Function):
    """Gradient of an output at a fixed point ``R = F(R, θ)``, by the adjoint system ``λ = v + Jᵀ
    λ`` with ``J = ∂F/∂R``.

    `output` and `image` = F(R, θ) come from one pass with a graph at the solution `point`, a leaf.
    In the backward pass the output's gradient gives v, vector-Jacobian products on the kept graph
    give λ, and the graph is then walked once for the parameters, from both. J only reaches forward
    in time, so ``ceil(T / lag)`` products are exact. Nothing of how the solution was found is kept.

    `counted`, if given, is told how many products there were, without the last one where that
    changed less than the tolerance.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        image: torch.Tensor,
        point: torch.Tensor,
        most: int,
        tolerance: float | None,
        counted: Callable[[int], None] | None,
    ) -> torch.Tensor:
        ctx.output = output
        ctx.image = image
        ctx.point = point
        ctx.most = most
        ctx.tolerance = tolerance
        ctx.counted = counted
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (term,) = torch.autograd.grad(
            ctx.output, ctx.point, gradient, retain_graph=True, allow_unused=True
        )
        solution, products = term, 1
        for _ in range(ctx.most - 1):
            if term is None:
                break
            (term,) = torch.autograd.grad(
                ctx.image, ctx.point, term, retain_graph=True, allow_unused=True
            )
            if term is None:
                break
            solution = solution + term
            if ctx.tolerance is not None:
                share = float(term.norm()) / max(float(solution.norm()), sys.float_info.min)
                if largest(share, gradient.is_cuda) <= ctx.tolerance:
                    break
            products += 1
        if ctx.counted is not None:
            ctx.counted(products)
        return gradient, solution, None, None, None, None


def relative_change(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The norm of the change over the norm of what it led to."""
    with torch.no_grad():
        return (new - old).norm() / new.norm().clamp_min(torch.finfo(new.dtype).tiny)
