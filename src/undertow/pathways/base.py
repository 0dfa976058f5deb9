"""What a recurrence in time carries: the contract between a pathway, a solver and a hosted model.

A *pathway* reads the residual stream at some sites, turns the readings into a *state*, and writes
the state of token ``t - lag`` back at some sites of token ``t``. Site ``i`` is the input of decoder
layer ``i``; site ``L`` is the output of the last one. The layers between the lowest written and the
highest read site are the *recurrent block*.

    y_t = read( block( write(x_t, R_{t-lag}) ; keys and values of tokens <= t ) )
    R_t = update( y_t, R_{t-lag} )
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import nn

from undertow.errors import ConfigError
from undertow.registry import family
from undertow.settings import settings

Decode = Callable[[torch.Tensor], torch.Tensor]


class Pathway(nn.Module, ABC):
    """The modules of one recurrence in time. Holds parameters only, never a state.

    Attributes:
        lag: how many tokens back the state comes from.
        state_width: the width ``W`` of a state ``[B, T, W]``.
        writes: the written sites.
        reads: the read sites.
        reads_residual: whether a reading of the block's input resembles one of its output, as where
            the residual stream is read: the states that solvers start from are then made of it.
        writes_without_state: whether `write` also runs for a token with no state to receive, with
            zeros in its place (T²MLR), or is skipped for it (TurboConn, soft tokens).
        remedy: what to do where its states stop being finite, as the end of a sentence.
        fp32_parameters: the names of parameters that stay in fp32 when the model is cast below
            that, as of gates that move by less than half precision resolves.
    """

    lag: int
    state_width: int
    writes: frozenset[int]
    reads: frozenset[int]
    reads_residual: bool = True
    writes_without_state: bool = False
    remedy: str = "lower the learning rate, or have `update` keep states bounded, as a norm does"
    fp32_parameters: tuple[str, ...] = ()

    @cached_property  # each layer of each forward asks
    def first_layer(self) -> int:
        """The first layer of the recurrent block."""
        return min(self.writes)

    @cached_property
    def stop_layer(self) -> int:
        """The layer after the last one of the recurrent block."""
        return max(self.reads)

    @cached_property
    def block(self) -> range:
        """The layers of the recurrent block."""
        return range(self.first_layer, self.stop_layer)

    @cached_property
    def sites(self) -> tuple[int, ...]:
        """Where it writes or reads, in order."""
        return tuple(sorted(self.writes | self.reads))

    @abstractmethod
    def write(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What the state ``[B, n, W]`` of the tokens `lag` back adds to `hidden` ``[B, n, D]`` at
        `site`."""

    def written(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """`hidden` ``[B, n, D]`` and what the state adds to it at `site`. A pathway may do this in
        fewer operations."""
        return hidden + self.write(site, hidden, state)

    def written_where(
        self, site: int, hidden: torch.Tensor, state: torch.Tensor, where: torch.Tensor | None
    ) -> torch.Tensor:
        """The same, but what is added counts `where` ``[B, n, 1]`` says so; None for everywhere."""
        if where is None:
            return self.written(site, hidden, state)
        return hidden + where * self.write(site, hidden, state)

    @abstractmethod
    def read(self, site: int, hidden: torch.Tensor) -> torch.Tensor:
        """The reading taken from `hidden` ``[B, n, D]`` at `site`."""

    @abstractmethod
    def update(self, readings: list[torch.Tensor], state: torch.Tensor | None) -> torch.Tensor:
        """The new state ``[B, n, W]`` from the readings, in the order of their sites, and the state
        `lag` back.

        Each token's is made of its own reading and the state that it receives, and of nothing else.
        No state (None) is a state of zeros, which is what padding and the first token of a packed
        document receive.
        """

    def guess(self, readings: list[torch.Tensor]) -> torch.Tensor:
        """The states ``[B, n, W]`` that Jacobi iterations start from, after a plain sweep: T²MLR
        takes its readings."""
        return self.update(readings, None)

    def scan(
        self,
        readings: list[torch.Tensor],
        initial: torch.Tensor | None,
        present: torch.Tensor | None,
    ) -> torch.Tensor:
        """The states ``[B, T, W]`` that `update`, applied token by token, makes of frozen readings
        ``[B, T, ...]``.

        `initial` ``[B, lag, W]`` holds the states before the first token; `present` ``[B, T, 1]``
        is 0 where a token receives none. This is the definition, `lag` tokens at a time. A pathway
        that has a faster way overrides it, and attaching holds it to this one (`contract.py`).
        """
        return scan_by_update(self, readings, initial, present)

    def fast_parameters(self) -> list[nn.Parameter]:
        """What a training lets learn faster than the rest, without weight decay, by its
        `gate_multiplier`: those that stay in fp32."""
        return [self.get_parameter(name) for name in self.fp32_parameters]

    def gate_values(self) -> dict[str, torch.Tensor]:
        """How far its gates have opened, one number each, as a training's log and `inspect gates`
        tell it; a name x is gate_x there."""
        return {}

    @torch.no_grad()
    def open(self) -> None:
        """Move what starts at zero off it, in place, so that in a benchmark each branch has work to
        do."""
        for parameter in self.parameters():
            if not parameter.any():
                parameter.normal_(std=1e-3)

    def reshape(self, older: bool) -> None:
        """Give the parameters, in place, the shapes that they have or, if `older`, had in folders
        written before; loading tries these where a folder's shapes do not fit."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        kept = {name: self.get_parameter(name).detach() for name in self.fp32_parameters}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            parameter = self.get_parameter(name)
            if parameter.dtype.itemsize < 4:
                parameter.data = value.to(device=parameter.device)
        return self


def scan_by_update(
    pathway: Pathway,
    readings: list[torch.Tensor],
    initial: torch.Tensor | None,
    present: torch.Tensor | None,
) -> torch.Tensor:
    """The states ``[B, T, W]`` by calling `update` for `lag` tokens after `lag` tokens; see
    `Pathway.scan`."""
    states: list[torch.Tensor] = []
    state, tokens = initial, readings[0].shape[1]
    for start in range(0, tokens, pathway.lag):
        stop = min(start + pathway.lag, tokens)
        if state is not None:
            state = state[:, : stop - start]  # the last group may be short
            state = state if present is None else state * present[:, start:stop]
        state = pathway.update([reading[:, start:stop] for reading in readings], state)
        states.append(state)
    return states[0] if len(states) == 1 else torch.cat(states, dim=1)


@family
@settings
class Recurrence(ABC):
    """The settings of a recurrence in time: what `undertow.attach` takes and a checkpoint's config
    records."""

    kind: ClassVar[str]

    def advice(self, pretrained: bool, learning_rate: float) -> str | None:
        """What there is against these settings in a training, in a sentence; None if nothing."""
        return None

    @abstractmethod
    def build(self, layers: int, width: int, decode: Decode | None = None) -> Pathway:
        """The pathway for a model of `layers` layers and hidden size `width`.

        `decode` maps the output of the last layer ``[B, n, D]`` to the expected embedding of the
        next token, in the units of site 0; only soft tokens need it.

        Raises:
            ConfigError: a layer lies outside the model.
        """


def check_layer(name: str, layer: int, layers: int) -> None:
    """Refuse a layer that the model does not have."""
    if not 0 <= layer < layers:
        raise ConfigError(
            f"{name} {layer} is outside the model, whose layers are 0 to {layers - 1}; choose one "
            "of these"
        )
