"""How the states of a sequence are found."""

from undertow.solvers.auto import Auto
from undertow.solvers.base import Plan, RecurrentBlock, Solver, SolverMemory, SolverReport
from undertow.solvers.chunked import Chunked
from undertow.solvers.sequential import Sequential
from undertow.solvers.sweeps import Jacobi, Scan

# By the name that recipes and saved models give them.
SOLVERS: dict[str, type[Solver]] = {
    cls.kind: cls for cls in (Auto, Sequential, Scan, Jacobi, Chunked)
}

__all__ = [
    "SOLVERS",
    "Auto",
    "Chunked",
    "Jacobi",
    "Plan",
    "RecurrentBlock",
    "Scan",
    "Sequential",
    "Solver",
    "SolverMemory",
    "SolverReport",
]
