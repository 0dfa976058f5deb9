"""Huginn's layers: the sandwich block with biased queries and keys, and rotary positions over
interleaved pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from undertow.models.huginn.config import HuginnConfig


@dataclass
class Context:
    """What every layer of a forward is given besides its input.

    Attributes:
        turns: the rotary angles as complex numbers of length one ``[B or 1, T, 1, head width /
            2]``, in fp32.
        mask: which keys each query sees ``[B or 1, 1, T, N]``; None for the plain causal mask, or
            for a single query that sees all.
        cache: keys and values of the tokens before.
    """

    turns: torch.Tensor
    mask: torch.Tensor | None
    cache: Cache | None

    def rows(self, rows: torch.Tensor) -> Context:
        """The context of these rows ``[b]`` of the batch."""

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.shape[0] == 1 else tensor[rows]

        return Context(pick(self.turns), None if self.mask is None else pick(self.mask), self.cache)


def rotary_frequencies(config: HuginnConfig, device: torch.device | None = None) -> torch.Tensor:
    """The angle by which each pair of channels turns from one position to the next ``[head width /
    2]``."""
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    )
    return 1.0 / (config.rope_base**exponents)


def rotary_table(config: HuginnConfig) -> torch.Tensor:
    """Cosines and sines of the first positions, as checkpoints hold them: ``[1, block_size, 1, head
    width / 2, 2]``."""
    positions = torch.arange(config.block_size, dtype=torch.float32)
    angles = torch.outer(positions, rotary_frequencies(config))[None, :, None, :]
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def rotate(heads: torch.Tensor, context: Context) -> torch.Tensor:
    """Turn each pair of neighbouring channels of ``[B, T, heads, head width]`` by its token's
    angle, in fp32."""
    even, odd = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosines, sines = context.turns.real, context.turns.imag
    return (
        torch.stack([even * cosines - odd * sines, odd * cosines + even * sines], dim=-1)
        .flatten(-2)
        .type_as(heads)
    )


class RMSNorm(nn.Module):
    """RMSNorm in fp32; the weight is applied in the input's precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)
        return (
            F.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self.eps).type_as(hidden)
            * self.weight
        )


class BranchEnd(nn.Linear):
    """The last matrix of a residual branch, whose initial weights are smaller the deeper the model
    is."""


class Attention(nn.Module):
    """Causal self-attention whose queries and keys get a bias before they are turned."""

    def __init__(self, config: HuginnConfig, layer: int) -> None:
        super().__init__()
        self.heads = config.n_heads
        self.head_width = config.head_dim
        self.layer = layer
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.qk_bias = (
            nn.Parameter(torch.zeros(2, 1, self.heads, self.head_width)) if config.qk_bias else None
        )
        self.proj = BranchEnd(config.n_embd, config.n_embd, bias=False)

    def forward(self, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        """Attention of ``[B, T, D]`` to itself and to what `context.cache` holds."""
        projected = self.Wqkv(hidden).unflatten(
            -1, (3, self.heads, self.head_width)
        )  # [B, T, 3, heads, head width]
        both, values = projected[:, :, :2], projected[:, :, 2].transpose(1, 2)
        if self.qk_bias is not None:
            both = (both + self.qk_bias[:, 0]).type_as(both)
        turned = rotate(both.flatten(2, 3), context)
        queries, keys = turned.split(self.heads, dim=2)
        queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
        if context.cache is not None:
            keys, values = context.cache.layers[self.layer].update(keys, values)  # type: ignore[union-attr]
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=context.mask,
            is_causal=context.mask is None and queries.shape[2] > 1,
        )
        return self.proj(attended.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """SiLU-gated feed-forward; the first half of `fc` is the gate."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = BranchEnd(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc(hidden).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class SandwichBlock(nn.Module):
    """x ← norm_2(attn(norm_1 x) + x);  x ← norm_4(mlp(norm_3 x) + x). The outer norms sit on the
    residual stream."""

    def __init__(self, config: HuginnConfig, layer: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (
            RMSNorm(config.n_embd, config.norm_eps) for _ in range(4)
        )
        self.attn = Attention(config, layer)
        self.mlp = GatedMLP(config)

    def forward(self, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        hidden = self.norm_2(self.attn(self.norm_1(hidden), context) + hidden)
        return self.norm_4(self.mlp(self.norm_3(hidden)) + hidden)
