"""Native models: architectures that transformers does not have. Importing them registers their Auto classes."""

from undertow.models.huginn import HuginnConfig, HuginnForCausalLM

__all__ = ["HuginnConfig", "HuginnForCausalLM"]
