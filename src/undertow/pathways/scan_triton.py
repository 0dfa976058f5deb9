"""The scan of T²MLR as two Triton kernels: one program a batch row, the state in registers, one
walk along time.

Imported only where Triton is: CUDA builds of PyTorch bring it. `scan` says what is computed and
chooses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    readings: tl.tensor,
    initial: tl.tensor,
    gates: tl.tensor,
    states: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    CLAMP: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """States and scales of one batch row; `initial`, `gates` and CLAMP may be None."""
    exact: tl.constexpr = scales.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    readings += row * tokens * width
    states += row * tokens * width
    scales += row * tokens
    if gates is not None:
        gates += row * tokens
    if initial is not None:
        state = tl.load(initial + row * width + columns, mask=inside, other=0.0).to(exact)
    else:
        state = tl.zeros([BLOCK], exact)
    following = tl.load(readings + columns, mask=inside, other=0.0)
    for t in range(tokens):
        reading = following.to(exact)
        readings += tl.where(t + 1 < tokens, width, 0)
        following = tl.load(
            readings + columns, mask=inside, other=0.0
        )  # on its way while this token's norm is computed
        if gates is not None:
            state *= tl.load(gates + t)
        total = reading + state
        scale = tl.rsqrt(tl.sum(total * total, 0) / width + EPSILON)
        if CLAMP is not None:
            most, least = tl.full([], CLAMP, exact), tl.full([], 1 / CLAMP, exact)
            scale = tl.where(
                scale > most, most, tl.where(scale < least, least, scale)
            )  # NaN stays NaN
        state = total * scale
        tl.store(states + columns, state.to(states.dtype.element_ty), mask=inside)
        tl.store(scales + t, scale)
        states += width


@triton.jit(do_not_specialize=["tokens"])
def backward_kernel(
    gradient: tl.tensor,
    states: tl.tensor,
    scales: tl.tensor,
    gates: tl.tensor,
    inputs: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    THROUGH_NORM: tl.constexpr,
    THROUGH_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The gradient of the readings, `inputs`, of one batch row, from the last token to the
    first."""
    exact: tl.constexpr = scales.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    last = ((row + 1) * tokens - 1) * width
    gradient += last
    states += last
    inputs += last
    scales += row * tokens
    if gates is not None:
        gates += row * tokens
    carried = tl.zeros([BLOCK], exact)
    following = tl.load(gradient + columns, mask=inside, other=0.0)
    following_state = tl.load(states + columns, mask=inside, other=0.0)
    for back in range(tokens):
        total = following.to(exact) + carried
        state = following_state.to(exact)
        step = tl.where(back + 1 < tokens, width, 0)
        gradient -= step
        states -= step
        following = tl.load(
            gradient + columns, mask=inside, other=0.0
        )  # fetched ahead, as in the forward pass
        following_state = tl.load(states + columns, mask=inside, other=0.0)
        t = tokens - 1 - back
        if THROUGH_NORM:
            total -= state * (tl.sum(total * state, 0) / width)
        total *= tl.load(scales + t)
        tl.store(inputs + columns, total.to(inputs.dtype.element_ty), mask=inside)
        inputs -= width
        if THROUGH_RESIDUAL:
            carried = total
            if gates is not None:
                carried *= tl.load(gates + t)


def forward(
    readings: torch.Tensor,
    initial: torch.Tensor | None,
    gates: torch.Tensor | None,
    clamp: float | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States ``[B, T, D]`` of `readings` ``[B, T, D]``, and the scales ``[B, T, 1]`` that made
    them.

    `initial` is ``[B, D]``, `gates` ``[B, T, 1]``. The scales are in fp32, in fp64 for readings in
    fp64.
    """
    batch, tokens, width = readings.shape
    states = torch.empty_like(readings, memory_format=torch.contiguous_format)
    scales = readings.new_empty(
        batch, tokens, 1, dtype=torch.promote_types(readings.dtype, torch.float32)
    )
    first = None if initial is None else initial.expand(batch, width).contiguous()
    received = None if gates is None else gates.contiguous()
    with torch.cuda.device_of(
        readings
    ):  # Triton launches on the current device, whatever the tensors'
        forward_kernel[(batch,)](
            readings.contiguous(),
            first,
            received,
            states,
            scales,
            tokens,
            width,
            clamp,
            epsilon,
            **_blocks(width),
        )
    return states, scales


def backward(
    gradient: torch.Tensor,
    states: torch.Tensor,
    scales: torch.Tensor,
    gates: torch.Tensor | None,
    through_norm: bool,
    through_residual: bool,
) -> torch.Tensor:
    """The gradient of the readings ``[B, T, D]`` from that of the states; the scales are constants
    if not `through_norm`."""
    batch, tokens, width = states.shape
    inputs = torch.empty_like(states)
    received = None if gates is None else gates.contiguous()
    with torch.cuda.device_of(states):
        backward_kernel[(batch,)](
            gradient.contiguous(),
            states,
            scales,
            received,
            inputs,
            tokens,
            width,
            through_norm,
            through_residual,
            **_blocks(width),
        )
    return inputs


def _blocks(width: int) -> dict[str, int]:
    """One block holds a whole row, in about sixteen numbers a thread: a narrow row's sum stays
    within one warp."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 32)}
