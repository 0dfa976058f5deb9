"""What reveals that a recurrent-depth model collapses while it trains (arXiv 2502.05171, section
4.3).

A bad run makes all tokens' states alike (correlation near 1), or learns not to look at the state at
all (the last iteration changes nothing, and the loss is the same at every depth).
"""

from __future__ import annotations

import torch


class StateMonitor:
    """The states before and after the last iteration of a forward: give it as a model's `watch`."""

    def __init__(self) -> None:
        self.before: torch.Tensor | None = None
        self.after: torch.Tensor | None = None

    def __call__(self, index: int, before: torch.Tensor, after: torch.Tensor) -> None:
        self.before, self.after = before.detach(), after.detach()

    def measures(self, real: torch.Tensor | None = None) -> dict[str, float]:
        """The measures of the forward, by name; `real` ``[B, T]`` leaves out padding."""
        if self.before is None or self.after is None:
            return {}
        return state_measures(self.before, self.after, real)


@torch.no_grad()
def state_measures(
    before: torch.Tensor, after: torch.Tensor, real: torch.Tensor | None = None
) -> dict[str, float]:
    """Measures of the states ``[B, T, D]`` before and after an iteration.

    - token_correlation: mean cosine similarity of the states of two different tokens of a row.
    - relative_residual: ‖s_r - s_{r-1}‖ / ‖s_r‖, averaged over tokens.
    - state_norm: root mean square of the entries of s_r.
    """
    before, after = before.float(), after.float()
    weight = (
        torch.ones(after.shape[:2], device=after.device)
        if real is None
        else real.to(after.device).float()
    )
    counts = weight.sum(1)
    directions = torch.nn.functional.normalize(after, dim=-1) * weight[..., None]
    # The sum over pairs of different tokens is the square of the sum, without the squares.
    pairs = directions.sum(1).pow(2).sum(-1) - counts
    some = counts > 1
    correlation = (
        (pairs[some] / (counts[some] * (counts[some] - 1))).mean()
        if bool(some.any())
        else torch.tensor(0.0)
    )
    norms = after.norm(dim=-1)
    residual = (after - before).norm(dim=-1) / norms.clamp(min=1e-12)
    total = weight.sum().clamp(min=1)
    square = after.pow(2).mean(-1)
    return {
        "token_correlation": float(correlation),
        "relative_residual": float((residual * weight).sum() / total),
        "state_norm": float(((square * weight).sum() / total).sqrt()),
    }
