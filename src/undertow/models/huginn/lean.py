"""The block's arithmetic in as few calls as it takes, for passes without gradient in fp32 on a CPU.

There a token of decoding is hundreds of layer runs of one row each, and most of its time goes into
calls, not into arithmetic: modules that call modules, a norm of ten operations. `SandwichBlock` is
the definition; this equals it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from undertow.models.huginn.blocks import (
    Attention,
    BranchEnd,
    Context,
    GatedMLP,
    RMSNorm,
    SandwichBlock,
)

_PLAIN = {SandwichBlock, Attention, GatedMLP, RMSNorm, BranchEnd, nn.Linear}


def bind(block: SandwichBlock, hidden: torch.Tensor) -> SandwichBlock | LeanBlock:
    """The block in the form that suits a pass whose input is like `hidden` ``[B, T, D]``; good for
    this pass only."""
    if torch.is_grad_enabled() or hidden.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return block
    return LeanBlock(block) if all(is_plain(module) for module in block.modules()) else block


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module does what its class says on fp32 weights, and nothing else: no
    adapters, no hooks."""
    if (
        type(module) not in _PLAIN
        or module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in module.__dict__
    ):
        return False
    return all(
        parameter.dtype == torch.float32
        for parameter in module._parameters.values()
        if parameter is not None
    )


class LeanBlock:
    """A sandwich block's weights, and its function ``[B, T, D]`` to ``[B, T, D]``."""

    def __init__(self, block: SandwichBlock) -> None:
        attention, mlp = block.attn, block.mlp
        self.norms = [
            norm.weight for norm in (block.norm_1, block.norm_2, block.norm_3, block.norm_4)
        ]
        self.width = self.norms[0].shape[0]
        self.heads = attention.heads
        self.head_width = attention.head_width
        self.eps = torch.full((), block.norm_1.eps)
        self.project = attention.Wqkv.weight
        self.bias = attention.qk_bias
        self.attended = attention.proj.weight
        self.gated = mlp.fc.weight
        self.down = mlp.proj.weight
        self.layer = attention.layer

    def __call__(self, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        shape = hidden.shape
        # One token is a vector: its products are then those of a matrix and a vector, which read
        # the matrix once, in order.
        hidden = (
            hidden.reshape(self.width)
            if hidden.numel() == self.width
            else hidden.reshape(-1, self.width)
        )
        attended = self.attention(self.norm(hidden, 0), shape, context)
        hidden = self.norm(multiply(attended, self.attended, hidden), 1)
        gate, up = multiply(self.norm(hidden, 2), self.gated).chunk(2, dim=-1)
        return self.norm(multiply(F.silu(gate).mul_(up), self.down, hidden), 3).view(shape)

    def norm(self, hidden: torch.Tensor, which: int) -> torch.Tensor:
        """The RMSNorm: its mean square comes from the length of the vector, one call on a CPU."""
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=1 / self.width).rsqrt_()
        return hidden.mul(scale).mul_(self.norms[which])

    def attention(self, hidden: torch.Tensor, shape: torch.Size, context: Context) -> torch.Tensor:
        """What the attention's last matrix is applied to, in the shape of `hidden`."""
        batch, tokens, _ = shape
        projected = multiply(hidden, self.project).view(
            batch, tokens, 3, self.heads, self.head_width
        )
        both, values = projected[:, :, :2], projected[:, :, 2].transpose(1, 2)
        if self.bias is not None:
            both = both + self.bias[:, 0]
        pairs = torch.view_as_complex(
            both.view(batch, tokens, 2 * self.heads, self.head_width // 2, 2)
        )
        turned = torch.view_as_real(pairs * context.turns).view(
            batch, tokens, 2, self.heads, self.head_width
        )
        queries, keys = turned.permute(2, 0, 3, 1, 4).unbind()
        if context.cache is not None:
            keys, values = context.cache.layers[self.layer].update(keys, values)  # type: ignore[union-attr]
        causal = context.mask is None and tokens > 1
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=context.mask, is_causal=causal
        )
        return attended.transpose(1, 2).reshape(hidden.shape)


def multiply(
    hidden: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The linear map of a vector ``[D]`` or of rows ``[N, D]``, added to `residual`."""
    if hidden.ndim == 1:
        return (
            torch.mv(weight, hidden) if residual is None else torch.addmv(residual, weight, hidden)
        )
    return F.linear(hidden, weight) if residual is None else torch.addmm(residual, hidden, weight.T)
