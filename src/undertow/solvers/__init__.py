"""How the states of a sequence are found."""

from collections.abc import Mapping

from undertow.registry import kinds
from undertow.solvers.auto import Auto
from undertow.solvers.base import Plan, Plans, RecurrentBlock, Solution, Solver, SolverReport
from undertow.solvers.chunked import Chunked
from undertow.solvers.gradients import Adjoint, Full, Gradient, Truncated
from undertow.solvers.sequential import Sequential
from undertow.solvers.sweeps import Jacobi, Scan

SOLVERS: Mapping[str, type[Solver]] = kinds(Solver)
"""Every registered solver by its kind, as recipes and saved models name it."""

__all__ = [
    "SOLVERS",
    "Adjoint",
    "Auto",
    "Chunked",
    "Full",
    "Gradient",
    "Jacobi",
    "Plan",
    "Plans",
    "RecurrentBlock",
    "Scan",
    "Sequential",
    "Solution",
    "Solver",
    "SolverReport",
    "Truncated",
]
