"""How far gradients reach back through a solver: a choice of its own, which `train()` and `eval()`
never change."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from undertow.errors import ConfigError
from undertow.solvers.agreement import largest


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


class Adjoint(torch.autograd.Function):
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
        steps: int,
        tolerance: float | None,
        counted: Callable[[int], None] | None,
    ) -> torch.Tensor:
        ctx.output, ctx.image, ctx.point = output, image, point
        ctx.steps, ctx.tolerance, ctx.counted = steps, tolerance, counted
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (term,) = torch.autograd.grad(
            ctx.output, ctx.point, gradient, retain_graph=True, allow_unused=True
        )
        solution, products = term, 1
        for _ in range(ctx.steps - 1):
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
