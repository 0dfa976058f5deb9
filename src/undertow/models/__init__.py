"""Native models that recipes compare with: the LSTM, and pause tokens on any model."""

from undertow.models.lstm import LSTMConfig, LSTMForCausalLM
from undertow.models.pause import PauseConfig, PauseForCausalLM, with_pauses

__all__ = ["LSTMConfig", "LSTMForCausalLM", "PauseConfig", "PauseForCausalLM", "with_pauses"]
