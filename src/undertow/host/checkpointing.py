"""The library's own checkpointing of a layer, which takes its cache away: asked for, and held
off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def checkpoints(module: torch.nn.Module) -> bool:
    """Whether the library would checkpoint this layer in the current mode."""
    return bool(getattr(module, "gradient_checkpointing", False)) and module.training


def is_reentrant(module: torch.nn.Module) -> bool:
    """Whether the library would checkpoint this layer by reentrant autograd, which no adjoint can
    differentiate through."""
    settings = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
    return checkpoints(module) and bool(settings.get("use_reentrant", False))


@contextmanager
def without_checkpointing(module: torch.nn.Module) -> Iterator[None]:
    """Run a layer without the library's own checkpointing, which takes its cache away."""
    if not checkpoints(module):
        yield
        return
    module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        module.gradient_checkpointing = True  # type: ignore[assignment]
