"""What a trained model can do: accuracy by length, tables and figures."""

from undertow.evaluation.accuracy import Accuracy, accuracy_by_length

__all__ = ["Accuracy", "accuracy_by_length"]
