"""Chunk by chunk: Gauss-Seidel over stretches of tokens, an inner solver inside each."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from undertow.errors import ConfigError
from undertow.fields import check_fields
from undertow.registry import register
from undertow.solvers.base import RecurrentBlock, Solver, SolverReport
from undertow.solvers.sequential import Sequential
from undertow.solvers.sweeps import Jacobi, Scan, Sweeping


@register
@dataclass(frozen=True)
class Chunked(Solver):
    """Solve `chunk` tokens at a time with an inner solver, keys and values and states of the chunks
    before given.

    The way to prefill a long prompt: few sweeps reach far enough inside a chunk, and each starts
    from states that are done.
    """

    kind: ClassVar[str] = "chunked"

    chunk: int = 64
    """Tokens of a chunk."""
    inner: Scan | Jacobi | Sequential = field(default_factory=Scan)
    """Solver inside a chunk. In training only the last of its passes carries gradient."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.chunk < 1:
            raise ConfigError(f"chunked has a chunk of {self.chunk} tokens; use 1 or more")
        if self.inner.gradient.startswith("adjoint"):
            raise ConfigError(
                "chunked cannot take an adjoint gradient inside a chunk; use one over the whole "
                "sequence"
            )

    def solve(self, block: RecurrentBlock) -> tuple[torch.Tensor, torch.Tensor, SolverReport]:
        started = time.perf_counter()
        outputs, states = [], []
        residuals: list[torch.Tensor] = []
        before = block.before
        inner = self.inner
        if isinstance(
            inner, Sweeping
        ):  # the sweeps of a chunk write the same slots: only the last may be in the graph
            inner = dataclasses.replace(inner, backward=0, gradient="truncated")
        exact, sweeps = 0, 0
        for start in range(0, block.tokens, self.chunk):
            stop = min(start + self.chunk, block.tokens)
            output, state, report = inner.solve(block.span(start, stop, before))
            outputs.append(output)
            states.append(state)
            before = block.recent(before, state, start)
            if exact == start:  # a chunk after an exact one has an exact start
                exact += report.exact_prefix
            residuals += report.residuals
            sweeps = max(sweeps, report.sweeps)
        report = SolverReport(
            self.kind, block.tokens, sweeps, exact, tuple(residuals), time.perf_counter() - started
        )
        return torch.cat(outputs, dim=1), torch.cat(states, dim=1), report
