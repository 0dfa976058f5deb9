"""The recurrent block of a hosted forward: the model's own layers between the pathway's sites."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from undertow.errors import ConfigError
from undertow.host.arguments import Call, CallLayout, Cutter, Group, Path, replace
from undertow.host.attachment import Attachment
from undertow.host.checkpointing import checkpoints, is_reentrant, without_checkpointing
from undertow.host.looping import HostedLoop
from undertow.host.rollout_cache import RolloutCache, UnrepeatedHeads
from undertow.host.stack import Recording
from undertow.host.tokens import RowOrder, Rows
from undertow.solvers.base import RecurrentBlock, Solution, Solver


@dataclass
class Course:
    """What changes in the course of a forward, shared by the block and its spans.

    Attributes:
        chain: the link that the next write into the rollout's cache follows; None where no gradient
            is wanted.
        unfilled: whether the model's cache still lacks the block's keys and values.
        rollout: the cache of the groups, made when the first needs it.
    """

    chain: torch.Tensor | None
    unfilled: bool
    rollout: RolloutCache | None


class HostedBlock(RecurrentBlock):
    """One forward's block, or a span of its tokens. Token numbers are those of the block or span
    itself.

    Where a sequence starts, groups of tokens keep their keys and values in a `RolloutCache`;
    whatever continues a cache uses that cache. A sweep over the whole block calls the layers as the
    backbone did.
    """

    def __init__(
        self,
        attachment: Attachment,
        recording: Recording,
        hidden: torch.Tensor,
        cache: Cache | None,
        past: int,
        rows: Rows,
        before: torch.Tensor | None,
        loop: HostedLoop | None = None,
    ) -> None:
        """`hidden` ``[B, T, D]`` is the prefix's output and `past` the number of tokens that the
        cache held before; `before` ``[B, lag, W]`` holds the states of the last of these. `loop`
        is the recurrence in depth, if any."""
        assert attachment.pathway is not None
        self.pathway, self.loop = attachment.pathway, loop
        self.hidden, self.cache = hidden, cache
        self.memory, self.on_cuda = attachment.memory, hidden.is_cuda
        self.lag, self.before = self.pathway.lag, before
        self.origin, self.tokens, self.whole = 0, hidden.shape[1], True
        self.active = None if rows.active is None else rows.active[..., None].to(hidden.dtype)
        self.present = None if rows.present is None else rows.present[..., None].to(hidden.dtype)
        self.order = rows.order
        # The first `lag` tokens have no state to receive; `present` says so of those of an order.
        self.starts = before is None and rows.order is None
        self.calls = [recording.calls[index] for index in self.pathway.block]
        self.layouts = [attachment.layouts[index] for index in self.pathway.block]
        self.recording = recording
        modules = [recording.layers[index] for index in self.pathway.block]
        learning = torch.is_grad_enabled() and (
            hidden.requires_grad
            or any(
                p.requires_grad for module in (self.pathway, *modules) for p in module.parameters()
            )
        )
        self.depth, self.past = len(recording.layers), past
        # Where the keys that the backbone's masks were made for begin, for each layer.
        self.offsets: list[int] | None = None
        if cache is not None and past > 0 and self.tokens > self.lag:
            self.offsets = [
                cache.get_mask_sizes(self.tokens, index)[1] for index in self.pathway.block
            ]
        self.checkpointing = learning and any(checkpoints(module) for module in modules)
        self.grouped_queries = attachment.grouped_queries
        self.course = Course(
            chain=hidden.new_zeros((), requires_grad=True) if learning and past == 0 else None,
            unfilled=past == 0 and cache is not None and not self.checkpointing,
            rollout=None,
        )

    @property
    def rollout(self) -> RolloutCache | None:
        """The cache of the groups and spans of a sequence from its start; None where the model's
        own cache goes on."""
        if self.past == 0 and self.course.rollout is None:
            iterations = 1 if self.loop is None else self.loop.forward.steps.total
            cursor = None if self.loop is None else self.loop.cursor
            self.course.rollout = RolloutCache(self.depth, self.hidden.shape[1], iterations, cursor)
        return self.course.rollout

    @cached_property
    def cutter(self) -> Cutter:
        return Cutter(self.calls, self.layouts)

    # --- what solvers call

    def step(
        self, start: int, stop: int, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_states(state, self.lag, rows=None if state is None else state.shape[0])
        start, stop = start + self.origin, stop + self.origin
        if self.checkpointing and torch.is_grad_enabled() and not self._all(start, stop):
            # The library's own checkpointing would take the cache away; a whole group is
            # checkpointed instead.
            output, new_state, self.course.chain = checkpoint(
                self._group, start, stop, state, self.course.chain, use_reentrant=False
            )
        else:
            output, new_state, self.course.chain = self._group(
                start, stop, state, self.course.chain
            )
        return output, new_state

    def sweep(
        self, received: torch.Tensor | None, plain: bool = False, last: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self._check_states(received)
        start, stop = self.origin, self.origin + self.tokens
        if (
            received is None and not plain and self.before is not None
        ):  # what comes before is known: start from that
            nothing = self.before.new_zeros(self.before.shape[0], self.tokens, self.before.shape[2])
            received = self.received_from(nothing)
        if self.whole:
            return self._sites(
                start, stop, received, plain, self._filling() if last else self._without_cache()
            )
        assert self.rollout is not None
        with self.rollout.group(
            start, self.course.chain if torch.is_grad_enabled() else None
        ) as group:
            output, readings = self._sites(start, stop, received, plain)
            self.course.chain = group.chain if group.chain is not None else self.course.chain
        return output, readings

    def recent(self, before: torch.Tensor | None, states: torch.Tensor, start: int) -> torch.Tensor:
        if self.order is None and states.shape[1] >= self.lag:
            return states[:, -self.lag :]
        before = self._no_states(states) if before is None else before
        if self.order is not None:
            return self.order.recent(before, states, self.origin + start)
        return torch.cat([before, states], dim=1)[:, -self.lag :]

    def received_from(self, states: torch.Tensor) -> torch.Tensor:
        self._check_states(states)
        before = self._no_states(states) if self.before is None else self.before
        order = self._order
        states = states if order is None else order.together(states)
        received = torch.cat([before, states], dim=1)[:, : self.tokens]
        received = received if order is None else order.apart(received)
        present = self._present(self.origin, self.origin + self.tokens)
        return received if present is None else received * present

    @torch.no_grad()
    def initial_states(self) -> torch.Tensor | None:
        if not self.pathway.reads_residual:
            return None
        hidden = self.hidden[:, self.origin : self.origin + self.tokens]
        return self.scan([self.pathway.read(site, hidden) for site in sorted(self.pathway.reads)])

    def update(self, readings: list[torch.Tensor], received: torch.Tensor) -> torch.Tensor:
        self._check_states(received)
        return self.pathway.update(readings, received)

    def scan(self, readings: list[torch.Tensor]) -> torch.Tensor:
        present = (
            None
            if self.present is None
            else self.present[:, self.origin : self.origin + self.tokens]
        )
        order = self._order
        if order is None:
            return self.pathway.scan(readings, self.before, present)
        readings = [order.together(reading) for reading in readings]
        present = None if present is None else order.together(present)
        return order.apart(self.pathway.scan(readings, self.before, present))

    def span(self, start: int, stop: int, before: torch.Tensor | None) -> HostedBlock:
        part = copy.copy(self)
        part.origin, part.tokens, part.before = self.origin + start, stop - start, before
        part.whole = self.whole and stop - start == self.tokens
        return part

    def check_solution(self, solver: Solver, solution: Solution) -> None:
        """Refuse what a solver gave if it is not what it must give."""
        name = f"the solver {type(solver).__name__}"
        if not isinstance(solution, Solution):
            raise ConfigError(
                f"{name} gave a {type(solution).__name__}; give an undertow.solvers.Solution("
                "output, states, exact_prefix)"
            )
        self._check_states(solution.states, by=name)
        if solution.output.shape != self.hidden.shape:
            raise ConfigError(
                f"{name} gave an output of shape {list(solution.output.shape)}; give the last "
                f"sweep's, {list(self.hidden.shape)}"
            )

    def finish(self) -> None:
        """Give the keys and values of a rollout to the cache that the model was called with, and
        let go of the graph."""
        self.course.chain = (
            None  # a checkpointed graph holds this block, which must not hold the graph
        )
        if self.course.unfilled:
            assert self.cache is not None and self.rollout is not None
            for index, iteration in self.rollout.filled():
                if self.loop is not None:
                    self.loop.cursor.iteration = iteration if index in self.loop.core else None
                self.cache.update(*self.rollout.contents(index, iteration), index)
            if self.loop is not None:
                self.loop.cursor.leave_loop()

    # --- how they are carried out; token numbers are the forward's

    @property
    def _order(self) -> RowOrder | None:
        """The order of the block's, or the span's, tokens."""
        if self.order is None or self.tokens == self.hidden.shape[1]:
            return self.order
        return RowOrder(self.order.real[:, self.origin : self.origin + self.tokens])

    def _no_states(self, states: torch.Tensor) -> torch.Tensor:
        """The states before a sequence ``[B, lag, W]``: none."""
        return states.new_zeros(states.shape[0], self.lag, states.shape[2])

    def _check_states(
        self,
        states: torch.Tensor | None,
        count: int | None = None,
        rows: int | None = None,
        by: str = "a solver",
    ) -> None:
        """Refuse states of another shape than those of `count` tokens, all by default: broadcasting
        would hide it."""
        wanted = (
            self.hidden.shape[0] if rows is None else rows,
            self.tokens if count is None else count,
            self.pathway.state_width,
        )
        if states is not None and states.shape != wanted:
            raise ConfigError(
                f"{by} gave states of shape {list(states.shape)}; give one a row and token, "
                f"{list(wanted)}"
            )

    def _all(self, start: int, stop: int) -> bool:
        return stop - start == self.hidden.shape[1]

    def _group(
        self, start: int, stop: int, state: torch.Tensor | None, chain: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """One group's output and states, and the link of the rollout's chain that the next group
        follows."""
        if state is not None:
            state = (
                state[:, : stop - start]
                if self.order is None
                else self.order.received(state, start, stop)
            )
            present = self._present(start, stop)
            state = state if present is None else state * present
        if self._all(start, stop):
            output, readings = self._sites(start, stop, state, calls=self._filling())
        elif self.rollout is None:
            output, readings = self._sites(start, stop, state)
        else:
            learning = chain is not None and torch.is_grad_enabled()
            repeats = (
                learning and stop - start > 1 and self.grouped_queries and not self.checkpointing
            )
            with (
                self.rollout.group(start, chain if learning else None) as group,
                UnrepeatedHeads(group) if repeats else nullcontext(),
            ):
                output, readings = self._sites(start, stop, state)
                chain = group.chain if learning else chain
        return output, self.pathway.update(readings, state), chain

    def _sites(
        self,
        start: int,
        stop: int,
        received: torch.Tensor | None,
        plain: bool = False,
        calls: list[Call] | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Tokens `start` to `stop` through the block: write, read and run layers, site by site.

        `calls` are the calls of the layers; None cuts them to these tokens.
        """
        pathway = self.pathway
        hidden = self.hidden if self._all(start, stop) else self.hidden[:, start:stop]
        written = self._written(start, stop)
        if received is None and pathway.writes_without_state:
            received = hidden.new_zeros(*hidden.shape[:2], pathway.state_width)
        if plain:
            received = None
        readings = []
        group = None
        if calls is None:
            cache = self.cache if self.rollout is None else self.rollout
            assert cache is not None
            group = Group(start, stop, cache, hidden.device)
            if self.loop is not None and self.rollout is None:
                self.loop.cursor.start = self.past + start

        def run(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            position = layer - pathway.first_layer
            if calls is None:
                assert group is not None
                return self._cut_layer(position, hidden, group)
            if torch.is_grad_enabled() and is_reentrant(self.recording.layers[layer]):
                return checkpoint(
                    self._plain_layer,
                    layer,
                    hidden,
                    self._without_cache()[position],
                    use_reentrant=False,
                )
            return self.recording.run_call(layer, hidden, calls[position])

        for site in range(pathway.first_layer, pathway.stop_layer + 1):
            if site in pathway.writes and received is not None:
                added = pathway.write(site, hidden, received)
                hidden = hidden + (added if written is None else written * added)
            if site in pathway.reads:
                readings.append(pathway.read(site, hidden))
            if site < pathway.stop_layer:
                hidden = (
                    run(site, hidden)
                    if self.loop is None
                    else self.loop.layer(site, hidden, start, run)
                )
        return hidden, readings

    def _cut_layer(self, position: int, hidden: torch.Tensor, group: Group) -> torch.Tensor:
        if self.rollout is not None:
            keys = (0, group.stop)
        elif self.loop is not None:
            keys = (
                0,
                self.past + group.stop,
            )  # a layer's cache has grown by these tokens at the first iteration already
        else:
            assert self.offsets is not None
            length, offset = group.cache.get_mask_sizes(
                group.stop - group.start, position + self.pathway.first_layer
            )
            first = int(offset - self.offsets[position])
            keys = (first, first + int(length))
        layer, call = position + self.pathway.first_layer, self.cutter.cut(position, group, keys)
        with without_checkpointing(self.recording.layers[layer]):
            return self.recording.run_call(layer, hidden, call, group.start, keys[0])

    def _plain_layer(self, layer: int, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        """A layer without the library's own checkpointing, for one of ours."""
        with without_checkpointing(self.recording.layers[layer]):
            return self.recording.run_call(layer, hidden, call)

    def _filling(self) -> list[Call]:
        """The calls of the layers as the backbone made them; one pass alone fills its cache,
        however many a solver makes."""
        if self.past == 0 and self.cache is not None and not self.course.unfilled:
            return self._without_cache()
        self.course.unfilled = False
        return self.calls

    def _without_cache(self) -> list[Call]:
        """The calls of the layers as the backbone made them, but for the cache and the room of a
        static one."""
        tokens = self.hidden.shape[1]
        shared: dict[int, Call] = {}

        def change(path: Path, value: Any, layout: CallLayout) -> Any:
            if isinstance(value, Cache):
                return None
            axes = layout.axes.get(path, ()) if isinstance(value, torch.Tensor) else ()
            if "key" in axes and value.shape[axes.index("key")] > tokens:
                return value.narrow(axes.index("key"), 0, tokens)
            return value

        calls = []
        for call, layout in zip(self.calls, self.layouts, strict=True):
            if id(call[1]) not in shared:
                shared[id(call[1])] = replace(call, functools.partial(change, layout=layout))
            calls.append(shared[id(call[1])])
        return calls

    def _present(self, start: int, stop: int) -> torch.Tensor | None:
        """Which of the tokens have a state to receive, ``[B, n, 1]``; None for all."""
        present = None if self.present is None else self.present[:, start:stop]
        if self.starts and start < self.lag:
            head = (
                torch.arange(start, stop, device=self.hidden.device)
                .ge(self.lag)[None, :, None]
                .to(self.hidden.dtype)
            )
            present = head if present is None else present * head
        return present

    def _written(self, start: int, stop: int) -> torch.Tensor | None:
        """Where a write counts, ``[B, n, 1]``: at active tokens that have a state, if the pathway
        needs one."""
        if self.pathway.writes_without_state:
            return None if self.active is None else self.active[:, start:stop]
        return self._present(start, stop)
