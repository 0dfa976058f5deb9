"""The loop with exits: each token runs until its rule says that it is done, and rows that are done stop computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from undertow.depth.exits import Evidence, ExitRule


class AdaptivePass(Protocol):
    """One forward's layers with everything but the state bound to them, over the rows that still run."""

    positions: torch.Tensor
    has_gate: bool

    def keep(self, rows: torch.Tensor) -> None:
        """Only these rows ``[b]``, numbered as in the whole batch, go on."""

    def iterate(self, state: torch.Tensor, index: int, moving: torch.Tensor) -> torch.Tensor:
        """Iteration `index` of the running rows ``[b, T, D]``; only tokens that are `moving` ``[b, T]`` enter it."""

    def logits(self, state: torch.Tensor, index: int, moving: torch.Tensor, first: bool) -> torch.Tensor:
        """The logits ``[b, T, V]`` of the running rows' states; `first` says that this is the first such call."""

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


def iterate_until_done(
    forward: AdaptivePass, state: torch.Tensor, rule: ExitRule, limit: int, running: torch.Tensor | None = None
) -> Outcome:
    """Run each token of `state` ``[B, T, D]`` for up to `limit` iterations, until `rule` lets it go.

    A token that is done keeps its state and its keys and values, which the tokens after it go on reading; a row of which
    all tokens are done is computed no further. Each row gets what it would get alone. `running` ``[B, T]`` leaves out
    padding.
    """
    states = state
    moving = torch.ones(state.shape[:2], dtype=torch.bool, device=state.device) if running is None else running.clone()
    depths = torch.zeros(state.shape[:2], dtype=torch.long, device=state.device)
    logits: torch.Tensor | None = None
    rows = torch.arange(state.shape[0], device=state.device)
    watch, first = rule.watch(), True
    for index in range(limit):
        new = torch.where(moving[..., None], forward.iterate(state, index, moving), state)
        depths[rows] += moving
        states = new if len(rows) == len(states) else states.index_copy(0, rows, new)
        if index + 1 >= rule.minimum or index + 1 == limit:
            seen = forward.logits(new, index, moving, first) if rule.needs_logits else None
            first = False
            if seen is not None:
                if logits is None:
                    logits = seen.clone()
                else:
                    logits[rows] = torch.where(moving[..., None], seen, logits[rows])
            if index + 1 < limit:
                gate = forward.gate if forward.has_gate else None
                done = watch.done(Evidence(index + 1, state, new, seen, forward.positions, gate))
                moving = moving & ~done
                going = moving.any(dim=1)
                if not bool(going.all()):
                    staying = going.nonzero()[:, 0]
                    if not len(staying):
                        break
                    rows, moving, new = rows[staying], moving[staying], new[staying]
                    forward.keep(rows)
                    watch.keep(staying)
        state = new
    return Outcome(states, depths, logits)
