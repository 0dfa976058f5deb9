"""Keys and values of a rollout, written once into preallocated buffers, with exact gradients.

A cache that grows by concatenation copies, and in training keeps, every prefix: memory quadratic in
the length. Here each group of tokens writes its keys and values into a slot of one buffer and reads
a view of the slots so far. The gradients of the views are summed in a second buffer, from which
each slot's is taken once all later groups have added theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from transformers.cache_utils import Cache, CacheLayerMixin

from undertow.depth.cache_layers import Cursor

# Which output of `WriteSlot` a tensor comes from, by which operations, and of which shape but for
# the tokens.
Origin = tuple[int, tuple[str, ...], tuple[int, int, int]]


@dataclass
class Slot:
    """Where the next group writes, shared by the layers of a rollout.

    Attributes:
        tokens: the tokens of the whole rollout.
        start: the group's first.
        chain: the link that the group's first write follows; None where no gradient is wanted.
        seen, writer: the keys and values that the last layer was given, and the node that made
            them.
        repeats: for each way that such a tensor was made into a larger one, whether that repeats
            its heads.
    """

    tokens: int
    start: int = 0
    chain: torch.Tensor | None = None
    seen: tuple[torch.Tensor, ...] = ()
    writer: Any = None
    repeats: dict[Origin, bool] = field(default_factory=dict)


class RolloutLayer(CacheLayerMixin):
    """The buffers of one layer: keys and values ``[B, heads, T, head width]`` and, in a backward
    pass, their gradients."""

    is_sliding = (
        False  # it holds every key; the masks that the layers get still confine a sliding window
    )

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.slot = slot
        self.gradients: list[torch.Tensor] = []
        self.backward_pass = -1  # the one whose gradients these are

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        tokens = self.slot.tokens
        self.keys = key_states.new_empty(*key_states.shape[:2], tokens, key_states.shape[-1])
        self.values = value_states.new_empty(
            *value_states.shape[:2], tokens, value_states.shape[-1]
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states.detach(), value_states.detach())
        slot = self.slot
        if (
            slot.chain is None or not torch.is_grad_enabled()
        ):  # some iterations of a loop run without gradient
            return self.write(key_states, value_states, slot.start)
        keys, values, slot.chain = WriteSlot.apply(
            key_states, value_states, slot.chain, self, slot.start
        )
        slot.seen, slot.writer = (keys.detach(), values.detach()), keys.grad_fn
        return keys, values

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the slots from `start` on; views of all slots so far.

        A slot is never written twice with other values (checkpointing may write the same again), so
        views that autograd keeps stay valid. `.data` tells autograd so: an alias with a version
        counter of its own.
        """
        assert self.keys is not None and self.values is not None
        stop = start + key_states.shape[-2]
        self.keys.data[:, :, start:stop] = key_states
        self.values.data[:, :, start:stop] = value_states
        return self.views(stop)

    def views(self, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of the first `stop` tokens."""
        assert self.keys is not None and self.values is not None
        return self.keys.data[:, :, :stop], self.values.data[:, :, :stop]

    def add_gradients(
        self, keys: torch.Tensor | None, values: torch.Tensor | None, stop: int
    ) -> None:
        """Add the gradients of such views to those of the buffers."""
        for buffer, gradient in zip(self.summed(), (keys, values), strict=True):
            if gradient is not None:
                buffer[:, :, :stop] += gradient

    def gradients_of(self, start: int, stop: int) -> list[torch.Tensor]:
        """What all later tokens have added to the gradients of some slots."""
        return [buffer[:, :, start:stop].clone() for buffer in self.summed()]

    def summed(self) -> list[torch.Tensor]:
        """The gradients of the buffers in this backward pass.

        Another pass through the same graph starts from zero, whatever part of the graph the last
        one ran.
        """
        backward_pass = torch._C._current_graph_task_id()
        if self.backward_pass != backward_pass:
            assert self.keys is not None and self.values is not None
            self.backward_pass = backward_pass
            self.gradients = [torch.zeros_like(self.keys), torch.zeros_like(self.values)]
        return self.gradients

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slot.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.slot.start

    def get_max_length(self) -> int:
        return self.slot.tokens


@dataclass
class Repeated:
    """A saved tensor that holds every key head of `heads` ``[B, heads, n, head width]`` `times`
    times over."""

    heads: torch.Tensor
    times: int


class UnrepeatedHeads(saved_tensors_hooks):
    """Keeps the keys and values that attention repeats for grouped queries as what they are: views
    of the buffers.

    Where a group of several tokens needs a mask, the library's attention copies each key head for
    all its query heads, and autograd would keep those copies, group after group: memory quadratic
    in the length. Such a copy is not kept but made again. It is told by the operations that made
    it, which are compared once, element by element, with what they stand for.
    """

    # More than an attention's own operations between its keys and what it saves.
    LONGEST = 8

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Repeated:
        if tensor.ndim == 4 and tensor.grad_fn is not None and self.slot.seen:
            origin = self.origin(tensor)
            if origin is not None:
                heads = self.slot.seen[origin[0]]
                times = tensor.shape[1] // heads.shape[1]
                if origin not in self.slot.repeats:
                    self.slot.repeats[origin] = self.repeats(tensor.detach(), heads, times)
                if self.slot.repeats[origin]:
                    return Repeated(heads, times)
        return tensor.detach()  # kept as it is, a node's own output would hold that node: a cycle

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        """How a tensor that may repeat the last layer's heads was made of them; None if it was
        not."""
        names: list[str] = []
        node, output = tensor.grad_fn, 0
        while node is not None and len(names) < self.LONGEST:
            if node is self.slot.writer:
                batch, count, tokens, width = tensor.shape
                return (
                    (output, tuple(names), (batch, count, width))
                    if tokens == self.slot.seen[output].shape[2]
                    else None
                )
            if len(node.next_functions) != 1:
                return None
            names.append(node.name())
            ((node, output),) = node.next_functions
        return None

    @staticmethod
    def repeats(tensor: torch.Tensor, heads: torch.Tensor, times: int) -> bool:
        """Whether ``[B, heads * times, n, head width]`` holds each head `times` times over."""
        if times < 2 or [tensor.shape[0], tensor.shape[1], *tensor.shape[2:]] != [
            heads.shape[0],
            heads.shape[1] * times,
            *heads.shape[2:],
        ]:
            return False
        grouped = tensor.unflatten(1, (heads.shape[1], times))
        return torch.equal(grouped, heads[:, :, None].expand_as(grouped))

    @staticmethod
    def unpack(kept: torch.Tensor | Repeated) -> torch.Tensor:
        return (
            kept.heads.repeat_interleave(kept.times, dim=1) if isinstance(kept, Repeated) else kept
        )


class WriteSlot(torch.autograd.Function):
    """Write a group's keys and values; return all so far, and a link of the chain that orders the
    backward pass.

    Every call consumes the link of the call before it, so autograd runs the backward of a call only
    after those of all later calls, when the gradient buffers hold everything that later groups had
    to add to this group's slots.
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
        ctx.layer = layer
        ctx.start, ctx.stop = start, start + keys.shape[-2]
        return *layer.write(keys, values, start), link.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        layer = ctx.layer
        layer.add_gradients(*gradients[:2], ctx.stop)
        return *layer.gradients_of(ctx.start, ctx.stop), None, None, None


class RolloutCache(Cache):
    """The cache that the recurrent block's layers see during a rollout of `tokens` tokens from the
    sequence's start.

    Where layers are looped, each of the `iterations` has buffers of its own; the `cursor` says
    which is the running one.
    """

    def __init__(
        self, layers: int, tokens: int, iterations: int = 1, cursor: Cursor | None = None
    ) -> None:
        self.slot, self.count = Slot(tokens), layers
        self.cursor = cursor or Cursor()
        super().__init__(layers=[RolloutLayer(self.slot) for _ in range(layers * iterations)])

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        place = (self.cursor.iteration or 0) * self.count + layer_idx
        return super().update(key_states, value_states, place, *args, **kwargs)

    @contextmanager
    def group(self, start: int, chain: torch.Tensor | None) -> Iterator[Slot]:
        """Let the layers write a group from token `start` on, after the link `chain`; None where no
        gradient is wanted.

        The slot's chain does not outlive the group, even one that a recomputation breaks off: the
        graph holds the layers, and these must not hold the graph.
        """
        self.slot.start, self.slot.chain = start, chain
        try:
            yield self.slot
        finally:
            self.slot.chain = self.slot.writer = None
            self.slot.seen = ()

    def buffers(self, layer: int) -> RolloutLayer:
        """Those of a layer that is not looped."""
        held = self.layers[layer]
        assert isinstance(held, RolloutLayer)
        return held

    def filled(self) -> list[tuple[int, int]]:
        """The layers that hold something, each with its iteration, in order."""
        return [
            (i % self.count, i // self.count)
            for i, layer in enumerate(self.layers)
            if layer.is_initialized  # type: ignore[union-attr]
        ]

    def contents(self, layer: int, iteration: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer, ``[B, heads, T, head width]`` each, without a graph."""
        held = self.layers[iteration * self.count + layer]
        assert isinstance(held, RolloutLayer) and held.keys is not None and held.values is not None
        return held.keys.data, held.values.data
