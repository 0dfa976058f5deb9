"""LoopLM's objectives for a learned exit gate (arXiv 2510.25741, section 3): plain tensors in, a
loss out.

`losses` ``[r, N]`` are the next-token losses of N tokens after each iteration, and `gates` ``[r,
N]`` the gate's λ there.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def exit_distribution(gates: torch.Tensor) -> torch.Tensor:
    """The probability ``[r, N]`` of stopping after each iteration: λ_t ∏_{j<t} (1 - λ_j); the last
    takes what is left."""
    going = torch.cat([torch.ones_like(gates[:1]), (1 - gates[:-1]).cumprod(0)])
    return torch.cat([going[:-1] * gates[:-1], going[-1:]])


def expected_loss(losses: torch.Tensor, gates: torch.Tensor, entropy: float = 0.1) -> torch.Tensor:
    """Stage I: the mean over tokens of Σ_t p_t L_t - β H(p), which trains the model and its gate
    together.

    The entropy bonus β keeps the gate from settling on one depth; it is the divergence from a
    uniform prior.
    """
    chances = exit_distribution(gates)
    spread = -(chances * chances.clamp(min=1e-9).log()).sum(0)
    return ((chances * losses).sum(0) - entropy * spread).mean()


def gate_loss(
    losses: torch.Tensor, gates: torch.Tensor, slope: float = 50.0, threshold: float = 0.005
) -> torch.Tensor:
    """Stage II: the gate learns to go on while that still lowers the loss; nothing else gets
    gradient.

    Going on to iteration t is right in so far as the gain I_t = max(0, L_{t-1} - L_t) exceeds
    `threshold`: w_t = σ(slope (I_t - threshold)) is the target of 1 - λ_{t-1}, by binary cross
    entropy.
    """
    gain = (losses[:-1] - losses[1:]).clamp(min=0).detach()
    target = torch.sigmoid(slope * (gain - threshold))
    return F.binary_cross_entropy((1 - gates[:-1]).clamp(1e-6, 1 - 1e-6), target)
