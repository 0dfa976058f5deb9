"""What the tests of sharded models share: tiny models, sharding them by FSDP2, and counting
collectives."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import zoo
from helpers import hosted, tokens
from small_huginn import small
from small_looped import looped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from undertow.solvers import Solver

WORLD = 2
VOCAB = 61


class Collectives(TorchDispatchMode):
    """Counts the gathers and reductions of sharded weights within it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if name.startswith("c10d.") and "allreduce" not in name:
            self.counts["gathers" if "gather" in name else "reductions"] += 1
        return function(*args, **(kwargs or {}))


def model_of(kind: str, solver: Solver | None = None) -> Any:
    """A tiny model in training mode: `plain`, `loop`, `huginn`, or one with a pathway."""
    if kind == "plain":
        return zoo.build("llama").train()
    if kind == "huginn":
        return copy.deepcopy(small()).train()
    return (
        looped("llama").train() if kind == "loop" else hosted("llama", kind, solver=solver).train()
    )


def layers_of(model: Any) -> list[nn.Module]:
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    return [layer for each in lists for layer in each]


def shard(model: Any, **settings: Any) -> Any:
    """A layer a group, and one for all else, as accelerate and torchtitan do."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def half_precision() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batches(lengths: tuple[int, int]) -> list[torch.Tensor]:
    """The rows of each process."""
    return [tokens(2, length, seed=length).clamp_max(VOCAB - 1) for length in lengths]


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def wanted(model: Any, ids: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of the mean loss of all processes' batches, by one process."""
    alone = copy.deepcopy(model)
    for each in ids:
        (loss(alone, each) / len(ids)).backward()
    return gradients(alone)


def error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of a gradient; infinite where one is missing."""
    if missing := expected.keys() - found.keys():
        raise AssertionError(f"no gradient of {', '.join(sorted(missing))}")
    scale = max(float(each.norm()) for each in expected.values())
    return max(
        float((found[name] - each).norm()) / max(float(each.norm()), 1e-3 * scale)
        for name, each in expected.items()
    )


def counted(work: Callable[[], Any]) -> dict[str, int]:
    with Collectives() as collectives:
        work()
    return dict(collectives.counts)
