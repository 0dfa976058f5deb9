"""The one room that knows transformers' insides: it joins pathways and solvers to a model."""

from undertow.host.attach import attach, depth_report, detach, report, set_solver

__all__ = ["attach", "depth_report", "detach", "report", "set_solver"]
