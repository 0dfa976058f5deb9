"""The loop of a hosted forward: some of the recorded layers run several times for each token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache

from undertow.depth.arguments import LOOP_ARGUMENTS as ALL_ARGUMENTS
from undertow.depth.arguments import LoopArguments, loop_arguments
from undertow.depth.cache import DepthCache, depth_layers
from undertow.depth.forward import DepthForward, DepthReport
from undertow.errors import ConfigError, DataError
from undertow.host.arguments import Call, CallLayout, changed, pick_rows
from undertow.host.attachment import Attachment, HostedDepth
from undertow.host.checkpointing import checkpoints, without_checkpointing
from undertow.host.stack import Recording
from undertow.host.vocabulary import final_norm

# What a looped model's forward and `generate` take besides their own arguments; `LoopArguments`
# says what they mean.
LOOP_ARGUMENTS = tuple(name for name in ALL_ARGUMENTS if name != "initial")
# Layer number, its input ``[B, n, D]`` to its output.
RunLayer = Callable[[int, torch.Tensor], torch.Tensor]


class HostedLoop:
    """The loop of one forward, which `forward` holds.

    Raises:
        ConfigError: the depth is below 1, or arguments that cannot go together are given.
    """

    def __init__(
        self,
        attachment: Attachment,
        recording: Recording,
        inputs: dict[str, Any],
        cache: Cache | None,
    ) -> None:
        handle = HostedDepth(attachment)
        self.attachment, self.recording = attachment, recording
        self.settings, self.inject = handle.settings, handle.loop.inject
        self.core = range(self.settings.core[0], self.settings.core[-1] + 1)
        asked = loop_arguments({name: inputs.get(name) for name in LOOP_ARGUMENTS})
        hidden = recording.hidden
        self.learning = torch.is_grad_enabled() and (
            hidden.requires_grad
            or any(
                p.requires_grad
                for module in (handle.loop, *recording.layers)
                for p in module.parameters()
            )
        )
        self.alone = attachment.pathway is None
        if not self.alone:
            self.check_beside_time(asked)
        past = 0 if cache is None else int(cache.get_seq_length())
        if cache is not None and past == 0 and is_static(cache):
            raise DataError(
                "a static cache has no room for iterations; leave it out, or give an "
                "undertow.depth.DepthCache"
            )
        # Entries of every iteration that nobody will read would double a training step's memory.
        unfilled = cache if self.learning and past == 0 else None
        self.forward = DepthForward(
            handle,
            asked,
            hidden,
            cache if unfilled is None else None,
            self.learning,
            of_rank_two(inputs.get("attention_mask")),
            of_rank_two(inputs.get("position_ids")),
        )
        self.cache, self.cursor = self.forward.cache, self.forward.cursor
        if unfilled is not None:
            depth_layers(unfilled, handle.layers).closed = True
        if self.cache is not cache:
            self.put_cache(self.cache)

    def check_beside_time(self, asked: LoopArguments) -> None:
        """Refuse what a recurrence in time, whose solvers run the loop again and again, cannot be
        given."""
        names = ("exit_rule", "resume", "warm_start", "watch")
        if given := [name for name in names if getattr(asked, name)]:
            raise ConfigError(
                f"{', '.join(given)} cannot be given beside a recurrence in time, whose solvers "
                "run the loop on some of the tokens, or again and again; leave it out, or detach "
                "the recurrence"
            )

    def put_cache(self, cache: Cache | None) -> None:
        """Have the recorded layers called with this cache."""

        def change(call: Call, layout: CallLayout) -> Call:
            return call if layout.cache is None else changed(call, {layout.cache: cache})

        self.recording.calls = self.changed_calls(change)

    def changed_calls(self, change: Callable[[Call, CallLayout], Call]) -> list[Call]:
        """The recorded calls, each distinct one changed once."""
        done: dict[int, Call] = {}
        calls = []
        for call, layout in zip(self.recording.calls, self.attachment.layouts, strict=True):
            if id(call[1]) not in done:
                done[id(call[1])] = change(call, layout)
            calls.append(done[id(call[1])])
        return calls

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer's output ``[B, T, D]``, where there is no recurrence in time."""
        return self.forward.run(HostedLayers(self, self.recording.run), hidden)

    def through(self, start: int, stop: int, hidden: torch.Tensor) -> torch.Tensor:
        """Layers `start` to `stop` of the host on all tokens ``[B, T, D]``, those that are looped
        in their loop."""
        for index in range(start, stop):
            hidden = self.layer(index, hidden, 0, self.recording.run)
        return hidden

    def layer(self, index: int, hidden: torch.Tensor, start: int, run: RunLayer) -> torch.Tensor:
        """Layer `index` on tokens from `start` on ``[B, n, D]`` or, where the loop begins, all of
        its iterations."""
        if index == self.core.start:
            return self.forward.loop(HostedLayers(self, run), hidden, start)
        once = index in self.settings.picked and index not in self.core
        return run(index, hidden) if once else hidden

    def finish(self) -> None:
        """Close the cache's entries of this forward, and report."""
        if self.alone:
            self.forward.finish()
        else:  # a rollout runs some tokens at a time, and nothing resumes from it
            self.forward.close()
        self.attachment.depth_report = DepthReport(self.forward.depths)


class HostedLayers:
    """The recorded layers (see `LoopedLayers`), by whatever runs one of them."""

    def __init__(self, loop: HostedLoop, run: RunLayer) -> None:
        self.loop = loop
        self.inject = loop.inject
        self.run = run
        self.settings, self.modules = loop.settings, loop.recording.layers
        self.norm = final_norm(loop.attachment.owners) if self.settings.norm else None
        self.checkpointing = (
            loop.learning
            and loop.cache is None
            and any(checkpoints(self.modules[index]) for index in self.settings.core)
        )

    def prelude(self, hidden: torch.Tensor) -> torch.Tensor:
        for index in self.settings.prelude:
            hidden = self.run(index, hidden)
        return hidden

    def iterate(self, state: torch.Tensor, embedding: torch.Tensor, index: int) -> torch.Tensor:
        if self.norm is not None and index > 0:
            state = self.norm(state)
        hidden = self.inject(state, embedding)
        for layer in self.settings.core:
            if self.checkpointing:
                with without_checkpointing(self.modules[layer]):
                    hidden = self.run(layer, hidden)
            else:
                hidden = self.run(layer, hidden)
        return hidden

    def coda(self, state: torch.Tensor) -> torch.Tensor:
        for index in self.settings.coda:
            state = self.run(index, state)
        return state

    def of_rows(self, rows: torch.Tensor) -> HostedLayers:
        batch = self.loop.recording.hidden.shape[0]

        def change(call: Call, layout: CallLayout) -> Call:
            return pick_rows(call, layout, rows, batch)

        recording = copy.copy(self.loop.recording)
        recording.calls = self.loop.changed_calls(change)
        part = copy.copy(self)
        part.run = recording.run
        return part


def is_static(cache: Cache) -> bool:
    """Whether a cache has a length for good, and was not made for a loop."""
    return bool(cache.is_compileable) and not isinstance(cache, DepthCache)


def of_rank_two(given: Any) -> torch.Tensor | None:
    """A model's input if it is a tensor of rows and tokens; others, as positions of images, say
    nothing here."""
    return given if isinstance(given, torch.Tensor) and given.ndim == 2 else None
