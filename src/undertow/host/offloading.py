"""Weights that accelerate keeps in main memory or on disk, and brings in for a module's own forward
alone.

Meanwhile they are on the meta device. The layers of a hosted model are called as ever, so this
works by itself; what uses weights outside of their module's forward asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def offloading_hooks(module: nn.Module) -> list[Any]:
    """Accelerate's hooks that keep a module's own weights elsewhere."""
    hook: Any = getattr(module, "_hf_hook", None)
    return [each for each in getattr(hook, "hooks", [hook]) if getattr(each, "offload", False)]


def device_of(module: nn.Module) -> torch.device:
    """Where the weights of a module are when it runs: the meta device only where they are nowhere
    else."""
    parameter = next(module.parameters())
    if parameter.is_meta:
        for each in module.modules():
            for hook in offloading_hooks(each):
                return torch.empty(0, device=hook.execution_device).device
    return parameter.device


def bring_in(recurrence: nn.Module) -> None:
    """Take a recurrence's weights in for good, where accelerate keeps them elsewhere: most are used
    outside of a forward."""
    for module in recurrence.modules():
        for hook in offloading_hooks(module):
            from accelerate.hooks import remove_hook_from_module
            from accelerate.utils import set_module_tensor_to_device

            kept = {
                name: hook.weights_map[name]
                for name, _ in module.named_parameters(recurse=hook.place_submodules)
            }
            remove_hook_from_module(module)
            for name, value in kept.items():
                set_module_tensor_to_device(module, name, hook.execution_device, value=value)


@contextmanager
def weight_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """A module's weight, brought in for as long as it is used."""
    hooks = offloading_hooks(module)
    for hook in hooks:
        hook.pre_forward(module)
    try:
        weight: Any = module.weight
        yield weight
    finally:
        for hook in hooks:
            hook.post_forward(module, None)


def place(device_map: dict[str, Any], stack: str, recurrence: str) -> None:
    """Give a device map an entry for a recurrence that it does not speak of: where the first of the
    layers is.

    `stack` and `recurrence` are the names of both in the model, which the map's entries are
    prefixes of.
    """
    first = f"{stack}.0"
    if any(name == "" or f"{recurrence}.".startswith(f"{name}.") for name in device_map):
        return
    parts = first.split(".")
    prefixes = [".".join(parts[:stop]) for stop in range(len(parts), 0, -1)]
    # A layer's own parts may be placed one by one.
    found = next((name for name in prefixes if name in device_map), None) or next(
        (name for name in device_map if name.startswith(f"{first}.")), None
    )
    if found is not None:
        device_map[recurrence] = device_map[found]
