"""Recipes and their runs."""

from undertow.lab.runs.recipe import Recipe
from undertow.lab.training.gates import FastGates
from undertow.lab.training.run import train
from undertow.lab.training.solver_gap import Gap, SolverGap, measure_gap

__all__ = ["FastGates", "Gap", "Recipe", "SolverGap", "measure_gap", "train"]
