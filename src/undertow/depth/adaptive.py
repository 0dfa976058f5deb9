"""The loop with exits: each token runs until its rule says that it is done, and rows that are done
stop computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from undertow.depth.exits import Evidence, ExitRule


class AdaptivePass(Protocol):
    """One forward's layers with everything but the state bound to them, over the rows that still
    run."""

    positions: torch.Tensor
    has_gate: bool

    def keep(self, rows: torch.Tensor) -> None:
        """Only these rows ``[b]``, numbered as in the whole batch, go on."""

    def iterate(self, state: torch.Tensor, index: int, moving: torch.Tensor | None) -> torch.Tensor:
        """Iteration `index` of the running rows ``[b, T, D]``; only tokens `moving` ``[b, T]``
        enter it, all for None."""

    def logits(
        self, state: torch.Tensor, index: int, moving: torch.Tensor | None, first: bool
    ) -> torch.Tensor:
        """The logits ``[b, T, V]`` of the running rows' states; `first` says that this is the first
        such call."""

    def gate(self, state: torch.Tensor) -> torch.Tensor:
        """The exit probability ``[b, T]`` of the states."""


@dataclass
class Outcome:
    """What the loop found.

    Attributes:
        states: each token's last state ``[B, T, D]``.
        depths: the iterations that it ran ``[B, T]``.
        logits: its logits ``[B, T, V]`` if the rule looked at them.
    """

    states: torch.Tensor
    depths: torch.Tensor
    logits: torch.Tensor | None

    def put(
        self,
        rows: torch.Tensor | None,
        states: torch.Tensor,
        depths: torch.Tensor,
        logits: torch.Tensor | None,
    ) -> None:
        """Note what is known of these rows ``[b]``, or of all."""
        if rows is None:
            self.states, self.depths, self.logits = states, depths, logits
            return
        self.states, self.depths = (
            self.states.index_copy(0, rows, states),
            self.depths.index_copy(0, rows, depths),
        )
        if self.logits is not None and logits is not None:
            self.logits = self.logits.index_copy(0, rows, logits)


def iterate_until_done(
    forward: AdaptivePass,
    state: torch.Tensor,
    rule: ExitRule,
    limit: int,
    running: torch.Tensor | None = None,
) -> Outcome:
    """Run each token of `state` ``[B, T, D]`` for up to `limit` iterations, until `rule` lets it
    go.

    A token that is done keeps its state and its keys and values, which the tokens after it go on
    reading; a row of which all tokens are done is computed no further. Each row gets what it would
    get alone. `running` ``[B, T]`` leaves out padding.
    """
    moving = (
        torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)
        if running is None
        else running.clone()
    )
    # Rows of one token each leave as a whole, so that those that run have no token that rests.
    whole = state.shape[1] == 1 and bool(moving.all())
    found = Outcome(state, torch.zeros_like(moving, dtype=torch.long), None)
    depths = found.depths  # of the running rows, as are `state` and `logits`
    rows: torch.Tensor | None = None  # which ones these are; None for all
    logits: torch.Tensor | None = None
    watch, first = rule.watch(), True
    for index in range(limit):
        before, going = state, None if whole else moving
        state = forward.iterate(state, index, going)
        if not whole:
            state = torch.where(moving[..., None], state, before)
        depths = depths + moving
        if index + 1 < rule.minimum and index + 1 < limit:
            continue
        if rule.needs_logits:
            seen = forward.logits(state, index, going, first)
            logits = (
                seen if logits is None or whole else torch.where(moving[..., None], seen, logits)
            )
            first = False
        if index + 1 == limit:
            break
        gate = forward.gate if forward.has_gate else None
        moving = moving & ~watch.done(
            Evidence(index + 1, before, state, logits, forward.positions, gate)
        )
        staying = moving.any(dim=1)
        if bool(staying.all()):
            continue
        found.put(rows, state, depths, logits)
        kept = staying.nonzero()[:, 0]
        if not len(kept):
            return found
        rows = kept if rows is None else rows[kept]
        state, depths, moving = state[kept], depths[kept], moving[kept]
        logits = None if logits is None else logits[kept]
        forward.keep(rows)
        watch.keep(kept)
    found.put(rows, state, depths, logits)
    return found
