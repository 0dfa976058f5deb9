"""How the states of a sequence are found."""

from undertow.solvers.base import RecurrentBlock, Solver, SolverReport
from undertow.solvers.chunked import Chunked
from undertow.solvers.sequential import Sequential
from undertow.solvers.sweeps import Jacobi, Scan

__all__ = ["Chunked", "Jacobi", "RecurrentBlock", "Scan", "Sequential", "Solver", "SolverReport"]
