"""The loop with exits: each token runs until its rule says that it is done, and rows that are done
stop computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from undertow.depth.cache_layers import Cursor
from undertow.depth.exits import Evidence, ExitRule
from undertow.depth.handle import DepthHandle

Self = TypeVar("Self", bound="LoopedLayers")


class LoopedLayers(Protocol):
    """A model's layers in one forward, with everything but the states bound to them.

    Attributes:
        checkpointing: whether each iteration that carries gradient keeps its input only, and is
            computed again in the backward pass.
    """

    @property
    def checkpointing(self) -> bool: ...

    def prelude(self, hidden: torch.Tensor) -> torch.Tensor:
        """The embedding e ``[B, T, D]`` of the first layer's input."""

    def iterate(self, state: torch.Tensor, embedding: torch.Tensor, index: int) -> torch.Tensor:
        """The state ``[B, T, D]`` after iteration `index`, counted from 0."""

    def coda(self, state: torch.Tensor) -> torch.Tensor:
        """The last layer's output ``[B, T, D]`` for the last states."""

    def of_rows(self: Self, rows: torch.Tensor) -> Self:
        """The same for these rows ``[b]`` of the whole batch alone."""


@dataclass
class Outcome:
    """What the loop found.

    Attributes:
        states: each token's last state ``[B, T, D]``.
        depths: the iterations that it ran ``[B, T]``.
        readout: the coda's output ``[B, T, D]`` and the logits ``[B, T, V]`` of that state; empty
            if the rule did not look at them.
    """

    states: torch.Tensor
    depths: torch.Tensor
    readout: tuple[torch.Tensor, ...] = ()

    def of_rows(self, rows: torch.Tensor) -> Outcome:
        return Outcome(
            self.states[rows], self.depths[rows], tuple(each[rows] for each in self.readout)
        )

    def put(self, rows: torch.Tensor, found: Outcome) -> Outcome:
        """With what was `found` of these rows ``[b]``."""
        if len(rows) == len(self.states):
            return found
        mine = self.readout or found.readout
        return Outcome(
            self.states.index_copy(0, rows, found.states),
            self.depths.index_copy(0, rows, found.depths),
            tuple(a.index_copy(0, rows, b) for a, b in zip(mine, found.readout, strict=True)),
        )


@dataclass
class ExitLoop:
    """The loop of one forward with an exit rule.

    Attributes:
        handle: of the model, for the logits and the exit gate.
        rule: what lets a token go.
        limit: the iterations after which every token goes.
        cursor: where the layers' cache is written.
    """

    handle: DepthHandle
    rule: ExitRule
    limit: int
    cursor: Cursor

    def run(
        self,
        layers: LoopedLayers,
        state: torch.Tensor,
        embedding: torch.Tensor,
        positions: torch.Tensor,
        real: torch.Tensor | None,
    ) -> Outcome:
        """Run each token of `state` ``[B, T, D]`` until the rule lets it go.

        A token that is done keeps its state and its keys and values, which the tokens after it go
        on reading; a row of which all tokens are done is computed no further. Each row gets what it
        would get alone. `real` ``[B, T]`` leaves out padding.
        """
        shape, device = state.shape[:2], state.device
        moving = torch.ones(shape, dtype=torch.bool, device=device) if real is None else real
        # Rows of one token each leave as a whole, so that those that run have no token that rests.
        whole = shape[1] == 1 and bool(moving.all())
        rows = torch.arange(shape[0], device=device)  # those that run
        found = now = Outcome(state, torch.zeros(shape, dtype=torch.long, device=device))
        running = layers
        entering = embedding
        places = positions
        gate = self.handle.gate if self.handle.settings.gate else None
        memory: dict[str, torch.Tensor] = {}
        for index in range(self.limit):
            before, some = now.states, None if whole else moving
            self.cursor.enter(index, some)
            state = running.iterate(before, entering, index)
            state = state if some is None else torch.where(some[..., None], state, before)
            now = Outcome(state, now.depths + moving, now.readout)
            last = index + 1 == self.limit
            if index + 1 < self.rule.minimum and not last:
                continue
            if self.rule.needs_logits:
                now.readout = self.read(running, now, index, some)
            if last:
                break
            logits = now.readout[1] if now.readout else None
            evidence = Evidence(index + 1, before, state, logits, places, gate)
            moving = moving & ~self.rule.decide(evidence, memory)
            staying = moving.any(dim=1)
            if bool(staying.all()):
                continue
            found = found.put(rows, now)
            kept = staying.nonzero()[:, 0]
            if not len(kept):
                return found
            rows = rows[kept]
            moving = moving[kept]
            now = now.of_rows(kept)
            running = layers.of_rows(rows)
            entering = embedding[rows]
            places = positions[rows]
            memory = {name: tensor[kept] for name, tensor in memory.items()}
            self.cursor.rows = rows
        return found.put(rows, now)

    def read(
        self, layers: LoopedLayers, now: Outcome, index: int, moving: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The coda's output and the logits of the states; tokens that do not move keep theirs."""
        self.cursor.enter(index, moving, first=not now.readout)
        hidden = layers.coda(now.states)
        found = hidden, self.handle.logits(hidden)
        if moving is None or not now.readout:
            return found
        pairs = zip(found, now.readout, strict=True)
        return tuple(torch.where(moving[..., None], new, old) for new, old in pairs)
