"""One handle for recurrence in depth, whichever kind of model has it: layers looped by
`undertow.attach`, or a native model's core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from undertow.depth.loop import check_depth
from undertow.depth.looped import Looped
from undertow.errors import ConfigError


class DepthHandle(Protocol):
    """What is asked of a model with recurrence in depth.

    Attributes:
        settings: what is looped and how deep, how tokens enter, whether there is an exit gate.
        layers: the number of layers that keep keys and values.
        looped: the modules that run at every iteration.
        owner: the loop in words, alike for the models that one cache may serve.
    """

    @property
    def settings(self) -> Looped: ...

    @property
    def layers(self) -> int: ...

    @property
    def looped(self) -> Sequence[nn.Module]: ...

    @property
    def owner(self) -> str: ...

    def set_depth(self, depth: int) -> None:
        """Let a forward that is given no depth run so many iterations."""

    def depths(self, output: Any) -> torch.Tensor:
        """The iterations ``[B, T]`` that each token of a forward ran, which has just given
        `output`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits ``[B, T, V]`` of the coda's output ``[B, T, D]``."""

    def gate(self, state: torch.Tensor) -> torch.Tensor:
        """The probability ``[B, T]`` by which the exit gate stops at a state ``[B, T, D]``.

        Raises:
            ConfigError: there is no exit gate.
        """


def depth_handle(model: nn.Module) -> DepthHandle:
    """The handle of a model with recurrence in depth, wrapped or not: one of its modules has a
    method `depth_handle`.

    Raises:
        ConfigError: the model has no recurrence in depth.
    """
    for module in model.modules():
        make = getattr(type(module), "depth_handle", None)
        if make is not None:
            handle: DepthHandle = make(module)
            return handle
    raise no_recurrence()


def no_recurrence() -> ConfigError:
    return ConfigError("the model has no recurrence in depth; attach undertow.Looped first")


def recurs_in_depth(model: nn.Module) -> bool:
    """Whether a model, wrapped or not, has a recurrence in depth."""
    try:
        depth_handle(model)
    except ConfigError:
        return False
    return True


def get_depth(model: nn.Module) -> int:
    """The iterations of a forward that is given no depth.

    Raises:
        ConfigError: the model has no recurrence in depth.
    """
    return depth_handle(model).settings.depth


def set_depth(model: nn.Module, depth: int) -> None:
    """Let a forward that is given no depth run so many iterations: in `generate`, in lm-eval,
    anywhere.

    Raises:
        ConfigError: the model has no recurrence in depth, or the depth is below 1.
    """
    check_depth("depth", depth)
    depth_handle(model).set_depth(depth)


@contextmanager
def at_depth(model: nn.Module, depth: int) -> Iterator[None]:
    """Run a block with another depth."""
    before = get_depth(model)
    set_depth(model, depth)
    try:
        yield
    finally:
        set_depth(model, before)


def depths_of(model: nn.Module, output: Any) -> torch.Tensor:
    """The iterations ``[B, T]`` that each token of a forward's `output` ran."""
    return depth_handle(model).depths(output)
