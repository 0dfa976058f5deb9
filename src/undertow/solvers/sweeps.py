"""Parallel solvers: sweeps of the block over all tokens at once. Jacobi is T²MLR's own scheme, the
scan is ours.

After k sweeps the first k·lag states are exact whatever the start, as a state depends on earlier
ones only; so ceil(T / lag) sweeps always suffice.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from undertow.errors import ConfigError
from undertow.registry import register
from undertow.solvers.adjoint import last_pass, relative_change
from undertow.solvers.agreement import largest
from undertow.solvers.base import RecurrentBlock, Solution, Solver
from undertow.solvers.gradients import Gradient, LastSweeps
from undertow.solvers.sequential import roll_out

Tolerance = Annotated[float, Field(gt=0, lt=1)]


class Sweeping(Solver):
    """What Jacobi and the scan share. They declare the settings, each in the order of its paper."""

    starts_plain: ClassVar[bool]
    backward: NonNegativeInt
    gradient: Gradient
    tolerance: Tolerance | None

    def __post_init__(self) -> None:
        sweeps = self.count
        reach = self.gradient.reach(sweeps, self.backward)
        if reach > sweeps:
            raise ConfigError(
                f"{self.kind} has {sweeps} sweeps, but backward={self.backward} and "
                f"gradient={str(self.gradient)!r} go back through {reach}; use a number from 0 to "
                f"{sweeps}"
            )
        if self.backward not in (reach, type(self).backward):  # which stands in old files
            raise ConfigError(
                f"{self.kind} has backward={self.backward}, but gradient={str(self.gradient)!r} "
                f"goes back through {reach} of its {sweeps} sweeps; leave out one of the two"
            )

    @property
    @abstractmethod
    def count(self) -> int:
        """Sweeps before the pass that gives the output."""

    def passes(self) -> tuple[int, int]:
        return self.count + 1, self.gradient.reach(self.count, self.backward) + 1

    def solve(self, block: RecurrentBlock) -> Solution:
        if block.tokens <= block.lag:  # one group, and so one step, is exact
            return roll_out(block)
        count = self.count
        reach = self.gradient.reach(count, self.backward)
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
                self.tolerance is not None
                and residuals
                and largest(float(residuals[-1]), block.on_cuda) < self.tolerance
            ):
                break
        assert states is not None  # there was a sweep
        solution = last_pass(block, states, self.gradient)
        residuals.append(relative_change(solution.states, states))
        exact = min(block.tokens, self.exact_groups(done) * block.lag)
        return dataclasses.replace(
            solution, exact_prefix=exact, sweeps=done, residuals=tuple(residuals)
        )

    @abstractmethod
    def advance(
        self, block: RecurrentBlock, readings: list[torch.Tensor], received: torch.Tensor | None
    ) -> torch.Tensor:
        """The next states from a sweep's readings; `received` is None after the plain sweep."""

    @abstractmethod
    def exact_groups(self, sweeps: int) -> int:
        """How many groups of lag tokens have exact outputs after this many sweeps."""


@register
class Jacobi(Sweeping):
    """T²MLR's training scheme: a plain sweep, then sweeps that each use the states of the one
    before.

    A state moves on by `lag` tokens a sweep, the temporal residual included. As in the paper the
    first sweep is one of the base model, without the fusion.
    """

    kind: ClassVar[str] = "jacobi"
    starts_plain: ClassVar[bool] = True

    forward: PositiveInt = 16
    """Sweeps, the plain one included: the paper's d_forward. One more pass gives the output."""
    backward: NonNegativeInt = 4
    """How many of the last sweeps carry gradient: the paper's d_backward."""
    gradient: Gradient = LastSweeps()
    """truncated: the last `backward` sweeps. truncated(n): the last n. full: all. adjoint(n): none;
    n vector-Jacobian products at the solution."""
    tolerance: Tolerance | None = None
    """Stop early when a sweep changes the states by less than this share."""

    @property
    def count(self) -> int:
        return self.forward

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

    sweeps: PositiveInt = 2
    """Sweeps; one more pass gives the output."""
    backward: NonNegativeInt = 1
    """How many of the last sweeps carry gradient."""
    gradient: Gradient = LastSweeps()
    """truncated: the last `backward` sweeps. truncated(n): the last n. full: all. adjoint(n): none;
    n vector-Jacobian products at the solution."""
    tolerance: Tolerance | None = None
    """Stop early when a sweep changes the states by less than this share."""

    @property
    def count(self) -> int:
        return self.sweeps

    def advance(
        self, block: RecurrentBlock, readings: list[torch.Tensor], received: torch.Tensor | None
    ) -> torch.Tensor:
        return block.scan(readings)

    def exact_groups(self, sweeps: int) -> int:
        return sweeps + 1
