"""One hosted forward over the layers that the backbone recorded.

With a recurrence in time: the prefix, the solved recurrent block and the suffix. With one in depth:
the loop, wherever in these it lies.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from undertow.depth.cache import computing_type
from undertow.distributed import kept_whole, with_gradient
from undertow.errors import DivergedError
from undertow.finite import check_finite
from undertow.host.arguments import attention_masks, cache_of
from undertow.host.attachment import Attachment
from undertow.host.block import HostedBlock
from undertow.host.collecting import collecting
from undertow.host.looping import HostedLoop
from undertow.host.modes import Continuation, Mode, WholeSequence
from undertow.host.stack import Recording, recorders
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


@dataclass
class Forward:
    """One forward of a hosted backbone.

    Attributes:
        stack, arity, ran: see `RecordedForward`.
        attachment: the recurrence.
        inputs: what the backbone was given, and the recurrence's own arguments.
    """

    stack: nn.ModuleList | None
    arity: int
    attachment: Attachment
    inputs: dict[str, Any]
    ran: bool = False

    def stand_ins(self, layers: list[nn.Module]) -> list[Any]:
        return recorders(self, layers)

    def run(self, recording: Recording) -> torch.Tensor:
        """The output ``[B, T, D]`` of the last layer, recurrence included."""
        attachment, hidden = self.attachment, recording.hidden
        layers = len(recording.layers)
        repeated = [recording.layers[index] for index in attachment.repeated]
        with (
            collecting(attachment, self.inputs, hidden, layers) as recording.collected,
            kept_whole(repeated) as until_backward,
        ):
            try:
                cache = cache_of(recording.calls[0], attachment.layouts[0])
                if attachment.loop is None:
                    hidden = self.in_time(recording, cache, None)
                else:
                    loop = HostedLoop(attachment, recording, self.inputs, cache)
                    if attachment.pathway is None:
                        hidden = loop.run(hidden)
                    else:
                        hidden = self.in_time(recording, loop.cache, loop)
                    loop.finish()
                return until_backward(with_gradient(hidden, attachment))
            finally:
                recording.collected = None  # what a backward pass computes again is not collected

    def in_time(
        self, recording: Recording, cache: Cache | None, loop: HostedLoop | None
    ) -> torch.Tensor:
        """The prefix, the solved block and the suffix, with the loop wherever in these it lies."""
        layers = recording if loop is None else loop
        attachment, pathway = self.attachment, self.attachment.pathway
        assert pathway is not None
        hidden, count = recording.hidden, len(recording.layers)
        past = 0 if cache is None else int(cache.get_seq_length())
        states = recent = None
        if cache is not None:
            computed_in, settings = computing_type(hidden), attachment.settings
            states = state_layer(cache, count, settings, pathway.lag, computed_in, loop is not None)
            recent = states.recent()
        rows = self.rows(recording, cache, states, recent, past)
        # On a GPU a look at the states waits for them. So a decoded token's are looked at by the
        # next one, which receives them, before it runs: `generate` has waited for them by then.
        # Whole sequences are looked at once.
        later = hidden.is_cuda and past > 0 and hidden.shape[1] <= pathway.lag
        if later and recent is not None:
            held = None if recent[1] is None else recent[1][..., 0].bool()
            check_finite(recent[0], held, past - pathway.lag, pathway.remedy)

        hidden = layers.through(0, pathway.first_layer, hidden)
        rows.fit(hidden)
        before = None if recent is None else recent[0]
        mode: Mode = (Continuation if past > 0 else WholeSequence)(
            attachment, pathway, recording, hidden, rows, cache, past, loop
        )
        solver: Solver = EXACT  # whatever continues a sequence
        if past == 0:
            solver = attachment.solver if torch.is_grad_enabled() else attachment.prefill
        started = time.perf_counter()
        solution = HostedBlock(mode, before).solved(solver)
        attachment.report = solution.report(solver.kind, time.perf_counter() - started)
        if not later:
            try:
                check_finite(solution.states, rows.active, past, pathway.remedy)
            except DivergedError:
                # A pass over all tokens spreads what is no number; the rollout shows where.
                if past == 0 and loop is None:
                    mode = dataclasses.replace(mode, cache=None)
                    with torch.no_grad():
                        exact = HostedBlock(mode, before).solved(EXACT)
                    check_finite(exact.states, rows.active, past, pathway.remedy)
                raise
        if states is not None:
            states.append(solution.states.detach(), rows)
        if loop is not None:
            loop.cursor.start = past  # a rollout on the cache has moved it on
        return layers.through(pathway.stop_layer, count, solution.output)

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
        if masks:
            check_masks(attachment.owners.model, masks, tokens, past)
        real = real_tokens(given, masks, batch, tokens, past)
        limit = self.inputs.get("recurrent_mask")
        active = real if limit is None else active_tokens(real, limit, batch, tokens, past)
        order = None if real is None else row_order(real, recent is not None)
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
        lag, continues = attachment.pathway.lag, recent is not None
        present = present_states(active, document, cached, continues, tokens, lag, order)
        return Rows(attachment.pathway, continues, real, active, present, order)
