"""What a recurrence does inside a model: the fidelity of solvers, the choices it leaves open, runs
beside each other."""

from undertow.lab.inspections.choices import Choices, measure_choices
from undertow.lab.inspections.fidelity import Fidelity, measure_fidelity, recommendation

__all__ = ["Choices", "Fidelity", "measure_choices", "measure_fidelity", "recommendation"]
