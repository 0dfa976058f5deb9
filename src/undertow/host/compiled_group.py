"""A rollout's groups of tokens, forward and backward, by one compiled call each.

A rollout calls each layer of the recurrent block for a few tokens at a time, and most of its time
in training goes into the small calls around the arithmetic. Here a group passes the whole block in
one graph of `torch.compile`, for any number of keys before it. The graph is given the keys and
values of the tokens before as inputs and gives the group's own as outputs; `Before` and `After` tie
both to the buffers of the rollout and to their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from transformers.cache_utils import Cache

from undertow.host.arguments import Call, CallLayout, Cutter, Group, Path, changed, found
from undertow.host.compiling import APART
from undertow.host.rollout_cache import RolloutCache, RolloutLayer
from undertow.host.sites import run_sites
from undertow.host.weight_gradients import Collected, Linears, WeightGradients, WithoutWeights
from undertow.pathways.base import Pathway

# Keys and values, by layer: ``[B, heads, n, head width]`` each.
Keyed = dict[int, torch.Tensor]


class GroupCache(Cache):
    """The cache of one group: the keys and values of the tokens before it, and the group's own once
    its layers have made them."""

    def __init__(self, keys_before: Keyed, values_before: Keyed) -> None:
        self.layers = []
        self.keys_before, self.values_before = keys_before, values_before
        self.keys: Keyed = {}
        self.values: Keyed = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.keys[layer_idx], self.values[layer_idx] = key_states, value_states
        keys = torch.cat([self.keys_before[layer_idx], key_states], dim=2)
        return keys, torch.cat([self.values_before[layer_idx], value_states], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return next(iter(self.keys_before.values())).shape[2]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length + self.get_seq_length(), 0


def run_group(
    pathway: Pathway,
    layers: dict[int, nn.Module],
    calls: dict[int, Call],
    caches: dict[int, Path],
    linears: Linears,
    hidden: torch.Tensor,
    received: torch.Tensor | None,
    written: torch.Tensor | None,
    keys: Keyed,
    values: Keyed,
    slots: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, Keyed, Keyed, dict[int, torch.Tensor]]:
    """One group through the block: its output ``[B, n, D]``, its states ``[B, n, W]``, its keys and
    values, and the inputs of its linear maps."""
    cache = GroupCache(keys, values)
    collected = Collected(linears, slots)
    with WithoutWeights(collected):

        def run(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            path = caches.get(layer)
            args, kwargs = calls[layer] if path is None else changed(calls[layer], {path: cache})
            collected.layer = layer
            output = layers[layer](hidden, *args, **kwargs)
            collected.layer = Collected.PATHWAY
            return output[0] if isinstance(output, tuple) else output

        output, readings = run_sites(pathway, hidden, received, written, run)
        states = pathway.update(readings, received)
    return output, states, cache.keys, cache.values, collected.inputs


@dataclass
class Held:
    """What a group's backward pass is given on its way.

    Attributes:
        layers: the buffers of the block's layers, in order.
        start, stop: the group's tokens.
        weights: collects the gradients of weights.
        rows: how many tokens these are in all rows.
        numbers: the linear maps whose inputs `After` keeps.
        inputs: these in the backward pass that runs, by number.
    """

    layers: list[RolloutLayer]
    start: int
    stop: int
    rows: int
    weights: WeightGradients
    numbers: tuple[int, ...] = ()
    inputs: dict[int, torch.Tensor] | None = None


class Before(torch.autograd.Function):
    """The keys and values before a group, views of the buffers, and its slots; a link of the
    rollout's chain.

    Its backward pass, the last of the group's, adds the gradients of the views to those of the
    buffers.
    """

    @staticmethod
    def forward(
        ctx: Any, link: torch.Tensor, token: torch.Tensor, held: Held, shapes: list[tuple[int, ...]]
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.held = held
        zero = link.new_zeros((), dtype=token.dtype)
        slots = [zero.expand(shape) for shape in shapes]
        return (
            *(each for layer in held.layers for each in layer.views(held.start)),
            *slots,
            (link.new_empty(())),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        held = ctx.held
        views = 2 * len(held.layers)
        for layer, (keys, values) in zip(
            held.layers, zip(gradients[:views:2], gradients[1:views:2], strict=True), strict=True
        ):
            layer.add_gradients(keys, values, held.start)
        if held.inputs is not None:
            held.weights.add(held.inputs, gradients[views:-1], held.rows)
            held.inputs = None
        return None, None, None, None


class After(torch.autograd.Function):
    """Writes a group's keys and values into the buffers; its output and states as they are, and a
    link of the rollout's chain.

    Its backward pass is the first of the group's, and runs after those of all later groups, when
    the buffers hold the gradients of its keys and values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        link: torch.Tensor,
        output: torch.Tensor,
        states: torch.Tensor,
        held: Held,
        *made: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.held = held
        count = 2 * len(held.layers)
        ctx.save_for_backward(*made[count:])
        for layer, keys, values in zip(held.layers, made[:count:2], made[1:count:2], strict=True):
            layer.write(keys, values, held.start)
        return output.view_as(output), states.view_as(states), link.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, output: torch.Tensor | None, states: torch.Tensor | None, _: Any
    ) -> tuple[torch.Tensor | None, ...]:
        held = ctx.held
        held.inputs = dict(zip(held.numbers, ctx.saved_tensors, strict=True))
        slots = [
            each for layer in held.layers for each in layer.gradients_of(held.start, held.stop)
        ]
        return None, output, states, None, *slots, *[None] * len(held.inputs)


@dataclass
class Saved:
    """A tensor that a group's backward pass needs; where it only repeats heads of a rollout's
    buffer, these in its place.

    Attributes:
        tensor: the tensor; None where `view` stands for it.
        view: keys or values so far, ``[B, heads, n, head width]``.
        times: how often each head is repeated.
        strides: how the tensor lay in memory, which a compiled backward pass insists on.
    """

    tensor: torch.Tensor | None
    view: torch.Tensor | None = None
    times: int = 1
    strides: tuple[int, ...] = ()

    def stands_for(self, view: torch.Tensor, tokens: int) -> bool:
        """Whether the tensor repeats the heads of a view, each as often, or holds it as it is:
        judged by its last `tokens`."""
        tensor = self.tensor
        assert tensor is not None
        times, rest = divmod(tensor.shape[1], view.shape[1])
        if rest or tensor.shape[0] != view.shape[0] or tensor.shape[2:] != view.shape[2:]:
            return False
        repeated = tensor[:, :, -tokens:].unflatten(1, (view.shape[1], times))
        return bool((repeated == view[:, :, None, -tokens:]).all())

    def let_go(self, view: torch.Tensor) -> None:
        """Keep the view in place of the tensor."""
        assert self.tensor is not None
        self.times, self.strides = self.tensor.shape[1] // view.shape[1], self.tensor.stride()
        self.view, self.tensor = view, None

    def again(self) -> torch.Tensor:
        """The tensor."""
        if self.tensor is not None:
            return self.tensor
        assert self.view is not None
        view = self.view[:, :, None].expand(-1, -1, self.times, -1, -1)
        shape = (view.shape[0], view.shape[1] * self.times, *view.shape[3:])
        made = view.new_empty_strided(shape, self.strides)
        made.unflatten(1, view.shape[1:3]).copy_(view)
        return made


class KeysOnce(saved_tensors_hooks):
    """Keeps keys and values of all tokens so far, which each group's backward pass needs, as views
    of the buffers: as copies, one a group, they would take memory quadratic in the length.

    Which of the saved tensors are such copies is found out in a forward's first group, when there
    are few tokens, and looked at again in each by its last token, whose keys no other layer has.
    """

    def __init__(self, buffers: list[RolloutLayer]) -> None:
        self.buffers = buffers
        self.stop = 0
        self.saved: list[Saved] = []
        # For each of these, by its number: the buffer and which of its views, if any.
        self.places: list[tuple[int, int] | None] = []
        super().__init__(self.pack, self.unpack)

    def of_group(self, stop: int) -> KeysOnce:
        """The hooks for the group that ends before token `stop`."""
        self.stop, self.saved = stop, []
        return self

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        # Kept as it is, a node's own output would hold that node: a cycle.
        tensor = tensor if tensor.grad_fn is None else tensor.detach()
        if tensor.ndim != 4 or tensor.shape[2] != self.stop:
            return tensor
        self.saved.append(Saved(tensor))
        return self.saved[-1]

    @staticmethod
    def unpack(kept: Saved | torch.Tensor) -> torch.Tensor:
        return kept.again() if isinstance(kept, Saved) else kept

    def settle(self) -> None:
        """Let go of the copies among what the group saved, whose own keys and values are written by
        now."""
        views = [layer.views(self.stop) for layer in self.buffers]
        every = [(layer, which) for layer in range(len(views)) for which in (0, 1)]
        if not self.places:
            self.places = [
                next((p for p in every if each.stands_for(views[p[0]][p[1]], self.stop)), None)
                for each in self.saved
            ]
        for each, place in zip(self.saved, self.places, strict=False):
            if place is not None and each.stands_for(views[place[0]][place[1]], 1):
                each.let_go(views[place[0]][place[1]])
        self.saved = []


@functools.cache
def compiled_group() -> Callable[..., Any]:
    """`run_group`, compiled anew for each kind of layer and shape of group, whatever the keys."""
    compiled: Callable[..., Any] = torch.compile(run_group, fullgraph=True, options=APART)
    return compiled


class CompiledGroups:
    """What the groups of one rollout have in common."""

    def __init__(
        self,
        pathway: Pathway,
        layers: list[nn.Module],
        layouts: list[CallLayout],
        cutter: Cutter,
        cache: RolloutCache,
    ) -> None:
        """`layers` and `layouts` are those of the whole model."""
        self.pathway, self.cutter, self.cache = pathway, cutter, cache
        self.layers = {index: layers[index] for index in pathway.block}
        self.layouts = {index: layouts[index] for index in pathway.block}
        self.caches = {i: each.cache for i, each in self.layouts.items() if each.cache is not None}
        self.buffers = [cache.buffers(index) for index in pathway.block]
        self.weights = WeightGradients(pathway, self.layers)
        self.kept = KeysOnce(self.buffers)

    def run(
        self,
        start: int,
        stop: int,
        hidden: torch.Tensor,
        received: torch.Tensor | None,
        written: torch.Tensor | None,
        chain: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens `start` to `stop`, of which `hidden` ``[B, n, D]`` is the block's input: its
        output ``[B, n, D]``, the states ``[B, n, W]``, and the link that the next group follows."""
        batch, count = hidden.shape[:2]
        held = Held(self.buffers, start, stop, batch * count, self.weights)
        shapes = [(batch, count, each.out_features) for each in self.weights.linears]
        *given, chain = Before.apply(chain, self.weights.token, held, shapes)
        views, slots = given[: 2 * len(self.buffers)], given[2 * len(self.buffers) :]
        for each in views:
            torch._dynamo.maybe_mark_dynamic(each, 2)
        calls = self.calls(start, stop, hidden.device)
        with self.kept.of_group(stop):
            output, states, keys, values, inputs = compiled_group()(
                self.pathway,
                self.layers,
                calls,
                self.caches,
                self.weights.by_layer,
                hidden,
                received,
                written,
                dict(zip(self.layers, views[::2], strict=True)),
                dict(zip(self.layers, views[1::2], strict=True)),
                slots,
            )
        held.numbers = tuple(inputs)
        made = [each for index in self.layers for each in (keys[index], values[index])]
        linked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = After.apply(
            chain, output, states, held, *made, *inputs.values()
        )
        self.kept.settle()
        return linked

    def calls(self, start: int, stop: int, device: torch.device) -> dict[int, Call]:
        """How the layers are called for a group, but for the cache."""
        group = Group(start, stop, None, device)
        calls = {index: self.cutter.cut(index, group, (0, stop)) for index in self.layers}
        for call, layout in {id(calls[i]): (calls[i], self.layouts[i]) for i in calls}.values():
            for path, value in found(call, layout.axes):
                if isinstance(value, torch.Tensor) and "key" in layout.axes[path]:
                    torch._dynamo.maybe_mark_dynamic(value, layout.axes[path].index("key"))
        return calls
