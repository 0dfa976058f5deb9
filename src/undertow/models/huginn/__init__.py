"""Huginn (arXiv 2502.05171): prelude, looped core, coda."""

from undertow.models.huginn.config import HuginnConfig
from undertow.models.huginn.model import HuginnForCausalLM, HuginnOutput

__all__ = ["HuginnConfig", "HuginnForCausalLM", "HuginnOutput"]
