"""What a recurrence does inside a model: how faithful a solver's loss and gradient are."""

from undertow.analysis.fidelity import Fidelity, measure_fidelity, recommendation

__all__ = ["Fidelity", "measure_fidelity", "recommendation"]
