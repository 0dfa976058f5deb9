"""The gradients of linear maps' weights, collected over the groups of a rollout.

Each group would give each weight a gradient as large as the weight, made of a few tokens, and most
of the time would go into adding them up. Instead the maps' inputs, and the gradients of their
outputs, are kept until there are enough rows for a matrix product at full speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Linear maps with their numbers, by the layer that they are part of.
Linears = dict[int, list[tuple[int, nn.Linear]]]


@dataclass
class Collected:
    """The linear maps of a group that runs, and what they are given.

    Attributes:
        linears, slots: the maps, and for the output of each, by its number, a slot ``[B, n, out]``.
        layer: the layer that runs, or PATHWAY where none does.
        inputs: what each map was given, ``[B, n, in]``, by its number.
    """

    PATHWAY: ClassVar[int] = -1

    linears: Linears
    slots: list[torch.Tensor]
    layer: int = PATHWAY
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)


class WithoutWeights(TorchFunctionMode):
    """Gives linear maps a weight without gradient, and adds to what they make a slot of zeros,
    whose gradient is that of the map's output."""

    def __init__(self, collected: Collected) -> None:
        super().__init__()
        self.collected = collected

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        kwargs, collected = kwargs or {}, self.collected
        if func is F.linear and len(args) > 1:
            for number, linear in collected.linears.get(collected.layer, []):
                if args[1] is linear.weight and number not in collected.inputs:
                    slot = collected.slots[number]
                    if args[0].shape[:-1] == slot.shape[:-1]:
                        collected.inputs[number] = args[0].detach()
                        return slot + F.linear(args[0], args[1].detach(), *args[2:], **kwargs)
        made: torch.Tensor = func(*args, **kwargs)
        return made


class Weights(torch.autograd.Function):
    """A token on which every group hangs, so that its backward pass, which gives the weights their
    gradients, runs after theirs."""

    @staticmethod
    def forward(ctx: Any, collected: WeightGradients, *weights: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.collected = collected
        return weights[0].new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.collected.taken()


class WeightGradients:
    """The gradients of linear maps' weights in one backward pass, from one group after another."""

    # Rows to collect before they are multiplied: enough for a product's full speed, and few enough
    # to be small beside what a training keeps.
    ROWS = 1024

    def __init__(self, pathway: nn.Module, layers: dict[int, nn.Module]) -> None:
        self.linears: list[nn.Linear] = []
        self.by_layer: Linears = {}
        known: set[int] = set()
        for index, module in {Collected.PATHWAY: pathway, **layers}.items():
            for each in module.modules():
                if collects(each) and id(each.weight) not in known:
                    known.add(id(each.weight))
                    self.by_layer.setdefault(index, []).append((len(self.linears), each))
                    self.linears.append(each)
        weights = [each.weight for each in self.linears]
        self.token: torch.Tensor = Weights.apply(self, *weights) if weights else torch.zeros(())
        self.begin(-1)

    def begin(self, backward_pass: int) -> None:
        """Start from nothing, whatever an earlier backward pass left."""
        self.backward_pass, self.rows = backward_pass, 0
        self.sums: list[torch.Tensor | None] = [None] * len(self.linears)
        self.pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.linears]

    def add(
        self, inputs: dict[int, torch.Tensor], gradients: tuple[torch.Tensor | None, ...], rows: int
    ) -> None:
        """One group's inputs ``[B, n, in]`` and the gradients of outputs ``[B, n, out]``."""
        current = torch._C._current_graph_task_id()
        if current != self.backward_pass:
            self.begin(current)
        for number, given in inputs.items():
            gradient = gradients[number]
            if gradient is not None:
                self.pairs[number].append((given, gradient))
        self.rows += rows
        if self.rows >= self.ROWS:
            self.multiply()

    def multiply(self) -> None:
        """Add the products of what was collected to the sums."""
        for number, pairs in enumerate(self.pairs):
            if not pairs:
                continue
            gradient = torch.cat([each.flatten(0, -2) for _, each in pairs])
            given = torch.cat([each.flatten(0, -2) for each, _ in pairs]).to(gradient.dtype)
            product = (gradient.t() @ given).to(self.linears[number].weight.dtype)
            total = self.sums[number]
            self.sums[number] = product if total is None else total.add_(product)
            pairs.clear()
        self.rows = 0

    def taken(self) -> list[torch.Tensor | None]:
        """The gradients ``[out, in]``, which are let go of."""
        if torch._C._current_graph_task_id() != self.backward_pass:
            return [None] * len(self.linears)
        self.multiply()
        sums = self.sums
        self.begin(-1)
        return sums


def collects(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is a linear map that learns, and no kind of its own."""
    return type(module) is nn.Linear and module.weight.requires_grad
