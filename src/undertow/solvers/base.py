"""How the states of a whole sequence are found: the interface between a solver and the block that
it solves."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from undertow.pathways.base import Pathway
from undertow.registry import family
from undertow.settings import settings


@dataclass(frozen=True)
class SolverReport:
    """What a solver did in one forward.

    Attributes:
        solver: its kind.
        tokens: the tokens ``T`` of the forward.
        sweeps: how often the whole block ran before the pass that gave the output; a rollout's
            groups make up one.
        exact_prefix: how many tokens have outputs that equal the sequential ones, whatever the
            residuals.
        residuals: the relative change of the states in each sweep after the first and in the last
            pass; empty where the states are exact.
        seconds: the time of the forward through the block.
    """

    solver: str
    tokens: int
    sweeps: int
    exact_prefix: int
    residuals: tuple[torch.Tensor, ...] = ()
    seconds: float = 0.0

    @property
    def residual(self) -> float:
        """The last residual; 0 where the states are exact."""
        return float(self.residuals[-1]) if self.residuals else 0.0


@dataclass(frozen=True)
class Solution:
    """What a solver found for the tokens of one block.

    Attributes:
        output: the block's output ``[B, T, D]``.
        states: the tokens' states ``[B, T, W]``.
        exact_prefix, sweeps, residuals: as a `SolverReport` has them.
        received: the states ``[B, T, W]`` that the tokens received in the pass that gave the
            output, where these are not made of `states`.
    """

    output: torch.Tensor
    states: torch.Tensor
    exact_prefix: int
    sweeps: int = 1
    residuals: tuple[torch.Tensor, ...] = ()
    received: torch.Tensor | None = None

    def received_by(self, block: RecurrentBlock) -> torch.Tensor:
        """What the tokens of the block that was solved received in the last pass."""
        return block.received_from(self.states) if self.received is None else self.received

    def report(self, solver: str, seconds: float) -> SolverReport:
        """The report of a solver, given its kind and the time that it took."""
        tokens = self.states.shape[1]
        return SolverReport(solver, tokens, self.sweeps, self.exact_prefix, self.residuals, seconds)


class Swept(NamedTuple):
    """What one sweep without a graph gave.

    Attributes:
        output: the block's output ``[B, T, D]``.
        states: the new states ``[B, T, W]``.
        followed: gives states and output after what the states write has been followed up the
            residual stream to where it is read, the layers adding to that what they added in the
            sweep. No layer runs for it, and the part of the recurrence that goes through no layer
            converges by itself.
    """

    output: torch.Tensor
    states: torch.Tensor
    followed: Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Plan:
    """How `Auto` finds the states of sequences of some length, and when it measures again.

    Attributes:
        sweeps: how many; None where the rollout is cheaper than as many as it takes.
        gap: the relative error of the states after these sweeps, or as many as a rollout costs.
        allowed: the relative error that was allowed.
        tokens: the length that was measured; longer sequences may need more.
        forwards: how many forwards went by.
        interval: how many forwards after the last measurement the next one comes.
        next_measurement: the forward to measure in; sooner where the plan is outgrown.
        products: how many vector-Jacobian products the gradient took when it was measured; None
            before.
        capped: whether these were the most that there may be, and one more would have changed it by
            more than its tolerance.
    """

    sweeps: int | None = None
    gap: float = 0.0
    allowed: float = 0.0
    tokens: int = 0
    forwards: int = 0
    interval: int = 1
    next_measurement: int = 1
    products: int | None = None
    capped: bool = False


@dataclass
class Plans:
    """What a solver keeps from one training forward to the next: a plan for each power of two of
    tokens, as plain data."""

    by_length: dict[int, Plan] = field(default_factory=dict)

    def plan(self, tokens: int) -> Plan:
        """The plan of sequences of this length."""
        return self.by_length.setdefault(1 << (tokens - 1).bit_length(), Plan())

    def to_mapping(self) -> dict[str, Any]:
        """As JSON can hold it; `from_mapping` reads it back."""
        return {str(length): dataclasses.asdict(plan) for length, plan in self.by_length.items()}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Plans:
        return cls({int(length): Plan(**plan) for length, plan in mapping.items()})


class RecurrentBlock(ABC):
    """The recurrent block of one forward, as a solver sees it: ``T`` new tokens after what is
    already cached.

    Attributes:
        tokens: the number ``T`` of new tokens.
        lag: how many tokens back a state comes from.
        pathway: what is carried: solvers may call its `guess`, and read what it says of itself.
        before: the states ``[B, lag, W]`` of the tokens before the first new one; None where there
            are none.
        plans: what solvers keep between the training forwards of this model.
        on_cuda: whether it runs on a GPU, whose work goes on after a call returns.
    """

    tokens: int
    lag: int
    pathway: Pathway
    before: torch.Tensor | None
    plans: Plans
    on_cuda: bool

    @abstractmethod
    def step(
        self, start: int, stop: int, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block over tokens `start` to `stop`, at most `lag` of them, after the steps
        before it.

        `state` ``[B, lag, W]`` holds the states of the last tokens before them (`recent`), or is
        None where there are none. Returns the block's output ``[B, stop - start, D]`` and these
        tokens' states ``[B, stop - start, W]``.
        """

    @abstractmethod
    def recent(self, before: torch.Tensor | None, states: torch.Tensor, start: int) -> torch.Tensor:
        """The states of each row's last `lag` tokens ``[B, lag, W]``, padding left out.

        They are of the tokens from `start` on, whose `states` are ``[B, n, W]``, and of those
        `before` them.
        """

    @abstractmethod
    def sweep(
        self, received: torch.Tensor | None, plain: bool = False, last: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the block over all tokens at once, each with the state it receives ``[B, T, W]``.

        With None each token is treated as the first of its sequence; a `plain` sweep writes nothing
        at all. The pass whose output is used is the `last`. Returns the output ``[B, T, D]`` and
        the readings.
        """

    @abstractmethod
    def received_from(self, states: torch.Tensor) -> torch.Tensor:
        """The state that each token receives ``[B, T, W]``: that of the token `lag` back, zeros
        where there is none."""

    @abstractmethod
    def initial_states(self) -> torch.Tensor | None:
        """States ``[B, T, W]`` guessed without running a layer, as if none added anything; None
        where that is no guess."""

    @abstractmethod
    def swept(self, states: torch.Tensor | None, last: bool = False) -> Swept:
        """One more sweep from `states` ``[B, T, W]``, and `update` solved along time, without a
        graph. Any number of sweeps may be the `last`: the latest gives the output."""

    def guess(self, readings: list[torch.Tensor]) -> torch.Tensor:
        """The states that Jacobi iterations start from, of the readings of a plain sweep."""
        return self.pathway.guess(readings)

    @abstractmethod
    def update(self, readings: list[torch.Tensor], received: torch.Tensor) -> torch.Tensor:
        """The new states ``[B, T, W]``, each from the state that its token received in the
        sweep."""

    @abstractmethod
    def scan(self, readings: list[torch.Tensor]) -> torch.Tensor:
        """The new states ``[B, T, W]`` with `update` solved exactly along time for these
        readings."""

    @abstractmethod
    def span(self, start: int, stop: int, before: torch.Tensor | None) -> RecurrentBlock:
        """Tokens `start` to `stop` as a block of their own, after the keys and values of the spans
        before it."""


@family
@settings
class Solver(ABC):
    """The settings of a solver. It holds nothing of a forward, so one object may serve many models
    and threads.

    Attributes:
        exact: whether its states are always the rollout's, so that no gap need be watched.
        adapts: whether it measures in training, by itself, how far it is from the rollout.
    """

    kind: ClassVar[str]
    exact: ClassVar[bool] = False
    adapts: ClassVar[bool] = False

    def passes(self) -> tuple[int, int]:
        """How often a training forward runs the recurrent block over all tokens, and through how
        many of these runs gradients go back."""
        return 1, 1

    @abstractmethod
    def solve(self, block: RecurrentBlock) -> Solution:
        """Find the output and the states of the block's tokens."""
