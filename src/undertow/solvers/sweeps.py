"""Parallel solvers: sweeps of the block over all tokens at once. Jacobi is T²MLR's own scheme, the
scan is ours.

After k sweeps the first k·lag states are exact whatever the start, as a state depends on earlier
ones only; so ceil(T / lag) sweeps always suffice.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import torch

from undertow.errors import ConfigError
from undertow.registry import register
from undertow.settings import settings
from undertow.solvers.adjoint import last_pass, relative_change
from undertow.solvers.agreement import largest
from undertow.solvers.base import RecurrentBlock, Solution, Solver
from undertow.solvers.gradients import Gradient
from undertow.solvers.sequential import roll_out


@settings
class Sweeping(Solver):
    """What Jacobi and the scan share."""

    starts_plain: ClassVar[bool]

    def solve(self, block: RecurrentBlock) -> Solution:
        if block.tokens <= block.lag:  # one group, and so one step, is exact
            return roll_out(block)
        count, gradient, tolerance = self.settings()
        reach = (
            0 if gradient.kind == "adjoint" else count if gradient.steps is None else gradient.steps
        )
        wanted = torch.is_grad_enabled()
        states = None if self.starts_plain else block.initial_states()
        residuals = []
        done = 0
        for k in range(count):
            with torch.set_grad_enabled(wanted and k >= count - reach):
                received = None if states is None else block.received_from(states)
                _, readings = block.sweep(received, plain=self.starts_plain and received is None)
                new = self.advance(block, readings, received)
            done = k + 1
            if states is not None and k > 0:
                residuals.append(relative_change(new, states))
            states = new
            if (
                tolerance is not None
                and residuals
                and largest(float(residuals[-1]), block.on_cuda) < tolerance
            ):
                break
        assert states is not None  # there was a sweep
        solution = last_pass(block, states, gradient)
        residuals.append(relative_change(solution.states, states))
        exact = min(block.tokens, self.exact_groups(done) * block.lag)
        return dataclasses.replace(
            solution, exact_prefix=exact, sweeps=done, residuals=tuple(residuals)
        )

    @abstractmethod
    def settings(self) -> tuple[int, Gradient, float | None]:
        """Number of sweeps, gradient and tolerance."""

    @abstractmethod
    def advance(
        self, block: RecurrentBlock, readings: list[torch.Tensor], received: torch.Tensor | None
    ) -> torch.Tensor:
        """The next states from a sweep's readings; `received` is None after the plain sweep."""

    @abstractmethod
    def exact_groups(self, sweeps: int) -> int:
        """How many groups of lag tokens have exact outputs after this many sweeps."""


def check_sweeps(
    kind: str, name: str, sweeps: int, backward: int, gradient: str, tolerance: float | None
) -> Gradient:
    """The gradient of a sweeping solver, whose plain "truncated" reaches back `backward` sweeps.

    Raises:
        ConfigError: a number is out of its range.
    """
    if sweeps < 1:
        raise ConfigError(f"{kind} has {sweeps} {name}; use 1 or more")
    if not 0 <= backward <= sweeps:
        raise ConfigError(
            f"{kind} has backward={backward} of {sweeps} {name}; use a number from 0 to {sweeps}"
        )
    if tolerance is not None and not 0 < tolerance < 1:
        raise ConfigError(
            f"{kind}'s tolerance is {tolerance}; use a share between 0 and 1, such as 1e-4"
        )
    return Gradient("truncated", backward) if gradient == "truncated" else Gradient.parse(gradient)


@register
class Jacobi(Sweeping):
    """T²MLR's training scheme: a plain sweep, then sweeps that each use the states of the one
    before.

    A state moves on by `lag` tokens a sweep, the temporal residual included. As in the paper the
    first sweep is one of the base model, without the fusion.
    """

    kind: ClassVar[str] = "jacobi"
    starts_plain: ClassVar[bool] = True

    forward: int = 16
    """Sweeps, the plain one included: the paper's d_forward. One more pass gives the output."""
    backward: int = 4
    """How many of the last sweeps carry gradient: the paper's d_backward."""
    gradient: str = "truncated"
    """truncated: the last `backward` sweeps. full: all. adjoint(n): none; n vector-Jacobian
    products at the solution."""
    tolerance: float | None = None
    """Stop early when a sweep changes the states by less than this share."""

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> tuple[int, Gradient, float | None]:
        gradient = check_sweeps(
            self.kind, "forward sweeps", self.forward, self.backward, self.gradient, self.tolerance
        )
        return self.forward, gradient, self.tolerance

    def advance(
        self, block: RecurrentBlock, readings: list[torch.Tensor], received: torch.Tensor | None
    ) -> torch.Tensor:
        return block.guess(readings) if received is None else block.update(readings, received)

    def exact_groups(self, sweeps: int) -> int:
        return sweeps


@register
class Scan(Sweeping):
    """Sweeps between which `update` is solved exactly along time for the frozen readings.

    The temporal residual of T²MLR is nearly an integrator: Jacobi moves it on one token a sweep,
    the scan the whole way. The first sweep starts from states that are read off the block's input,
    as if its layers added nothing to the residual stream; that costs no layer and halves the error
    of every sweep after it.
    """

    kind: ClassVar[str] = "scan"
    starts_plain: ClassVar[bool] = False

    sweeps: int = 2
    """Sweeps; one more pass gives the output."""
    backward: int = 1
    """How many of the last sweeps carry gradient."""
    gradient: str = "truncated"
    """truncated: the last `backward` sweeps. full: all. adjoint(n): none; n vector-Jacobian
    products at the solution."""
    tolerance: float | None = None
    """Stop early when a sweep changes the states by less than this share."""

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> tuple[int, Gradient, float | None]:
        gradient = check_sweeps(
            self.kind, "sweeps", self.sweeps, self.backward, self.gradient, self.tolerance
        )
        return self.sweeps, gradient, self.tolerance

    def advance(
        self, block: RecurrentBlock, readings: list[torch.Tensor], received: torch.Tensor | None
    ) -> torch.Tensor:
        return block.scan(readings)

    def exact_groups(self, sweeps: int) -> int:
        return sweeps + 1
