"""One hosted forward over the layers that the backbone recorded.

With a recurrence in time: the prefix, the solved recurrent block and the suffix. With one in depth: the loop, wherever in
these it lies.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from undertow.host.arguments import cache_of, first_mask
from undertow.host.block import HostedBlock
from undertow.host.collecting import collecting
from undertow.host.looping import HostedLoop
from undertow.host.stack import Recording
from undertow.host.state import state_layer
from undertow.host.tokens import active_tokens, documents, present_states
from undertow.solvers import Sequential, Solver

if TYPE_CHECKING:
    from undertow.host.attach import Attachment


EXACT = Sequential()


class Forward:
    """What a hosted forward needs to know besides the recorded calls: the attachment and the model's inputs."""

    def __init__(self, attachment: Attachment, stack: torch.nn.ModuleList, inputs: dict[str, Any]) -> None:
        self.attachment, self.inputs = attachment, inputs
        self.stack: torch.nn.ModuleList | None = stack
        self.arity, self.ran = attachment.arity, False

    def run(self, recording: Recording) -> torch.Tensor:
        """The output ``[B, T, D]`` of the last layer, recurrence included."""
        with collecting(self.attachment, recording, self.inputs):
            return self._run(recording)

    def _run(self, recording: Recording) -> torch.Tensor:
        attachment, pathway = self.attachment, self.attachment.pathway
        hidden = recording.hidden
        batch, tokens = hidden.shape[:2]
        cache = cache_of(recording.calls[0], attachment.layouts[0])
        loop = None
        if attachment.loop is not None:
            loop = HostedLoop(attachment, recording, self.inputs, cache, alone=pathway is None)
            cache = loop.cache
        if pathway is None:
            assert loop is not None
            hidden = loop.through(0, len(recording.layers), hidden)
            loop.finish()
            return hidden
        states = None if cache is None else state_layer(cache, len(recording.layers), pathway.lag)
        past = 0 if cache is None else int(cache.get_seq_length())
        recent = None if states is None else states.recent()

        active = active_tokens(
            self.inputs.get("attention_mask"),
            partial(first_mask, recording.calls[0], attachment.layouts[0]),
            self.inputs.get("recurrent_mask"),
            batch,
            tokens,
            past,
        )
        present = present_states(
            active,
            documents(self.inputs.get("position_ids")),
            None if recent is None or recent[1] is None else recent[1][..., 0],
            recent is not None,
            tokens,
            pathway.lag,
        )

        def layers(start: int, stop: int, hidden: torch.Tensor) -> torch.Tensor:
            if loop is not None:
                return loop.through(start, stop, hidden)
            for index in range(start, stop):
                hidden = recording.run(index, hidden)
            return hidden

        hidden = layers(0, pathway.first_layer, hidden)
        initial = None if recent is None else recent[0]
        block = HostedBlock(attachment, recording, hidden, cache, past, active, present, initial, loop)
        hidden, new_states, attachment.report = self.solver(past).solve(block)
        block.finish()
        if states is not None:
            states.append(new_states.detach(), None if active is None else active[..., None])
        if loop is not None and loop.ledger is not None:
            loop.ledger.cursor.start = past  # a rollout on the cache has moved it on
        hidden = layers(pathway.stop_layer, len(recording.layers), hidden)
        if loop is not None:
            loop.finish()
        return hidden

    def solver(self, past: int) -> Solver:
        """The solver of this forward: parallel ones where a sequence starts, the exact rollout for whatever continues it."""
        if past > 0:
            return EXACT
        return self.attachment.solver if torch.is_grad_enabled() else self.attachment.prefill
