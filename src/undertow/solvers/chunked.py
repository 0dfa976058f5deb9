"""Chunk by chunk: Gauss-Seidel over stretches of tokens, an inner solver inside each."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import ClassVar

import torch
from pydantic import PositiveInt

from undertow.errors import ConfigError
from undertow.registry import register
from undertow.solvers.base import RecurrentBlock, Solution, Solver
from undertow.solvers.gradients import Adjoint, LastSweeps
from undertow.solvers.sequential import Sequential
from undertow.solvers.sweeps import Jacobi, Scan, Sweeping


@register
class Chunked(Solver):
    """Solve `chunk` tokens at a time with an inner solver, keys and values and states of the chunks
    before given.

    The way to prefill a long prompt: few sweeps reach far enough inside a chunk, and each starts
    from states that are done.
    """

    kind: ClassVar[str] = "chunked"

    chunk: PositiveInt = 64
    """Tokens of a chunk."""
    # A closed list: of an open one the help would be endless, a chunk inside a chunk and so on.
    inner: Scan | Jacobi | Sequential = field(default_factory=Scan)
    """Solver inside a chunk. In training only the last of its passes carries gradient."""

    def __post_init__(self) -> None:
        if isinstance(self.inner.gradient, Adjoint):
            raise ConfigError(
                "chunked cannot take an adjoint gradient inside a chunk; use one over the whole "
                "sequence"
            )

    def passes(self) -> tuple[int, int]:
        return self.inner.passes()

    def solve(self, block: RecurrentBlock) -> Solution:
        inner = self.inner
        if isinstance(inner, Sweeping):
            # The sweeps of a chunk write the same slots: only the last may be in the graph.
            inner = dataclasses.replace(inner, backward=0, gradient=LastSweeps())
        solutions: list[Solution] = []
        received = []
        before, exact = block.before, 0
        for start in range(0, block.tokens, self.chunk):
            stop = min(start + self.chunk, block.tokens)
            span = block.span(start, stop, before)
            solution = inner.solve(span)
            solutions.append(solution)
            received.append(solution.received_by(span))
            before = block.recent(before, solution.states, start)
            if exact == start:  # a chunk after an exact one has an exact start
                exact += solution.exact_prefix
        return Solution(
            torch.cat([each.output for each in solutions], dim=1),
            torch.cat([each.states for each in solutions], dim=1),
            exact_prefix=exact,
            sweeps=max(each.sweeps for each in solutions),
            residuals=tuple(residual for each in solutions for residual in each.residuals),
            received=torch.cat(received, dim=1).detach(),
        )
