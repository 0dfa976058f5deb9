"""How the states of a sequence are found."""

from undertow.solvers.base import RecurrentBlock, Solver, SolverReport
from undertow.solvers.sequential import Sequential

SOLVERS: dict[str, type[Solver]] = {Sequential.kind: Sequential}

__all__ = ["SOLVERS", "RecurrentBlock", "Sequential", "Solver", "SolverReport"]
