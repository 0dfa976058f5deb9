"""Keys and values of a rollout, written once into preallocated buffers, with exact gradients.

A cache that grows by concatenation copies, and in training keeps, every prefix: memory quadratic in the length. Here each
group of tokens writes its keys and values into a slot of one buffer and reads a view of the slots so far. The gradients of
the views are summed in a second buffer, from which each slot's is taken once all later groups have added theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers.cache_utils import Cache, CacheLayerMixin


class RolloutLayer(CacheLayerMixin):
    """The buffers of one layer: keys and values ``[B, heads, T, head width]`` and, in a backward pass, their gradients."""

    is_sliding = False  # it holds every key; the masks that the layers get still confine a sliding window

    def __init__(self, rollout: RolloutCache) -> None:
        super().__init__()
        self.rollout = rollout
        self.gradients: list[torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        tokens = self.rollout.tokens
        self.keys = key_states.new_empty(*key_states.shape[:2], tokens, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], tokens, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states.detach(), value_states.detach())
        rollout = self.rollout
        if rollout.chain is None:
            return self.write(key_states, value_states, rollout.start)
        keys, values, rollout.chain = WriteSlot.apply(key_states, value_states, rollout.chain, self, rollout.start)
        return keys, values

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the slots from `start` on; views of all slots so far.

        A slot is never written twice with other values (checkpointing may write the same again), so views that autograd
        keeps stay valid. `.data` tells autograd so: an alias with a version counter of its own.
        """
        assert self.keys is not None and self.values is not None
        stop = start + key_states.shape[-2]
        self.keys.data[:, :, start:stop] = key_states
        self.values.data[:, :, start:stop] = value_states
        return self.keys.data[:, :, :stop], self.values.data[:, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rollout.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.rollout.start

    def get_max_length(self) -> int:
        return self.rollout.tokens


class WriteSlot(torch.autograd.Function):
    """Write a group's keys and values; return all so far, and a link of the chain that orders the backward pass.

    Every call consumes the link of the call before it, so autograd runs the backward of a call only after those of all
    later calls, when the gradient buffers hold everything that later groups had to add to this group's slots.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        link: torch.Tensor,
        layer: RolloutLayer,
        start: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.start, ctx.stop = layer, start, start + keys.shape[-2]
        return *layer.write(keys, values, start), link.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        layer, start, stop = ctx.layer, ctx.start, ctx.stop
        if layer.gradients is None:
            layer.gradients = [torch.zeros_like(layer.keys), torch.zeros_like(layer.values)]
        slots = []
        for buffer, gradient in zip(layer.gradients, gradients[:2], strict=True):
            if gradient is not None:
                buffer[:, :, :stop] += gradient
            slots.append(buffer[:, :, start:stop].clone())
            buffer[:, :, start:stop] = 0  # ready for another backward pass through the same graph
        return *slots, None, None, None


class RolloutCache(Cache):
    """The cache that the recurrent block's layers see during a rollout of `tokens` tokens from the sequence's start."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.tokens = tokens
        self.start = 0
        self.chain: torch.Tensor | None = None
        super().__init__(layers=[RolloutLayer(self) for _ in range(layers)])

    def open(self, start: int, chain: torch.Tensor | None) -> None:
        """Say where the next group writes, and which link it follows; None where no gradient is wanted."""
        self.start, self.chain = start, chain

    def contents(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer, ``[B, heads, T, head width]`` each, without a graph."""
        held = self.layers[layer]
        assert isinstance(held, RolloutLayer) and held.keys is not None and held.values is not None
        return held.keys.data, held.values.data
