"""The recurrent block of a hosted forward, as a solver sees it: which state each token receives."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from undertow.errors import ConfigError
from undertow.host.modes import Mode
from undertow.host.sites import Streams
from undertow.host.tokens import RowOrder
from undertow.solvers.base import RecurrentBlock, Solution, Solver, Swept


class HostedBlock(RecurrentBlock):
    """One forward's block, or a span of its tokens. Token numbers are those of the block or span
    itself.

    What tokens receive is worked out here; the layers are run by the forward's mode.
    """

    def __init__(self, mode: Mode, before: torch.Tensor | None) -> None:
        """`before` ``[B, lag, W]`` holds the states of the tokens before the new ones, if any."""
        self.mode, self.before = mode, before
        self.pathway, self.plans = mode.pathway, mode.attachment.plans
        self.lag, self.hidden = self.pathway.lag, mode.hidden
        self.on_cuda = self.hidden.is_cuda
        self.order = mode.rows.order
        self.origin, self.tokens = 0, self.hidden.shape[1]
        self.shape = (self.hidden.shape[0], self.tokens, self.pathway.state_width)

    # --- what solvers call

    def step(
        self, start: int, stop: int, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if state is not None:
            self._check_states(state, (state.shape[0], self.lag, self.shape[2]))
        start, stop = self.origin + start, self.origin + stop
        return self.mode.of_tokens(start, stop).step(start, stop, state)

    def sweep(
        self,
        received: torch.Tensor | None,
        plain: bool = False,
        last: bool = False,
        streams: Streams | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if received is not None:
            self._check_states(received, self.shape)
        elif not plain and (self.before is not None or self.pathway.writes_without_state):
            like = self.hidden if self.before is None else self.before
            received = like.new_zeros(self.shape)
            if self.before is not None:  # what comes before is known: start from that
                received = self.received_from(received)
        start, stop = self.origin, self.origin + self.tokens
        return self.mode.of_tokens(start, stop).sweep(start, stop, received, last, streams)

    def recent(self, before: torch.Tensor | None, states: torch.Tensor, start: int) -> torch.Tensor:
        if self.order is None and states.shape[1] >= self.lag:
            return states[:, -self.lag :]
        before = self._no_states(states) if before is None else before
        if self.order is not None:
            return self.order.recent(before, states, start)
        return torch.cat([before, states], dim=1)[:, -self.lag :]

    def received_from(self, states: torch.Tensor) -> torch.Tensor:
        self._check_states(states, self.shape)
        before = self._no_states(states) if self.before is None else self.before
        order = self.order
        states = states if order is None else order.together(states)
        received = torch.cat([before, states], dim=1)[:, : self.tokens]
        received = received if order is None else order.apart(received)
        receiving, _ = self.mode.rows.between(self.origin, self.origin + self.tokens)
        return received if receiving is None else received * receiving

    @torch.no_grad()
    def initial_states(self) -> torch.Tensor | None:
        if not self.pathway.reads_residual:
            return None
        hidden = self.hidden[:, self.origin : self.origin + self.tokens]
        states = self.scan([self.pathway.read(site, hidden) for site in sorted(self.pathway.reads)])
        return self._followed(states, dict.fromkeys(self.pathway.sites, (hidden, hidden)))[0]

    @torch.no_grad()
    def swept(self, states: torch.Tensor | None, last: bool = False) -> Swept:
        streams: Streams = {}
        received = None if states is None else self.received_from(states)
        output, readings = self.sweep(received, last=last, streams=streams)
        new = self.scan(readings)
        return Swept(output, new, functools.partial(self._followed, new, streams))

    def _followed(
        self, states: torch.Tensor, streams: Streams
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`states` and the block's output after what they write, in place of what was written when
        the `streams` were noted, has gone up the residual stream, to which the layers add what they
        added then.

        No layer runs. What is exact stays exact: a token's own state changes with those before it
        alone.
        """
        pathway = self.pathway
        if not pathway.reads_residual:
            return states, streams[pathway.stop_layer][1]
        _, written = self.mode.rows.between(self.origin, self.origin + self.tokens)
        received, readings = self.received_from(states), []
        change: torch.Tensor | None = None
        for site in pathway.sites:
            before, after = streams[site]
            stream = before if change is None else before + change
            if site in pathway.writes:
                stream = pathway.written_where(site, stream, received, written)
                change = stream - after
            if site in pathway.reads:
                readings.append(pathway.read(site, stream))
        return self.scan(readings), stream

    def update(self, readings: list[torch.Tensor], received: torch.Tensor) -> torch.Tensor:
        self._check_states(received, self.shape)
        return self.pathway.update(readings, received)

    def scan(self, readings: list[torch.Tensor]) -> torch.Tensor:
        present, order = self.mode.rows.receiving, self.order
        if present is not None:
            present = present[:, self.origin : self.origin + self.tokens]
        if order is None:
            return self.pathway.scan(readings, self.before, present)
        readings = [order.together(reading) for reading in readings]
        present = None if present is None else order.together(present)
        return order.apart(self.pathway.scan(readings, self.before, present))

    def span(self, start: int, stop: int, before: torch.Tensor | None) -> HostedBlock:
        part = copy.copy(self)
        part.origin, part.tokens = self.origin + start, stop - start
        part.before, part.shape = before, (self.shape[0], part.tokens, self.shape[2])
        if self.order is not None:
            part.order = RowOrder(self.order.real[:, start:stop])
        return part

    # --- what the forward calls

    def solved(self, solver: Solver) -> Solution:
        """What a solver finds for this block.

        Raises:
            ConfigError: it is not what a solver must give.
        """
        solution: Any = solver.solve(self)
        name = f"the solver {type(solver).__name__}"
        if not isinstance(solution, Solution):
            raise ConfigError(
                f"{name} gave a {type(solution).__name__}; give an undertow.solvers.Solution("
                "output, states, exact_prefix)"
            )
        self._check_states(solution.states, self.shape, by=name)
        if solution.output.shape != self.hidden.shape:
            raise ConfigError(
                f"{name} gave an output of shape {list(solution.output.shape)}; give the last "
                f"sweep's, {list(self.hidden.shape)}"
            )
        self.mode.finish()
        return solution

    # --- what both need

    def _no_states(self, states: torch.Tensor) -> torch.Tensor:
        """The states before a sequence ``[B, lag, W]``: none."""
        return states.new_zeros(states.shape[0], self.lag, states.shape[2])

    def _check_states(
        self, states: torch.Tensor, wanted: tuple[int, int, int], by: str = "a solver"
    ) -> None:
        """Refuse states of another shape than the `wanted`: broadcasting would hide it."""
        if states.shape != wanted:
            raise ConfigError(
                f"{by} gave states of shape {list(states.shape)}; give one a row and token, "
                f"{list(wanted)}"
            )
