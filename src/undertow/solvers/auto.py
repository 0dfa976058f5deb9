"""As many sweeps as the batch at hand needs: measured against the exact rollout from time to
time."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from itertools import pairwise
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

# Sweeps are enough once the error is within the tolerance and so many more shrink it, each to this
# share. A recurrence that is coming into use is at first a small part of the states, and a model
# cannot learn to follow a chain whose sweeps are wrong by as much as that part: what is left of
# such a chain after one sweep is left after the next.
SETTLED = 2
SHRINKING = 0.3
LEAST = 1e-4  # an error below which nothing is told of a chain
# A plan is steady if it took as many sweeps the time before, with an error that grew by no more
# than this; steady plans are measured up to so many times as rarely.
GROWN = 1.5
RAREST = 8
# The most passes over a prompt before it is rolled out.
MOST_PASSES = 16
# The most products that a measured gradient takes; what the fifth would add is small even where
# gates are wide open.
MOST_PRODUCTS = 4
# One more sweep changes the states of a fitting plan by about the error allowed; batches differ
# somewhat.
OUTGROWN = 3.0


@register
class Auto(Solver):
    """States found without a graph, by a few scans or by the rollout, whichever is cheaper; then a
    short adjoint.

    A model learns to follow a chain of states only as far as its solver follows it. Text needs one
    or two sweeps, a running product needs the rollout, and which it is shows only while the model
    learns. So from time to time both run on the same batch, and the sweeps until the next such
    measurement are as many as brought the states within `tolerance` of the exact ones, or the
    rollout itself if that many sweeps would cost more. Sequences of other lengths need other
    numbers, so each power of two has a plan of its own.

    A recurrence that is coming into use is at first a small part of the states. So sweeps count as
    enough only where two more shrink the error on and on, as those of a chain do not. Between
    measurements the pass that gives the output tells for nothing how much one more sweep changes
    the states: where that is more than three times the tolerance, the model has outgrown its plan,
    and the next forward is measured. A plan that stays the same is measured more and more rarely.

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
    """Forwards between two measurements; the first come sooner, after 1, 2, 4, 8, ... forwards, and
    those of a plan that stays the same up to eight times as late."""
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
        if not torch.is_grad_enabled():
            return self.read(block)
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

    def read(self, block: RecurrentBlock) -> Solution:
        """The solution without gradients, for a prompt: that of the first pass after which, by how
        much it changed and how changes shrink, the states that tokens receive and the last ones are
        within the tolerance in each row; exact where the passes do not come to that.

        Nothing is kept from one prompt to the next.
        """
        most = min(MOST_PASSES, -(-block.tokens // block.lag) // 2)
        states = block.initial_states()
        residuals: list[torch.Tensor] = []
        before = 0.0
        for done in range(1, most + 1):
            found = block.swept(states, last=True)
            new, output = found.followed()
            if states is not None:
                residuals.append(largest_change(block, new, states))
                change = largest(float(residuals[-1]), block.on_cuda)
                if 0 < before <= change:  # they do not settle
                    break
                rate = change / before if before else 0.5
                left = change * rate / (1 - rate)
                if left <= self.tolerance:
                    exact, given = min(block.tokens, done * block.lag), block.received_from(states)
                    return Solution(output, new, exact, done - 1, tuple(residuals), given)
                if before and left * rate ** (most - done) > self.tolerance:
                    break
                before = change
            states = new
        return roll_out(block)

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
        earlier, plan.sweeps, plan.tokens = (plan.sweeps, plan.gap), None, tokens
        plan.allowed = self.tolerance
        started = clock(block)
        states = block.initial_states()
        gaps: list[float] = []
        cost = self.rollout_cost or 1.0
        for done in range(1, -(-tokens // block.lag)):  # as many as groups are exact, and dearer
            states = sweep(block, states)
            off = (block.received_from(states) - received).norm() / size
            gaps.append(largest(float(off), block.on_cuda))
            if self.rollout_cost is None:
                taken = (clock(block) - started) / rollout
                cost = done / largest(taken, block.on_cuda)
            enough = self.enough(gaps, rounding(received))
            if enough is not None or done + 1 > cost + SETTLED:
                plan.sweeps = enough if enough is not None and enough <= cost else None
                break
        plan.gap = gaps[(plan.sweeps or max(1, min(len(gaps), int(cost)))) - 1]
        steady = plan.sweeps == earlier[0] and plan.gap <= max(GROWN * earlier[1], LEAST)
        soonest = min(self.every, plan.forwards)
        plan.interval = min(max(2 * plan.interval, soonest), RAREST * self.every)
        plan.interval = plan.interval if steady else soonest
        plan.next_measurement = plan.forwards + plan.interval
        return exact

    def enough(self, gaps: list[float], rounding: float) -> int | None:
        """How many sweeps are enough, by the errors after each so far; None for more than were
        tried."""
        least = min(self.tolerance, max(LEAST, rounding))
        for sweeps, gap in enumerate(gaps, 1):
            after = [gap, *gaps[sweeps : sweeps + SETTLED]]
            settling = len(after) > SETTLED or after[-1] <= least
            shrunk = all(b <= max(SHRINKING * a, least) for a, b in pairwise(after))
            if gap <= least or (gap <= self.tolerance and settling and shrunk):
                return sweeps
        return None


def sweep(block: RecurrentBlock, states: torch.Tensor | None) -> torch.Tensor:
    """The states after one more sweep, followed up the residual stream."""
    states, _ = block.swept(states).followed()
    return states


def largest_change(block: RecurrentBlock, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The largest relative change, of any row, of the states that tokens receive and of those that
    the next ones will."""
    changes = []
    for after, before in (
        (block.received_from(new), block.received_from(old)),
        (block.recent(block.before, new, 0), block.recent(block.before, old, 0)),
    ):
        size = after.flatten(1).norm(dim=1).clamp_min(torch.finfo(after.dtype).tiny)
        changes.append(((after - before).flatten(1).norm(dim=1) / size).amax())
    return torch.stack(changes).amax()


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
