"""What a trained model can do: accuracy by length, the loss a token, tables and figures."""

from undertow.lab.evaluation.accuracy import accuracy_by_length
from undertow.lab.evaluation.loss import loss_per_token
from undertow.lab.runs.results import Accuracy, Loss

__all__ = ["Accuracy", "Loss", "accuracy_by_length", "loss_per_token"]
