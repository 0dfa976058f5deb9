"""The one room that knows transformers' insides: it joins pathways and solvers to a model."""

from undertow.host.attach import attach, detach, report, set_solver

__all__ = ["attach", "detach", "report", "set_solver"]
