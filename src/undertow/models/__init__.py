"""Native models: architectures that transformers does not have. Importing them registers their Auto
classes."""

from undertow.models.huginn import HuginnConfig, HuginnForCausalLM
from undertow.models.lstm import LSTMConfig, LSTMForCausalLM
from undertow.models.pause import PauseConfig, PauseForCausalLM, with_pauses

__all__ = [
    "HuginnConfig",
    "HuginnForCausalLM",
    "LSTMConfig",
    "LSTMForCausalLM",
    "PauseConfig",
    "PauseForCausalLM",
    "with_pauses",
]
