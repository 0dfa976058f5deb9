"""What a forward does where several processes train one model: each must make the same collectives,
whatever the lengths of its rows.

**FSDP2: the layers that a forward runs again and again stay whole meanwhile.** FSDP gathers a
layer's weights whenever it is called, and lets go of them afterwards. An exact rollout calls each
layer of the recurrent block once for every group of tokens, so that T tokens would be T / lag
gathers, and processes whose rows have other lengths would wait for each other for good. Here these
layers are gathered once a forward, kept until its backward pass is through, and let go then: as
many collectives as the plain model makes, whatever the solver.

**A recurrence's parameters always have a gradient**, zeros where nothing reached them, as in rows
no longer than the lag. Otherwise one process would reduce what another does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


def several_processes() -> bool:
    """Whether this is one of several processes that train together."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def same_everywhere(module: nn.Module, layers: nn.Module) -> None:
    """Give the processes that hold parts of a model's `layers` (tensor parallelism) the same
    weights of a module that each has whole and drew by itself."""
    part = next((each for each in layers.parameters() if isinstance(each, DTensor)), None)
    if part is None:
        return
    mesh = part.device_mesh
    for dimension in range(mesh.ndim):
        for parameter in module.parameters():
            distributed.broadcast(parameter.data, group=mesh.get_group(dimension), group_src=0)


class WithGradient(torch.autograd.Function):
    """An output as it is, of which parameters have at least a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.parameters)


def with_gradient(output: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """`output`, from which each parameter of a module gets a gradient if several processes
    train."""
    if not (torch.is_grad_enabled() and several_processes()):
        return output
    learning = [each for each in module.parameters() if each.requires_grad]
    learned: torch.Tensor = WithGradient.apply(output, *learning) if learning else output
    return learned


def sharded(modules: Iterable[nn.Module]) -> list[Any]:
    """Those that FSDP2 has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it is not loaded, nothing is
    return [] if fsdp is None else [each for each in modules if isinstance(each, fsdp.FSDPModule)]


# The hold that the first of some layers is in; an older one of theirs ends nothing any more.
_holds: WeakKeyDictionary[nn.Module, ReferenceType[Hold]] = WeakKeyDictionary()


class Hold:
    """Sharded layers that are kept whole once they are gathered, until `end`, or until nothing
    refers to this any more, as where the graph of a forward is let go of without a backward
    pass."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.let_go()  # of what an earlier forward left whole, which may be older than the weights
        self.begin()

    def begin(self) -> None:
        _holds[self.layers[0]] = ref(self)
        for layer in self.layers:
            layer.set_reshard_after_forward(False)
            layer.set_reshard_after_backward(False)
        # What FSDP would prefetch by the order of calls differs between processes that make other
        # numbers of them.
        self.layers[0].set_modules_to_backward_prefetch(self.layers[:1])
        for earlier, layer in pairwise(self.layers):
            layer.set_modules_to_backward_prefetch([earlier])

    def end(self) -> None:
        """Let go of the layers, unless a later hold has them."""
        held = _holds.get(self.layers[0])
        if held is None or held() in (None, self):
            self.let_go()

    def let_go(self) -> None:
        """From now on the layers are as FSDP makes them."""
        for layer in self.layers:
            layer.set_reshard_after_forward(True)
            layer.set_reshard_after_backward(True)
            layer.reshard()

    def __del__(self) -> None:
        self.end()


class UntilBackward(torch.autograd.Function):
    """An output as it is, whose graph holds layers until a backward pass through it has ended."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, hold: Hold) -> torch.Tensor:
        ctx.hold = hold
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.hold.begin()
        torch.autograd.Variable._execution_engine.queue_callback(ctx.hold.end)
        return gradient, None


@contextmanager
def kept_whole(modules: Iterable[nn.Module]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Within it the modules are gathered once; and until the backward pass is through of what is
    made of the tensor that it is given, if that has a graph."""
    layers = sharded(modules)
    if not layers:
        yield lambda output: output
        return
    hold = Hold(layers)
    waits = False

    def until_backward(output: torch.Tensor) -> torch.Tensor:
        nonlocal waits
        waits = output.requires_grad
        return UntilBackward.apply(output, hold) if waits else output

    try:
        yield until_backward
    finally:
        if not waits:
            hold.end()
