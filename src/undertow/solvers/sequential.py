"""The exact rollout: the definition of a recurrence in time, against which every other solver is
tested."""

from __future__ import annotations

from typing import ClassVar

import torch

from undertow.errors import ConfigError
from undertow.registry import register
from undertow.solvers.adjoint import last_pass
from undertow.solvers.base import RecurrentBlock, Solution, Solver
from undertow.solvers.gradients import Adjoint, Full, Gradient, LastSweeps, Truncated


@register
class Sequential(Solver):
    """Run the recurrent block `lag` tokens at a time, in order. Exact for any pathway, in training
    and in evaluation."""

    kind: ClassVar[str] = "sequential"
    exact: ClassVar[bool] = True

    gradient: Gradient = Full()
    """full: back through the whole rollout. truncated(n): the carried state is cut after every n
    groups of lag tokens, as in truncated backpropagation through time; attention keeps its
    gradient. adjoint(n): roll out without a graph, then one parallel pass with a graph and n
    vector-Jacobian products; ceil(tokens / lag) of these are exact."""

    def __post_init__(self) -> None:
        if self.gradient in (Truncated(0), LastSweeps()):
            raise ConfigError(
                f"gradient is {str(self.gradient)!r}; a rollout is cut after a whole number of "
                "groups, at least 1: write truncated(n)"
            )

    def solve(self, block: RecurrentBlock) -> Solution:
        if isinstance(self.gradient, Adjoint) and torch.is_grad_enabled():
            with torch.no_grad():
                states = roll_out(block).states
            return last_pass(block, states, self.gradient)
        if isinstance(self.gradient, Truncated):
            return roll_out(block, self.gradient.steps)
        return roll_out(block)


def roll_out(block: RecurrentBlock, truncate: int | None = None) -> Solution:
    """The solution group by group; the state is cut after every `truncate` groups, if given."""
    outputs, states = [], []
    state = block.before
    for group, start in enumerate(range(0, block.tokens, block.lag)):
        stop = min(start + block.lag, block.tokens)
        if state is not None and truncate is not None and group % truncate == 0:
            state = state.detach()
        output, new = block.step(start, stop, state)
        outputs.append(output)
        states.append(new)
        if stop < block.tokens:
            state = block.recent(state, new, start)
    if len(outputs) == 1:
        return Solution(outputs[0], states[0], block.tokens)
    return Solution(torch.cat(outputs, dim=1), torch.cat(states, dim=1), block.tokens)
