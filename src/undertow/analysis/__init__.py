"""What a recurrence does inside a model: the fidelity of solvers, the choices it leaves open, runs beside each other."""

from undertow.analysis.choices import Choices, measure_choices
from undertow.analysis.fidelity import Fidelity, measure_fidelity, recommendation

__all__ = ["Choices", "Fidelity", "measure_choices", "measure_fidelity", "recommendation"]
