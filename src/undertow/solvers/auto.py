"""As many sweeps as the batch at hand needs: measured against the exact rollout from time to
time."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt

from undertow.errors import ConfigError
from undertow.registry import register
from undertow.solvers.adjoint import last_pass, relative_change
from undertow.solvers.agreement import largest
from undertow.solvers.base import Plan, Plans, RecurrentBlock, Solution, Solver
from undertow.solvers.gradients import Adjoint, Gradient
from undertow.solvers.sequential import roll_out

# How much of the error after one sweep may be left. A recurrence that is coming into use is at
# first a small part of the states, and a model cannot learn to follow a chain whose sweeps are
# wrong by as much as that part.
CHAIN = 0.1
# The most products that a measured gradient takes; what the fifth would add is small even where
# gates are wide open.
MOST_PRODUCTS = 4
# One more sweep changes the states of a fitting plan by less than about the error allowed; batches
# differ somewhat.
OUTGROWN = 2.0


@register
class Auto(Solver):
    """States found without a graph, by a few scans or by the rollout, whichever is cheaper; then a
    short adjoint.

    A model learns to follow a chain of states only as far as its solver follows it. Text needs two
    or three sweeps, a running product needs the rollout, and which it is shows only while the model
    learns. So from time to time both run on the same batch, and the sweeps until the next such
    measurement are as many as brought the states within `tolerance` of the exact ones, or the
    rollout itself if that many sweeps would cost more. Sequences of other lengths need other
    numbers, so each power of two has a plan of its own.

    Where the recurrence is a small part of the states, a tenth of the error that one sweep leaves
    is allowed, down to the square of the tolerance and what rounding leaves. Between measurements
    the pass that gives the output tells for nothing how much one more sweep changes the states:
    where that is more than twice the error allowed, the model has outgrown its plan, and the next
    forward is measured.

    The gradient is planned alike: where the states are measured, so is how many products of the
    adjoint it takes until one more would change it by less than its tolerance. That is one while
    the gates are nearly closed, and more as they open.

    In a distributed run all processes take the same decisions, by the largest error among them.
    """

    kind: ClassVar[str] = "auto"
    adapts: ClassVar[bool] = True

    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Largest relative error of the states that tokens receive, against the exact rollout."""
    every: PositiveInt = 32
    """Forwards between two measurements; the first come sooner, after 1, 2, 4, 8, ... forwards."""
    gradient: Gradient = Adjoint(tolerance=0.1)
    """One pass with a graph at the solution, and its vector-Jacobian products: adjoint(n) takes n,
    adjoint(tolerance) as many, up to four, as it took when last measured; where four are too few, a
    warning says so once."""
    rollout_cost: Annotated[float, Field(ge=1)] | None = None
    """How many sweeps may run in place of one rollout; their times are compared if left out, so
    that runs with the same seed may then differ within the tolerance."""

    def __post_init__(self) -> None:
        if not isinstance(self.gradient, Adjoint):
            raise ConfigError(
                f"auto's gradient is {str(self.gradient)!r}; its states have no graph, so use "
                '"adjoint(n)"'
            )

    def solve(self, block: RecurrentBlock) -> Solution:
        tokens = int(largest(block.tokens, block.on_cuda))
        if tokens <= block.lag:  # one group, and so one step, is exact
            return roll_out(block)
        plan = block.plans.plan(tokens)
        plan.forwards += 1
        measured = plan.forwards >= plan.next_measurement or tokens > plan.tokens
        with torch.no_grad():
            if measured:
                states = self.measure(block, plan, tokens)
            elif plan.sweeps is None:
                states = roll_out(block).states
            else:
                states = sweep(block, block.initial_states())
                for _ in range(plan.sweeps - 1):
                    states = sweep(block, states)
        solution = self.last_pass(block, states, plan, measured)
        if measured or plan.sweeps is None:
            return solution
        change = relative_change(block.received_from(solution.states), block.received_from(states))
        if largest(float(change), block.on_cuda) > OUTGROWN * plan.allowed:
            plan.next_measurement = plan.forwards + 1
        exact = min(block.tokens, (plan.sweeps + 1) * block.lag)
        return dataclasses.replace(
            solution, exact_prefix=exact, sweeps=plan.sweeps, residuals=(change,)
        )

    def last_pass(
        self, block: RecurrentBlock, states: torch.Tensor, plan: Plan, measured: bool
    ) -> Solution:
        """The pass at the states. If measured, its backward pass tells the plan how many products
        the gradient took."""
        gradient = self.gradient
        assert isinstance(gradient, Adjoint)
        if gradient.tolerance is None:
            return last_pass(block, states, gradient)
        if measured or plan.products is None:
            most = Adjoint(MOST_PRODUCTS, gradient.tolerance)
            groups = -(-block.tokens // block.lag)
            note = functools.partial(self.note, block.plans, plan, groups)
            return last_pass(block, states, most, note)
        return last_pass(block, states, Adjoint(plan.products))

    def note(self, plans: Plans, plan: Plan, groups: int, products: int) -> None:
        """Keep how many products a measured gradient took; says once where the most were too few
        for its tolerance."""
        capped = products == MOST_PRODUCTS < groups  # as many products as groups are exact
        if capped and not any(each.capped for each in plans.by_length.values()):
            warnings.warn(
                f"auto's gradient still changed by more than its tolerance, {self.gradient}, after "
                f"{MOST_PRODUCTS} products, the most that it takes: it does not reach back to all "
                'the states that matter here. Choose Auto(gradient="adjoint(n)") with a larger n, '
                "or Sequential() for the full gradient",
                stacklevel=2,
            )
        plan.products, plan.capped = products, capped

    def measure(self, block: RecurrentBlock, plan: Plan, tokens: int) -> torch.Tensor:
        """The exact states ``[B, T, W]`` of this batch; the plan then says how to find those of the
        next ones.

        `tokens` is the length of the longest batch of any process.
        """
        started = clock(block)
        exact = roll_out(block).states
        rollout = clock(block) - started
        received = block.received_from(exact)
        size = received.norm().clamp_min(torch.finfo(received.dtype).tiny)
        plan.sweeps, plan.tokens = None, tokens
        plan.next_measurement = plan.forwards + min(self.every, plan.forwards)
        started = clock(block)
        states = block.initial_states()
        for done in range(
            1, -(-tokens // block.lag)
        ):  # as many sweeps as groups are exact, and dearer
            states = sweep(block, states)
            plan.gap = largest(
                float((block.received_from(states) - received).norm() / size), block.on_cuda
            )
            if done == 1:
                plan.allowed = min(
                    self.tolerance, max(self.tolerance**2, CHAIN * plan.gap, rounding(received))
                )
            if plan.gap <= plan.allowed:
                plan.sweeps = done
                break
            if self.rollout_cost is None:
                taken = largest((clock(block) - started) / rollout, block.on_cuda)
            else:
                taken = done / self.rollout_cost
            if taken * (done + 1) / done > 1:  # one more would cost more than the rollout
                break
        return exact


def sweep(block: RecurrentBlock, states: torch.Tensor | None) -> torch.Tensor:
    """The states after one more sweep and the scan along time."""
    _, readings = block.sweep(None if states is None else block.received_from(states))
    return block.scan(readings)


def rounding(states: torch.Tensor) -> float:
    """The relative error that the precision of the layers alone may leave."""
    device = states.device.type
    computed = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    )
    return torch.finfo(computed).eps


def clock(block: RecurrentBlock) -> float:
    """Seconds, once the block's device has done what it was given."""
    if block.on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
