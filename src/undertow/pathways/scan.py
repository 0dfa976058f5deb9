"""T²MLR's state update solved exactly along time for frozen readings: ``R_t = norm(y_t + g_t
R_{t-1})`` (arXiv 2607.15178).

Elementwise in time but for the norm, so a tight loop without layers: `norm_scan_reference` says
what is computed, `NormScan` computes it with a backward pass of its own, by a loop of few calls or
by the kernels of `scan_triton`. Linearising the norm with a frozen scale, to use an associative
scan, is not an option: products of the scales overflow.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def norm_scan_reference(
    readings: torch.Tensor,
    initial: torch.Tensor | None,
    present: torch.Tensor | None,
    clamp: float | None,
    detach_residual: bool,
    epsilon: float,
) -> torch.Tensor:
    """States ``[B, T, D]`` of `readings` ``[B, T, D]``, token by token: the definition that the
    fast ones are held to.

    `initial` ``[B, D]`` is the state before the first token, none if it is None. `present` ``[B, T,
    1]`` or ``[1, T, 1]`` is the gate ``g_t``: 0 where a token receives no state, None for 1
    everywhere. The norm is RMSNorm without a weight; with `clamp` its scale is kept within 1/clamp
    and clamp and is a constant in the backward pass, as in the released code. `detach_residual`
    cuts the gradient from a state to the one before.
    """
    states: list[torch.Tensor] = []
    state = initial
    for t in range(readings.shape[1]):
        total = readings[:, t]
        if state is not None:
            residual = state.detach() if detach_residual else state
            total = total + (residual if present is None else present[:, t] * residual)
        measured = total if clamp is None else total.detach()
        scale = torch.rsqrt(measured.square().mean(-1, keepdim=True) + epsilon)
        if clamp is not None:
            scale = scale.clamp(1 / clamp, clamp)
        state = total * scale
        states.append(state)
    return torch.stack(states, dim=1)


class NormScan(torch.autograd.Function):
    """`norm_scan_reference`, faster: it accumulates in at least fp32 and keeps the states and a
    scale per token."""

    @staticmethod
    def forward(
        ctx: Any,
        readings: torch.Tensor,
        initial: torch.Tensor | None,
        present: torch.Tensor | None,
        clamp: float | None,
        detach_residual: bool,
        epsilon: float,
    ) -> torch.Tensor:
        exact = torch.promote_types(readings.dtype, torch.float32)
        gates = None if present is None else present.to(exact).expand(readings.shape[0], -1, -1)
        walk, ctx.walk_back = _passes(uses_triton(readings))
        states, scales = walk(readings, initial, gates, clamp, epsilon)
        ctx.save_for_backward(states, scales, gates)
        ctx.clamp = clamp
        ctx.detach_residual = detach_residual
        ctx.has_initial = initial is not None
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, scales, gates = ctx.saved_tensors
        inputs = ctx.walk_back(
            gradient, states, scales, gates, ctx.clamp is None, not ctx.detach_residual
        )
        initial = None
        if ctx.has_initial and not ctx.detach_residual:
            initial = inputs[:, 0] if gates is None else gates[:, 0] * inputs[:, 0]
        return inputs, initial, None, None, None, None


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether `NormScan` runs on this tensor as Triton kernels, which it does on CUDA wherever
    Triton works."""
    return tensor.is_cuda and _triton_works()


@functools.cache
def _triton_works() -> bool:
    try:
        import triton
    except ImportError:
        return False
    try:
        triton.runtime.driver.active.get_current_target()
    except (
        Exception
    ) as error:  # older releases build their driver on first use, which takes a C compiler
        warnings.warn(
            "Triton is installed but does not start, so T²MLR's scan runs as a slower loop: "
            f"{error}",
            stacklevel=2,
        )
        return False
    return True


def _passes(
    triton: bool,
) -> tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], Callable[..., torch.Tensor]]:
    """The forward and the backward pass, as kernels or as loops."""
    if not triton:
        return _forward_loop, _backward_loop
    from undertow.pathways import scan_triton  # imports triton

    return scan_triton.forward, scan_triton.backward


# The loops below are bound by the number of calls a token, not by arithmetic. So they walk over
# contiguous rows [B, D] of [T, B, D], fold the scale of one token into the addition of the next,
# and apply all scales at once in the end.


def _forward_loop(
    readings: torch.Tensor,
    initial: torch.Tensor | None,
    gates: torch.Tensor | None,
    clamp: float | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States ``[B, T, D]``, and the scales ``[B, T, 1]`` that made them; `gates` ``[B, T, 1]`` in
    the scales' type."""
    exact = torch.promote_types(readings.dtype, torch.float32)
    width = readings.shape[-1]
    root = math.sqrt(
        width
    )  # a scale is root / length, with length = sqrt(|total|² + width * epsilon)
    totals = readings.transpose(0, 1).to(exact, copy=True, memory_format=torch.contiguous_format)
    lengths = totals.new_empty(*totals.shape[:2], 1)
    shortest = totals.new_full((1, 1), math.sqrt(width * epsilon))
    if initial is not None:
        totals[0] += initial if gates is None else gates[:, 0] * initial
    rows, norms = totals.unbind(), lengths.unbind()
    weights = None if gates is None else gates.transpose(0, 1).unbind()
    for t in range(len(rows)):
        if t > 0:
            if weights is None:
                rows[t].addcdiv_(rows[t - 1], norms[t - 1], value=root)
            else:
                rows[t].addcmul_(rows[t - 1], weights[t] / norms[t - 1], value=root)
        torch.linalg.vector_norm(rows[t], dim=-1, keepdim=True, out=norms[t])
        norms[t].hypot_(shortest)
        if clamp is not None:
            norms[t].clamp_(root / clamp, root * clamp)
    scales = root / lengths
    totals *= scales
    return totals.to(readings.dtype).transpose(0, 1), scales.transpose(0, 1)


def _backward_loop(
    gradient: torch.Tensor,
    states: torch.Tensor,
    scales: torch.Tensor,
    gates: torch.Tensor | None,
    through_norm: bool,
    through_residual: bool,
) -> torch.Tensor:
    """The gradient of the readings ``[B, T, D]`` from that of the states; the scales are constants
    if not `through_norm`.

    With ``G_t`` the whole gradient of state t, that of its total is ``scale_t (G_t - R_t (R_t ·
    G_t) / D)``, exact with the epsilon as well; times the gate it is carried back to the state
    before.
    """
    width = states.shape[-1]
    totals = gradient.transpose(0, 1).to(
        scales.dtype, copy=True, memory_format=torch.contiguous_format
    )
    rows, directions = totals.unbind(), states.transpose(0, 1).to(scales.dtype).unbind()
    weights = (scales if gates is None else scales * gates).transpose(0, 1).unbind()
    product, along = totals.new_empty(totals.shape[1:]), totals.new_empty(totals.shape[1], 1)
    for t in range(len(rows) - 1, -1, -1):
        if through_residual and t + 1 < len(rows):
            rows[t].addcmul_(rows[t + 1], weights[t + 1])
        if through_norm:
            torch.mul(rows[t], directions[t], out=product)
            torch.sum(product, -1, keepdim=True, out=along)
            rows[t].addcmul_(directions[t], along, value=-1 / width)
    totals *= scales.transpose(0, 1)
    return totals.to(gradient.dtype).transpose(0, 1)
