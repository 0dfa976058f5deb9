"""One hosted forward over the layers that the backbone recorded.

With a recurrence in time: the prefix, the solved recurrent block and the suffix. With one in depth:
the loop, wherever in these it lies.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers.cache_utils import Cache

from undertow.depth.cache import computing_type
from undertow.errors import DivergedError
from undertow.finite import check_finite
from undertow.host.arguments import attention_masks, cache_of
from undertow.host.attachment import Attachment
from undertow.host.block import HostedBlock
from undertow.host.collecting import collecting
from undertow.host.looping import HostedLoop
from undertow.host.stack import Recording
from undertow.host.state import Recent, StateLayer, state_layer
from undertow.host.support import check_masks
from undertow.host.tokens import (
    Rows,
    active_tokens,
    documents,
    present_states,
    real_tokens,
    row_order,
)
from undertow.solvers import Sequential, Solver

EXACT = Sequential()


class Forward:
    """What a hosted forward needs to know besides the recorded calls: the attachment and the
    model's inputs."""

    def __init__(
        self, attachment: Attachment, stack: torch.nn.ModuleList, inputs: dict[str, Any]
    ) -> None:
        self.attachment, self.inputs = attachment, inputs
        self.stack: torch.nn.ModuleList | None = stack
        self.arity, self.ran = attachment.arity, False

    def run(self, recording: Recording) -> torch.Tensor:
        """The output ``[B, T, D]`` of the last layer, recurrence included."""
        attachment, layers = self.attachment, len(recording.layers)
        with collecting(attachment, self.inputs, recording.hidden, layers) as recording.collected:
            try:
                return self._run(recording)
            finally:
                recording.collected = None  # what a backward pass computes again is not collected

    def _run(self, recording: Recording) -> torch.Tensor:
        attachment, pathway = self.attachment, self.attachment.pathway
        hidden = recording.hidden
        tokens = hidden.shape[1]
        cache = cache_of(recording.calls[0], attachment.layouts[0])
        loop = None
        if attachment.loop is not None:
            loop = HostedLoop(attachment, recording, self.inputs, cache)
            cache = loop.cache
        if pathway is None:
            assert loop is not None
            hidden = loop.run(hidden)
            loop.finish()
            return hidden
        past = 0 if cache is None else int(cache.get_seq_length())
        states = recent = None
        if cache is not None:
            computed_in = computing_type(hidden)
            states = state_layer(
                cache,
                len(recording.layers),
                attachment.settings,
                pathway.lag,
                computed_in,
                loop is not None,
            )
            recent = states.recent()
        rows = self.rows(recording, cache, states, recent, past)

        def layers(start: int, stop: int, hidden: torch.Tensor) -> torch.Tensor:
            if loop is not None:
                return loop.through(start, stop, hidden)
            for index in range(start, stop):
                hidden = recording.run(index, hidden)
            return hidden

        # On a GPU a look at the states waits for them. So a decoded token's are looked at by the
        # next one, which receives them, before it runs: `generate` has waited for them by then.
        # Whole sequences are looked at once.
        later = hidden.is_cuda and past > 0 and tokens <= pathway.lag
        if later and recent is not None:
            held = None if recent[1] is None else recent[1][..., 0].bool()
            check_finite(recent[0], held, past - pathway.lag, pathway.remedy)

        hidden = layers(0, pathway.first_layer, hidden)
        before = None if recent is None else recent[0]
        entering = hidden
        block = HostedBlock(attachment, recording, hidden, cache, past, rows, before, loop)
        solver = self.solver(past)
        started = time.perf_counter()
        solution = solver.solve(block)
        block.check_solution(solver, solution)
        attachment.report = solution.report(solver.kind, time.perf_counter() - started)
        hidden, new_states = solution.output, solution.states
        block.finish()
        if not later:
            try:
                check_finite(new_states, rows.active, past, pathway.remedy)
            except DivergedError:
                if (
                    past == 0 and loop is None
                ):  # a pass over all tokens spreads what is no number; the rollout shows where
                    with torch.no_grad():
                        block = HostedBlock(
                            attachment, recording, entering, None, past, rows, before
                        )
                        check_finite(EXACT.solve(block).states, rows.active, past, pathway.remedy)
                raise
        if states is not None:
            states.append(new_states.detach(), rows)
        if loop is not None:
            loop.cursor.start = past  # a rollout on the cache has moved it on
        hidden = layers(pathway.stop_layer, len(recording.layers), hidden)
        if loop is not None:
            loop.finish()
        return hidden

    def rows(
        self,
        recording: Recording,
        cache: Cache | None,
        states: StateLayer | None,
        recent: Recent | None,
        past: int,
    ) -> Rows:
        """What is known of the new tokens, by what the model and, where that does not say, its
        layers were given."""
        attachment = self.attachment
        assert attachment.pathway is not None
        batch, tokens = recording.hidden.shape[:2]
        given, places = self.inputs.get("attention_mask"), self.inputs.get("position_ids")
        of_padding = isinstance(given, torch.Tensor) and given.ndim == 2
        plain = given is None or of_padding
        masks = (
            attention_masks(recording.calls, attachment.layouts) if tokens > 1 or not plain else []
        )
        check_masks(attachment.owners.model, masks, tokens, past)
        real = real_tokens(given, masks, batch, tokens, past)
        active = active_tokens(real, self.inputs.get("recurrent_mask"), batch, tokens, past)
        order = row_order(real, recent is not None)
        document = None
        # The library masks a static cache before the forward; a single token's mask there is not
        # worth a look.
        if not of_padding and (
            cache is None or not (plain or (cache.is_compileable and tokens == 1))
        ):
            since = None if states is None else states.since_real()
            document = documents(
                given, places, masks, real, past, attachment.masks_by_positions, since
            )
        cached = None if recent is None or recent[1] is None else recent[1][..., 0]
        present = present_states(
            active, document, cached, recent is not None, tokens, attachment.pathway.lag, order
        )
        return Rows(real, active, present, order)

    def solver(self, past: int) -> Solver:
        """The solver of this forward: parallel ones where a sequence starts, the exact rollout for
        whatever continues it."""
        if past > 0:
            return EXACT
        return self.attachment.solver if torch.is_grad_enabled() else self.attachment.prefill
