"""The exact rollout: the definition of a recurrence in time, against which every other solver is tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from undertow.solvers.base import RecurrentBlock, Solver, SolverReport
from undertow.solvers.gradients import Gradient


@dataclass(frozen=True)
class Sequential(Solver):
    """Run the recurrent block `lag` tokens at a time, in order. Exact for any pathway, in training and in evaluation."""

    kind: ClassVar[str] = "sequential"

    gradient: str = "full"
    """full: back through the whole rollout. truncated(n): the carried state is cut after every n groups of lag tokens,
    as in truncated backpropagation through time; attention keeps its gradient."""

    def __post_init__(self) -> None:
        Gradient.parse(self.gradient)

    def solve(self, block: RecurrentBlock) -> tuple[torch.Tensor, torch.Tensor, SolverReport]:
        truncate = Gradient.parse(self.gradient).steps
        outputs, states = [], []
        state = block.initial
        for group, start in enumerate(range(0, block.tokens, block.lag)):
            stop = min(start + block.lag, block.tokens)
            if state is not None:
                state = state[:, : stop - start]  # the last group may be short
                if truncate is not None and group % truncate == 0:
                    state = state.detach()
            output, state = block.step(start, stop, state)
            outputs.append(output)
            states.append(state)
        report = SolverReport(self.kind, block.tokens, sweeps=1, residual=0.0, exact_prefix=block.tokens)
        if len(outputs) == 1:
            return outputs[0], states[0], report
        return torch.cat(outputs, dim=1), torch.cat(states, dim=1), report
