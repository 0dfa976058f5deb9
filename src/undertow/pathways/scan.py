"""T²MLR's state update solved exactly along time for frozen readings: ``R_t = norm(y_t + R_{t-1})``.

Elementwise in time but for the norm, so a tight loop without layers. Linearising the norm with a frozen scale, to use an
associative scan, is not an option: products of the scales overflow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class NormScan(torch.autograd.Function):
    """The scan with a backward pass of its own, which walks back once and keeps two tensors."""

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
        """States ``[B, T, D]`` of `readings` ``[B, T, D]``.

        `initial` ``[B, D]`` is the state before the first token, `present` ``[B, T, 1]`` 0 where a token receives none.
        With `clamp` the scale is kept within 1/clamp and clamp and treated as a constant in the backward pass.
        """
        total = readings.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # [T, B, D], becomes the states
        scales = total.new_empty(*total.shape[:2], 1)
        gates = None if present is None else present.expand(readings.shape[0], -1, -1).transpose(0, 1)
        state = initial
        for t in range(total.shape[0]):
            row, scale = total[t], scales[t]
            if state is not None:
                row += state if gates is None else gates[t] * state
            torch.linalg.vector_norm(row, dim=-1, keepdim=True, out=scale)
            scale.square_().div_(row.shape[-1]).add_(epsilon).rsqrt_()
            if clamp is not None:
                scale.clamp_(1 / clamp, clamp)
            row *= scale
            state = row
        ctx.save_for_backward(total, scales, gates)
        ctx.clamp, ctx.detach_residual, ctx.has_initial = clamp, detach_residual, initial is not None
        return total.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, scales, gates = ctx.saved_tensors
        inputs = gradient.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # becomes that of the readings
        carried: torch.Tensor | None = None
        for t in range(states.shape[0] - 1, -1, -1):
            row = inputs[t]
            if carried is not None:
                row += carried
            if ctx.clamp is None:
                row -= states[t] * (row * states[t]).mean(-1, keepdim=True)
            row *= scales[t]
            if not ctx.detach_residual:
                carried = row if gates is None else gates[t] * row
        initial = carried if ctx.has_initial else None
        return inputs.transpose(0, 1), initial, None, None, None, None
