"""The depth that a model runs at where nothing else is said: for evaluations that only know how to
generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from undertow.depth.loop import check_depth
from undertow.errors import ConfigError
from undertow.host.attachment import find_attachment
from undertow.models import HuginnForCausalLM


def get_depth(model: Any) -> int:
    """The iterations of a forward that is given no depth.

    Raises:
        ConfigError: the model has no recurrence in depth.
    """
    if isinstance(model, HuginnForCausalLM):
        return int(model.config.mean_recurrence)
    looped = find_attachment(model).looped
    if looped is None:
        raise ConfigError("the model has no recurrence in depth; attach undertow.Looped first")
    return looped.depth


def set_depth(model: Any, depth: int) -> None:
    """Let a forward that is given no depth run so many iterations: in `generate`, in lm-eval,
    anywhere.

    Raises:
        ConfigError: the model has no recurrence in depth, or the depth is below 1.
    """
    check_depth("depth", depth)
    get_depth(model)
    if isinstance(model, HuginnForCausalLM):
        model.config.mean_recurrence = depth
    else:
        attachment = find_attachment(model)
        assert attachment.looped is not None
        attachment.looped = dataclasses.replace(attachment.looped, depth=depth)


@contextmanager
def at_depth(model: Any, depth: int) -> Iterator[None]:
    """Run a block with another depth."""
    before = get_depth(model)
    set_depth(model, depth)
    try:
        yield
    finally:
        set_depth(model, before)


def depths_of(model: Any, output: Any) -> torch.Tensor:
    """The iterations ``[B, T]`` that each token of a forward's `output` ran."""
    if isinstance(model, HuginnForCausalLM):
        found: torch.Tensor = output.depths
        return found
    report = find_attachment(model).depth_report
    assert report is not None
    return report.depths
