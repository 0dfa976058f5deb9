"""Looping layers of a pretrained model: which ones, how the prompt's embedding enters, and what the
loop adds."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import nn

from undertow.depth.loop import Iterations
from undertow.errors import ConfigError, nearest
from undertow.settings import alternative, settings

Injection = Literal["adapter", "none"]

# Layer picks of arXiv 2511.07384, 0-based: (prelude, core, coda) as (first, last) of each. What
# lies between is dropped.
PRESETS = {
    "tinyllama-1.1b": ((0, 3), (10, 17), (18, 21)),
    "llama-3.2-1b": ((0, 3), (6, 11), (12, 15)),
    "llama-3.2-1b-2-4-2": ((0, 1), (10, 13), (14, 15)),
    "olmo-2-1b": ((0, 3), (6, 11), (12, 15)),
}


@settings
class Looped:
    """Some of a model's layers run several times for each token: what `undertow.attach` takes for
    recurrence in depth.

    e = prelude(x);  s_i = core(inject(s_{i-1}, e)), i = 1..r;  coda(s_r). Layers in none of the
    three are left out.
    """

    kind: ClassVar[str] = "looped"
    alternatives: ClassVar[tuple[str, ...]] = ("preset", "whole")

    prelude: tuple[int, ...]
    """Layers that run once before the loop, 0-based."""
    core: tuple[int, ...]
    """Layers that are looped."""
    coda: tuple[int, ...]
    """Layers that run once after the loop."""
    injection: Injection = "adapter"
    """adapter: a linear map of cat(state, e) enters the core; it passes e through at the start, and
    the first state is noise. none: the state alone enters, and the first is e."""
    norm: bool = False
    """Apply the model's final norm to the state between iterations, as LoopLM does; only without a
    coda."""
    gate: bool = False
    """A learned exit gate on the state, as LoopLM's."""
    depth: Iterations = 4
    """Iterations where a forward is not told otherwise; in training, the mean."""
    backward: Iterations = 8
    """Iterations that carry gradient, the last ones."""
    state_std: NonNegativeFloat | None = None
    """Standard deviation of the first state's noise; √(2/5h) for hidden size h if left out."""
    state_seed: int = 0
    """Seed of that noise."""

    def __post_init__(self) -> None:
        if not self.core:
            raise ConfigError("core is empty; pick at least one layer to loop")
        picked = [*self.prelude, *self.core, *self.coda]
        if len(set(picked)) < len(picked):
            twice = next(layer for layer in picked if picked.count(layer) > 1)
            raise ConfigError(
                f"layer {twice} is picked twice; prelude, core and coda must not overlap"
            )
        if picked != sorted(picked):
            raise ConfigError(
                f"the layers {picked} go up and down; prelude, core and coda must rise in this "
                "order"
            )
        if picked[0] < 0:
            raise ConfigError(f"layer {picked[0]} is picked; layers count from 0")
        if self.norm and self.coda:
            raise ConfigError(
                "norm is on, but the loop's last state goes into a coda and not to the final norm; "
                "empty coda"
            )

    @classmethod
    @alternative
    def preset(cls, name: str, **settings: Any) -> Looped:
        """The layer picks of the retrofit paper: tinyllama-1.1b, llama-3.2-1b, llama-3.2-1b-2-4-2
        or olmo-2-1b."""
        if name not in PRESETS:
            raise ConfigError(
                f"there is no preset {name!r}{nearest(name, PRESETS)}; there are "
                f"{', '.join(PRESETS)}"
            )
        prelude, core, coda = (tuple(range(first, last + 1)) for first, last in PRESETS[name])
        return cls(prelude, core, coda, **settings)

    @classmethod
    @alternative
    def whole(
        cls, layers: PositiveInt, depth: int = 4, gate: bool = True, **settings: Any
    ) -> Looped:
        """LoopLM (arXiv 2510.25741): the whole stack of `layers` loops, normed after each time,
        with an exit gate."""
        given = {"injection": "none", "norm": True, **settings}
        return cls((), tuple(range(layers)), (), depth=depth, gate=gate, **given)

    @property
    def picked(self) -> tuple[int, ...]:
        return (*self.prelude, *self.core, *self.coda)

    def first_std(self, width: int) -> float:
        """Standard deviation of the first states' noise in a model of hidden size `width`."""
        return math.sqrt(2 / (5 * width)) if self.state_std is None else self.state_std

    def check_layers(self, layers: int) -> None:
        """Refuse picks beyond a model's last layer."""
        if self.picked[-1] >= layers:
            raise ConfigError(
                f"layer {self.picked[-1]} is picked, but the model's layers are 0 to {layers - 1}; "
                "pick among these"
            )

    def build(self, width: int) -> Loop:
        """What the loop adds to a model of hidden size `width`."""
        return Loop(self, width)


class Loop(nn.Module):
    """The parameters of a loop over a model's layers: the adapter, 2 h², and the gate, h + 1, where
    there are any."""

    def __init__(self, settings: Looped, width: int) -> None:
        super().__init__()
        self.settings = settings
        self.adapter = (
            nn.Linear(2 * width, width, bias=False) if settings.injection == "adapter" else None
        )
        self.gate = nn.Linear(width, 1) if settings.gate else None
        with torch.no_grad():
            if self.adapter is not None:
                self.adapter.weight.copy_(
                    torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1)
                )
            if self.gate is not None:
                nn.init.zeros_(self.gate.weight)
                nn.init.zeros_(self.gate.bias)

    def inject(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """What enters the core ``[B, T, D]``."""
        return (
            state if self.adapter is None else self.adapter(torch.cat([state, embedding], dim=-1))
        )

    def exit_probability(self, state: torch.Tensor) -> torch.Tensor:
        """λ ``[B, T]`` of the (normed) state: the probability of stopping here, having come so
        far."""
        if self.gate is None:
            raise ConfigError("the model has no exit gate; attach Looped(..., gate=True)")
        return torch.sigmoid(self.gate(state)[..., 0].float())
