"""How the states of a whole sequence are found: the interface between a solver and the block that it solves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class SolverReport:
    """What a solver did in one forward.

    Attributes:
        solver: its kind.
        tokens: the tokens ``T`` of the forward.
        sweeps: how often the whole block ran; the sequential rollout's groups make up one.
        residual: the relative change of the states in the last sweep; 0 where they are exact.
        exact_prefix: how many tokens have states that equal the sequential ones, whatever the residual.
    """

    solver: str
    tokens: int
    sweeps: int
    residual: float
    exact_prefix: int


class RecurrentBlock(ABC):
    """The recurrent block of one forward, as a solver sees it: ``T`` new tokens after what is already cached.

    Attributes:
        tokens: the number ``T`` of new tokens.
        lag: how many tokens back a state comes from.
        initial: the states ``[B, lag, W]`` of the tokens before the first new one; None where there are none.
    """

    tokens: int
    lag: int
    initial: torch.Tensor | None

    @abstractmethod
    def step(self, start: int, stop: int, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block over tokens `start` to `stop`, at most `lag` of them, after the steps before it.

        `state` ``[B, stop - start, W]`` holds the states of the tokens `lag` back, or is None where there are none.
        Returns the block's output ``[B, stop - start, D]`` and these tokens' states ``[B, stop - start, W]``.
        """


@dataclass(frozen=True)
class Solver(ABC):
    """The settings of a solver. It holds nothing of a forward, so one object may serve many models and threads."""

    kind: ClassVar[str]

    @abstractmethod
    def solve(self, block: RecurrentBlock) -> tuple[torch.Tensor, torch.Tensor, SolverReport]:
        """The block's output ``[B, T, D]``, the states ``[B, T, W]``, and a report."""
