"""The one room that knows transformers' insides: it joins pathways and solvers to a model."""

from importlib.util import find_spec

import undertow.host.loading  # transformers learns to load what a hosted model saved
from undertow.host.attach import attach, depth_report, detach, report, set_solver

if find_spec("peft") is not None:
    import undertow.host.adapters  # noqa: F401  # PEFT learns to load adapters with a recurrence

__all__ = ["attach", "depth_report", "detach", "report", "set_solver"]
