"""One hosted forward: the prefix, the solved recurrent block and the suffix, over the layers that the backbone recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from undertow.host.arguments import Cutter, find_cache, leaves
from undertow.host.rollout_cache import RolloutCache
from undertow.host.stack import HostedForward, Recording, first_output
from undertow.host.state import state_layer
from undertow.host.tokens import active_tokens, documents, present_states
from undertow.solvers.base import RecurrentBlock

if TYPE_CHECKING:
    from undertow.host.attach import Attachment


class Forward:
    """What a hosted forward needs to know besides the recorded calls: the attachment and the model's inputs."""

    def __init__(self, attachment: Attachment, stack: torch.nn.ModuleList, inputs: dict[str, Any]) -> None:
        self.attachment, self.inputs = attachment, inputs
        self.stack: torch.nn.ModuleList | None = stack
        self.arity = attachment.arity
        self.token: Token[HostedForward | None] | None = None

    def run(self, recording: Recording) -> torch.Tensor:
        """The output ``[B, T, D]`` of the last layer, recurrence included."""
        attachment, pathway = self.attachment, self.attachment.pathway
        hidden = recording.hidden
        batch, tokens = hidden.shape[:2]
        cache = find_cache(recording.calls[0])
        states = None if cache is None else state_layer(cache, len(recording.layers), pathway.lag)
        past = 0 if cache is None else int(cache.get_seq_length())
        recent = None if states is None else states.recent()

        mask = next(
            (
                v
                for path, v in leaves(recording.calls[pathway.first_layer % len(recording.layers)])
                if path in attachment.layouts[pathway.first_layer % len(recording.layers)].masks
            ),
            None,
        )
        active = active_tokens(
            self.inputs.get("attention_mask"), mask, self.inputs.get("recurrent_mask"), batch, tokens, past
        )
        present = present_states(
            active,
            documents(self.inputs.get("position_ids")),
            None if recent is None or recent[1] is None else recent[1][..., 0],
            recent is not None,
            tokens,
            pathway.lag,
        )

        block = HostedBlock(attachment, recording, cache, past, active, present, None if recent is None else recent[0])
        for index in range(pathway.first_layer):
            hidden = recording.run(index, hidden)
        block.begin(hidden)
        hidden, new_states, attachment.report = attachment.solver.solve(block)
        block.hand_over()
        if states is not None:
            states.append(new_states.detach(), None if active is None else active[..., None])
        for index in range(pathway.stop_layer, len(recording.layers)):
            hidden = recording.run(index, hidden)
        return hidden


class HostedBlock(RecurrentBlock):
    """The recurrent block of a hosted forward: the model's own layers between the pathway's sites."""

    def __init__(
        self,
        attachment: Attachment,
        recording: Recording,
        cache: Cache | None,
        past: int,
        active: torch.Tensor | None,
        present: torch.Tensor | None,
        initial: torch.Tensor | None,
    ) -> None:
        self.pathway = attachment.pathway
        self.recording, self.cache, self.past = recording, cache, past
        self.layers = range(self.pathway.first_layer, self.pathway.stop_layer)
        self.layouts = attachment.layouts
        self.tokens, self.lag, self.initial = recording.hidden.shape[1], self.pathway.lag, initial
        dtype = recording.hidden.dtype
        # What a write adds counts where the token is active and, unless a pathway writes without one, has a state.
        written = active if self.pathway.writes_without_state else present
        self.written = None if written is None else written[..., None].to(dtype)
        self.present = None if present is None else present[..., None].to(dtype)

    def begin(self, hidden: torch.Tensor) -> None:
        """Take the prefix's output ``[B, T, D]`` as the block's input and choose the cache that its groups use."""
        self.hidden = hidden
        self.rollout: RolloutCache | None = None
        self.chain: torch.Tensor | None = None
        self.checkpointing = False
        if self.tokens <= self.lag or not self.layers:
            return
        calls = [self.recording.calls[index] for index in self.layers]
        self.cutter = Cutter(calls, [self.layouts[index] for index in self.layers], self.tokens)
        modules = [self.recording.layers[index] for index in self.layers]
        gradients = torch.is_grad_enabled() and (
            hidden.requires_grad or any(p.requires_grad for module in (self.pathway, *modules) for p in module.parameters())
        )
        if self.past == 0:
            self.rollout = RolloutCache(len(self.recording.layers), self.tokens)
            if gradients:
                self.chain = hidden.new_zeros((), requires_grad=True)
        else:
            assert self.cache is not None
            self.offsets = [self.cache.get_mask_sizes(self.tokens, index)[1] for index in self.layers]
        self.checkpointing = gradients and any(checkpoints(module) for module in modules)

    def step(self, start: int, stop: int, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden if stop - start == self.tokens else self.hidden[:, start:stop]
        if self.checkpointing and self.rollout is not None:
            # The library's own checkpointing would take the cache away; a whole group is checkpointed instead.
            output, new_state, self.chain = checkpoint(
                self._group, start, stop, hidden, state, self.chain, use_reentrant=False
            )
        else:
            output, new_state, self.chain = self._group(start, stop, hidden, state, self.chain)
        return output, new_state

    def _group(
        self,
        start: int,
        stop: int,
        hidden: torch.Tensor,
        state: torch.Tensor | None,
        chain: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """One group, and the link of the rollout's chain that the next group follows."""
        if self.rollout is None:
            return *self._sites(start, stop, hidden, state), None
        with self.rollout.group(start, chain) as group:
            output, new_state = self._sites(start, stop, hidden, state)
            return output, new_state, group.chain

    def _sites(
        self, start: int, stop: int, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `start` to `stop` through the block: write, read and run layers, site by site."""
        pathway = self.pathway
        done: dict[Any, Any] = {}  # what is cut for this group
        if state is not None and self.present is not None:
            state = state * self.present[:, start:stop]
        received = state
        if received is None and pathway.writes_without_state:
            received = hidden.new_zeros(*hidden.shape[:2], pathway.state_width)
        written = None if self.written is None else self.written[:, start:stop]
        readings = []
        for site in range(pathway.first_layer, pathway.stop_layer + 1):
            if site in pathway.writes and received is not None:
                added = pathway.write(site, hidden, received)
                hidden = hidden + (added if written is None else written * added)
            if site in pathway.reads:
                readings.append(pathway.read(site, hidden))
            if site < pathway.stop_layer:
                hidden = self._layer(site, start, stop, hidden, done)
        return hidden, pathway.update(readings, state)

    def _layer(self, index: int, start: int, stop: int, hidden: torch.Tensor, done: dict[Any, Any]) -> torch.Tensor:
        if stop - start == self.tokens:
            return self.recording.run(index, hidden)
        position, module = index - self.pathway.first_layer, self.recording.layers[index]
        if self.rollout is not None:
            cache: Cache = self.rollout
            keys = (0, stop)
        else:
            assert self.cache is not None
            cache = self.cache
            length, offset = cache.get_mask_sizes(stop - start, index)
            first = int(offset - self.offsets[position])
            keys = (first, first + int(length))
        args, kwargs = self.cutter.cut(position, start, stop, cache, keys, done, hidden.device)
        with without_checkpointing(module):
            return first_output(module(hidden, *args, **kwargs))

    def hand_over(self) -> None:
        """Give the keys and values of a rollout to the cache that the model was called with."""
        self.chain = None  # a checkpointed graph holds this block, which must not hold the graph
        if self.rollout is None or self.cache is None or self.checkpointing:
            return
        for index in self.layers:
            self.cache.update(*self.rollout.contents(index), index)


def checkpoints(module: torch.nn.Module) -> bool:
    """Whether the library would checkpoint this layer in the current mode."""
    return bool(getattr(module, "gradient_checkpointing", False)) and module.training


@contextmanager
def without_checkpointing(module: torch.nn.Module) -> Iterator[None]:
    """Run a layer without the library's own checkpointing, which takes its cache away."""
    if not checkpoints(module):
        yield
        return
    module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        module.gradient_checkpointing = True  # type: ignore[assignment]
