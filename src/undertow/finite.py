"""States that are no longer numbers, told by their token: all that follows would be made of them,
without an error."""

from __future__ import annotations

import math

import torch

from undertow.errors import DivergedError


def check_finite(states: torch.Tensor, real: torch.Tensor | None, first: int, remedy: str) -> None:
    """Refuse states ``[B, T, W]`` that are not finite at tokens that are `real` ``[B, T]``; None if
    all are.

    One sum and a look at it, where all are finite: a NaN or an infinity stays in it. On a GPU the
    look waits for the device.

    Args:
        first: the number of the first of these tokens in its row.
        remedy: what to do against it.

    Raises:
        DivergedError: some are not; names the first such token.
    """
    if states.is_meta or torch.compiler.is_compiling() or math.isfinite(states.sum().item()):
        return
    broken = ~torch.isfinite(states.detach()).all(dim=-1)
    broken = broken if real is None else broken & real.to(broken.device)
    if not bool(broken.any()):  # padding, or finite numbers whose sum is beyond their type
        return
    token = int(broken.any(dim=0).nonzero()[0])
    row = int(broken[:, token].nonzero()[0])
    raise DivergedError(
        f"the recurrent state of token {first + token} in row {row} (both from 0) is not finite; "
        f"{remedy}"
    )
