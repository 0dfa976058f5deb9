"""How the states of a sequence are found."""

from undertow.solvers.auto import Auto
from undertow.solvers.base import Plan, RecurrentBlock, Solver, SolverMemory, SolverReport
from undertow.solvers.chunked import Chunked
from undertow.solvers.sequential import Sequential
from undertow.solvers.sweeps import Jacobi, Scan

__all__ = [
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
