"""Recipes and their runs."""

from undertow.training.recipe import Recipe
from undertow.training.run import train

__all__ = ["Recipe", "train"]
