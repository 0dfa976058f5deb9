"""How the layers of the recurrent block run in one forward: three modes, of which a forward has
one.

- `WholeSequence`: all tokens at once, from a sequence's start. The layers are called as the
  backbone called them.
- `Rollout`: one group or span of tokens after another, from a sequence's start, on a cache of its
  own. A whole sequence has one, for the steps and spans that a solver asks of it.
- `Continuation`: one group after another on the cache that the model was called with.

Each has a `step`, one group of at most `lag` tokens and their new states, and a `sweep`, a stretch
of tokens that each receive what a solver gives them. Token numbers are those of the forward.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from undertow.host.arguments import Call, Cutter, Group, Path, changed, found
from undertow.host.attachment import Attachment
from undertow.host.checkpointing import checkpoints, is_reentrant, without_checkpointing
from undertow.host.compiled_group import CompiledGroups
from undertow.host.compiling import compiles_groups, eager_layers, runs_eagerly
from undertow.host.looping import HostedLoop, RunLayer
from undertow.host.rollout_cache import RolloutCache, UnrepeatedHeads
from undertow.host.sites import Streams, Swept, run_sites
from undertow.host.stack import Recording
from undertow.host.tokens import Rows
from undertow.pathways.base import Pathway

# The block's output ``[B, n, D]``, and the new states ``[B, n, W]``.
Stepped = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class Mode(ABC):
    """What the modes share.

    Attributes:
        attachment, pathway: the recurrence, and that in time.
        recording: the layers, and how the backbone called them.
        hidden: the input of the block ``[B, T, D]``.
        rows: which tokens receive a state.
        cache: what the model was called with, if anything; `past` tokens were in it.
        loop: the recurrence in depth, if any.
    """

    attachment: Attachment
    pathway: Pathway
    recording: Recording
    hidden: torch.Tensor
    rows: Rows
    cache: Cache | None
    past: int
    loop: HostedLoop | None

    def of_tokens(self, start: int, stop: int) -> Mode:
        """What runs tokens `start` to `stop`."""
        return self

    @abstractmethod
    def step(self, start: int, stop: int, state: torch.Tensor | None) -> Stepped:
        """One group of tokens, after the states ``[B, lag, W]`` of those before it, if any."""

    @abstractmethod
    def sweep(
        self,
        start: int,
        stop: int,
        received: torch.Tensor | None,
        last: bool = False,
        streams: Streams | None = None,
    ) -> Swept:
        """Tokens that receive the states ``[B, n, W]``, if any; the `last` gives the output. What
        passes the sites is noted in `streams`, if given."""

    def finish(self) -> None:  # noqa: B027
        """Leave the model's cache filled, and let go of the graph."""

    def group(
        self, start: int, stop: int, hidden: torch.Tensor, state: torch.Tensor | None, run: RunLayer
    ) -> Stepped:
        """One group, whose input is `hidden`, after the states ``[B, lag, W]`` of the tokens before
        it."""
        pathway, rows = self.pathway, self.rows
        receiving, written = rows.between(start, stop)
        received = None
        if state is not None:
            state = received = rows.of_group(state, start, stop, receiving)
        elif pathway.writes_without_state:
            received = hidden.new_zeros(*hidden.shape[:2], pathway.state_width)
        output, readings = run_sites(pathway, hidden, received, written, run)
        return output, pathway.update(readings, state)

    @cached_property
    def checkpointing(self) -> bool:
        """Whether the library would checkpoint a layer of the block."""
        return any(checkpoints(self.recording.layers[index]) for index in self.pathway.block)

    def on_all(self, run: RunLayer) -> RunLayer:
        """`run` on all tokens: with checkpoints of ours in place of the library's own reentrant
        ones, which no adjoint can differentiate through, and with the loop, if there is one."""
        if torch.is_grad_enabled() and self.checkpointing:
            run = functools.partial(self.checkpointed, run)
        return run if self.loop is None else looped(self.loop, run, 0)

    def checkpointed(self, run: RunLayer, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """A layer by a checkpoint of ours, or by `run` if the library would not checkpoint it by
        reentrant autograd."""
        recording = self.recording
        if not is_reentrant(recording.layers[layer]):
            return run(layer, hidden)
        call = self.calls_without_cache[layer]
        return checkpoint(run_plain, recording, layer, hidden, call, use_reentrant=False)

    @cached_property
    def calls_without_cache(self) -> dict[int, Call]:
        """The calls of the block's layers as the backbone made them, but for the cache and the room
        of a static one."""
        tokens = self.hidden.shape[1]
        shared: dict[int, Call] = {}
        for layer in self.pathway.block:
            call, layout = self.recording.calls[layer], self.attachment.layouts[layer]
            if id(call[1]) in shared:
                continue
            values: dict[Path, Any] = {}
            for path, value in found(call, layout.changing):
                if path == layout.cache:
                    values[path] = None
                elif isinstance(value, torch.Tensor) and "key" in layout.axes[path]:
                    axis = layout.axes[path].index("key")
                    if value.shape[axis] > tokens:
                        values[path] = value.narrow(axis, 0, tokens)
            shared[id(call[1])] = changed(call, values)
        return {layer: shared[id(self.recording.calls[layer][1])] for layer in self.pathway.block}

    @cached_property
    def cutter(self) -> Cutter:
        """Cuts the calls of the block's layers to groups of tokens."""
        return Cutter(self.recording.calls, self.attachment.layouts, self.pathway.block)


def looped(loop: HostedLoop, run: RunLayer, start: int) -> RunLayer:
    """`run` on tokens from `start` on, but all iterations of the loop where that begins."""
    return lambda layer, hidden: loop.layer(layer, hidden, start, run)


def run_plain(
    recording: Recording,
    layer: int,
    hidden: torch.Tensor,
    call: Call,
    start: int = 0,
    first_key: int = 0,
) -> torch.Tensor:
    """A layer without the library's own checkpointing."""
    with without_checkpointing(recording.layers[layer]):
        return recording.run(layer, hidden, call, start, first_key)


@dataclass(eq=False)
class WholeSequence(Mode):
    """All tokens at once, from a sequence's start."""

    def __post_init__(self) -> None:
        layers = [self.recording.layers[index] for index in self.pathway.block]
        modules = (self.pathway, *layers)
        self.learning = torch.is_grad_enabled() and (
            self.hidden.requires_grad
            or any(p.requires_grad for module in modules for p in module.parameters())
        )
        # Whether the model's cache lacks the block's keys and values, which one pass alone fills,
        # however many a solver makes.
        self.unfilled = self.cache is not None and not (self.learning and self.checkpointing)

    @cached_property
    def rollout(self) -> Rollout:
        """The groups and spans of this sequence, once the first is asked for."""
        shared = {each.name: getattr(self, each.name) for each in fields(Mode)}
        recomputing = self.learning and self.checkpointing
        return Rollout(**shared, learning=self.learning, recomputing=recomputing)

    def of_tokens(self, start: int, stop: int) -> Mode:
        return self if stop - start == self.hidden.shape[1] else self.rollout

    def step(self, start: int, stop: int, state: torch.Tensor | None) -> Stepped:
        return self.group(start, stop, self.hidden, state, self.layers(last=True))

    def sweep(
        self,
        start: int,
        stop: int,
        received: torch.Tensor | None,
        last: bool = False,
        streams: Streams | None = None,
    ) -> Swept:
        _, written = self.rows.between(start, stop)
        if last and self.unfilled and not torch.is_grad_enabled():
            # Of several such passes the latest gives the output, and the keys and values.
            if self.loop is not None:
                return self.rollout.sweep(start, stop, received, last, streams)
            with self.rollout.keys_and_values.group(0, None):
                run = self.kept
                return run_sites(self.pathway, self.hidden, received, written, run, streams)
        run = self.layers(last)
        return run_sites(self.pathway, self.hidden, received, written, run, streams)

    @cached_property
    def kept(self) -> RunLayer:
        """The layers, whose keys and values are kept until a later pass makes others."""
        own, recording = self.rollout.keys_and_values, self.recording
        calls: dict[int, Call] = {}
        for layer, call in self.calls_without_cache.items():
            path = self.attachment.layouts[layer].cache
            calls[layer] = call if path is None else changed(call, {path: own})
        return lambda layer, hidden: run_plain(recording, layer, hidden, calls[layer])

    def layers(self, last: bool) -> RunLayer:
        """The layers, called as the backbone called them; with its cache, if any, in the first pass
        that may be the `last`."""
        recording = self.recording
        if self.cache is None or (last and self.unfilled):
            self.unfilled = False
            return self.on_all(recording.run)
        calls = self.calls_without_cache
        return self.on_all(lambda layer, hidden: recording.run(layer, hidden, calls[layer]))

    def finish(self) -> None:
        if "rollout" in vars(self):
            self.rollout.finish()
            if self.unfilled:
                self.rollout.fill()


@dataclass(eq=False)
class Rollout(Mode):
    """One group or span of tokens after another, from a sequence's start, on a cache of its own.

    Attributes:
        learning: whether a gradient is wanted.
        recomputing: whether groups are computed again in the backward pass.
        keys_and_values: those of all groups so far.
        chain: the link that the next write into these follows; None where no gradient is wanted.
    """

    learning: bool
    recomputing: bool

    def __post_init__(self) -> None:
        layers, tokens = len(self.recording.layers), self.hidden.shape[1]
        if self.loop is None:
            self.keys_and_values = RolloutCache(layers, tokens)
        else:
            iterations, cursor = self.loop.forward.steps.total, self.loop.cursor
            self.keys_and_values = RolloutCache(layers, tokens, iterations, cursor)
        self.chain = self.hidden.new_zeros((), requires_grad=True) if self.learning else None

    def step(self, start: int, stop: int, state: torch.Tensor | None) -> Stepped:
        if state is not None and self.compiles(start, stop):
            try:
                return self.compiled(start, stop, state)
            except Exception as error:  # what a compiler cannot take has no kind of its own
                runs_eagerly(self.attachment.stack, error)
        run: Callable[..., Any] = self.linked
        if self.recomputing and torch.is_grad_enabled():
            # The library's own checkpointing would take the cache away; a whole group is
            # checkpointed instead.
            run = functools.partial(checkpoint, self.linked, use_reentrant=False)
        output, states, self.chain = run(start, stop, state, self.chain)
        return output, states

    def compiles(self, start: int, stop: int) -> bool:
        """Whether a group is one compiled call: a full one with a gradient, of a model whose layers
        are compiled, after tokens enough that no size is 0 or 1, of which graphs are made apart."""
        return (
            stop - start == self.pathway.lag
            and start >= max(2, self.pathway.lag)
            and self.chain is not None
            and torch.is_grad_enabled()
            and not self.recomputing
            and self.loop is None
            and self.recording.collected is None
            and compiles_groups(self.attachment.stack)
        )

    @cached_property
    def groups(self) -> CompiledGroups:
        """The groups that are compiled, once the first is run."""
        layers, layouts = self.recording.layers, self.attachment.layouts
        cache = self.keys_and_values
        return CompiledGroups(self.pathway, layers, layouts, self.cutter, cache)

    def compiled(self, start: int, stop: int, state: torch.Tensor) -> Stepped:
        """One group by a compiled call."""
        assert self.chain is not None
        receiving, written = self.rows.between(start, stop)
        received = self.rows.of_group(state, start, stop, receiving)
        hidden = self.hidden[:, start:stop]
        ran = self.groups.run(start, stop, hidden, received, written, self.chain)
        output, states, self.chain = ran
        return output, states

    def linked(
        self, start: int, stop: int, state: torch.Tensor | None, chain: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """One group after the link `chain`, and the link that the next group follows."""
        learning = chain is not None and torch.is_grad_enabled()
        repeats = learning and stop - start > 1 and self.attachment.grouped_queries
        hidden = self.hidden[:, start:stop]
        with (
            self.keys_and_values.group(start, chain if learning else None) as slot,
            UnrepeatedHeads(slot) if repeats and not self.recomputing else nullcontext(),
            eager_layers(self.attachment.stack),
        ):
            output, states = self.group(start, stop, hidden, state, self.layers(start, stop))
            return output, states, slot.chain if learning else chain

    def sweep(
        self,
        start: int,
        stop: int,
        received: torch.Tensor | None,
        last: bool = False,
        streams: Streams | None = None,
    ) -> Swept:
        _, written = self.rows.between(start, stop)
        hidden, run = self.hidden[:, start:stop], self.layers(start, stop)
        chain = self.chain if torch.is_grad_enabled() else None
        with self.keys_and_values.group(start, chain) as slot, eager_layers(self.attachment.stack):
            swept = run_sites(self.pathway, hidden, received, written, run, streams)
            self.chain = self.chain if slot.chain is None else slot.chain
        return swept

    def layers(self, start: int, stop: int) -> RunLayer:
        """The layers on tokens `start` to `stop`, called for these and all keys so far."""
        cutter, recording = self.cutter, self.recording
        group = Group(start, stop, self.keys_and_values, self.hidden.device)

        def run(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            return run_plain(recording, layer, hidden, cutter.cut(layer, group, (0, stop)), start)

        return run if self.loop is None else looped(self.loop, run, start)

    def finish(self) -> None:
        self.chain = None  # a checkpointed graph holds this, which must not hold the graph

    def fill(self) -> None:
        """Give the keys and values to the cache that the model was called with."""
        assert self.cache is not None
        loop = self.loop
        for layer, iteration in self.keys_and_values.filled():
            if loop is not None:
                loop.cursor.iteration = iteration if layer in loop.core else None
            self.cache.update(*self.keys_and_values.contents(layer, iteration), layer)
        if loop is not None:
            loop.cursor.leave_loop()


class Continuation(Mode):
    """One group after another on the cache that the model was called with."""

    def step(self, start: int, stop: int, state: torch.Tensor | None) -> Stepped:
        if stop - start == self.hidden.shape[1]:
            run = self.on_all(self.recording.run)
            return self.group(start, stop, self.hidden, state, run)
        return self.group(start, stop, self.hidden[:, start:stop], state, self.layers(start, stop))

    def sweep(
        self,
        start: int,
        stop: int,
        received: torch.Tensor | None,
        last: bool = False,
        streams: Streams | None = None,
    ) -> Swept:
        """All tokens, and once: each run of a layer is kept in the cache."""
        _, written = self.rows.between(start, stop)
        run = self.on_all(self.recording.run)
        return run_sites(self.pathway, self.hidden, received, written, run, streams)

    @cached_property
    def first_keys(self) -> dict[int, int]:
        """Where the keys that the backbone's masks were made for begin, for each layer, before the
        first group."""
        assert self.cache is not None
        tokens, cache = self.hidden.shape[1], self.cache
        return {layer: cache.get_mask_sizes(tokens, layer)[1] for layer in self.pathway.block}

    def layers(self, start: int, stop: int) -> RunLayer:
        """The layers on tokens `start` to `stop`, called for these and the keys that each sees."""
        assert self.cache is not None
        cutter, recording = self.cutter, self.recording
        cache, loop = self.cache, self.loop
        group, first_keys = Group(start, stop, cache, self.hidden.device), self.first_keys

        def run(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            if loop is None:
                length, offset = cache.get_mask_sizes(stop - start, layer)
                first = int(offset - first_keys[layer])
            else:  # the layer's cache has grown by these tokens at the first iteration already
                length, first = self.past + stop, 0
            call = cutter.cut(layer, group, (first, first + int(length)))
            return run_plain(recording, layer, hidden, call, start, first)

        if loop is None:
            return run
        loop.cursor.start = self.past + start
        return looped(loop, run, start)
