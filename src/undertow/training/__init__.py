"""Recipes and their runs."""

from undertow.training.gates import FastGates
from undertow.training.recipe import Recipe
from undertow.training.run import train
from undertow.training.solver_gap import Gap, SolverGap, measure_gap

__all__ = ["FastGates", "Gap", "Recipe", "SolverGap", "measure_gap", "train"]
