"""T²MLR: a middle layer's state of the last token, gated into an earlier layer of this one (arXiv
2607.15178)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional as F

from undertow.errors import ConfigError
from undertow.pathways.base import Decode, Pathway, Recurrence, check_layer
from undertow.pathways.scan import NormScan
from undertow.registry import register
from undertow.settings import alternative

GAMMAS = ("gamma_recurrent", "gamma_current")
EPSILON = 1e-6
CLAMP = 5.0


@register
class T2MLR(Recurrence):
    """One recurrent vector, taken after `last_layer` and fused through gates into the input of
    `first_layer`."""

    kind: ClassVar[str] = "t2mlr"
    alternatives: ClassVar[tuple[str, ...]] = ("from_paper",)

    first_layer: int
    """The layer whose input the state enters, 0-based."""
    last_layer: int
    """The layer whose output the state is taken from, 0-based and inclusive."""
    norm: Literal["rms", "clamped"] = "rms"
    """rms: the paper's RMSNorm. clamped: the released code's, which scales by 1/rms kept within 1/5
    and 5 and treats the scale as a constant in the backward pass."""
    detach_residual: bool = False
    """Cut the gradient of the temporal residual, as the released fine-tuning scripts do."""
    gate_gain: float = 0.01
    """Gain of the gates' Xavier initialisation: 0.01 in the released fine-tuning code, 1 in its
    pretraining code."""

    def __post_init__(self) -> None:
        if self.first_layer > self.last_layer:
            raise ConfigError(
                f"T2MLR's first_layer {self.first_layer} lies above its last_layer "
                f"{self.last_layer}: the state would go up; the first must be the lower one"
            )

    @classmethod
    @alternative
    def from_paper(cls, l_start: int, l_end: int, **settings: Any) -> T2MLR:
        """T²MLR(l_start, l_end) in the paper's numbering: 1-based, inclusive."""
        return cls(l_start - 1, l_end - 1, **settings)

    def build(self, layers: int, width: int, decode: Decode | None = None) -> T2MLRPathway:
        check_layer("T2MLR's first_layer", self.first_layer, layers)
        check_layer("T2MLR's last_layer", self.last_layer, layers)
        return T2MLRPathway(self, width)


class T2MLRPathway(Pathway):
    """The gated fusion and the state update of T²MLR; 5 d² + 2 d + 2 parameters.

    With ``p = W_rec R``, the write adds ``tanh(γ_rec) σ(f_rec[h;p]) ⊙ p + tanh(γ_cur) σ(f_cur[h;p])
    ⊙ h``. Both γ start at zero, so that the model starts as the base model.
    """

    writes_without_state = True
    remedy = (
        "its states are bounded, so the layers overflow: lower the learning rate, or use fp32 or "
        "bf16 in place of fp16"
    )
    fp32_parameters = GAMMAS  # a γ moves by less than half precision resolves
    lag = 1

    def __init__(self, settings: T2MLR, width: int) -> None:
        super().__init__()
        self.state_width = width
        self.writes = frozenset({settings.first_layer})
        self.reads = frozenset({settings.last_layer + 1})
        self.norm, self.detach_residual = settings.norm, settings.detach_residual
        self.project = nn.Linear(width, width, bias=False)  # W_rec
        self.gates = nn.Linear(
            2 * width, 2 * width
        )  # f_rec in the first half of the rows, f_cur in the second
        for gate in self.gates.weight.chunk(2):
            nn.init.xavier_normal_(gate.data, gain=settings.gate_gain)
        nn.init.zeros_(self.gates.bias)
        # Vectors of one entry, as FSDP shards no scalars.
        self.gamma_recurrent = nn.Parameter(torch.zeros(1, dtype=torch.float32))
        self.gamma_current = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in GAMMAS:  # weights may be from when they were scalars
            if (value := state_dict.get(prefix + name)) is not None:
                state_dict[prefix + name] = value.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def reshape(self, older: bool) -> None:
        for gamma in self.fast_parameters():
            gamma.data = gamma.data.reshape(() if older else (1,))

    def gate_values(self) -> dict[str, torch.Tensor]:
        values = zip(("recurrent", "current"), self.fast_parameters(), strict=True)
        return {name: torch.tanh(gamma.detach().double()) for name, gamma in values}

    @torch.no_grad()
    def open(self) -> None:
        self.gamma_recurrent.fill_(0.15)
        self.gamma_current.fill_(-0.15)

    def write(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        projected, recurrent, current = self.gated(hidden, state)
        return recurrent * projected + current * hidden

    def written(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        projected, recurrent, current = self.gated(hidden, state)
        return torch.addcmul(torch.addcmul(hidden, recurrent, projected), current, hidden)

    def gated(
        self, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The projected state, its gate and that of `hidden`, ``[B, n, D]`` each."""
        projected = self.project(state)
        both = torch.cat([hidden, projected], dim=-1)
        recurrent, current = torch.sigmoid(self.gates(both)).chunk(2, dim=-1)
        gamma_recurrent = torch.tanh(self.gamma_recurrent).to(hidden.dtype)
        gamma_current = torch.tanh(self.gamma_current).to(hidden.dtype)
        return projected, gamma_recurrent * recurrent, gamma_current * current

    def read(self, site: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def guess(self, readings: list[torch.Tensor]) -> torch.Tensor:
        return readings[0]

    def scan(
        self,
        readings: list[torch.Tensor],
        initial: torch.Tensor | None,
        present: torch.Tensor | None,
    ) -> torch.Tensor:
        clamp = None if self.norm == "rms" else CLAMP
        first = None if initial is None else initial[:, 0]
        states: torch.Tensor = NormScan.apply(
            readings[0], first, present, clamp, self.detach_residual, EPSILON
        )
        return states

    def update(self, readings: list[torch.Tensor], state: torch.Tensor | None) -> torch.Tensor:
        (total,) = readings
        if state is not None:
            total = total + (state.detach() if self.detach_residual else state)
        if self.norm == "rms":
            return F.rms_norm(total, total.shape[-1:], eps=EPSILON)
        exact = total.detach().to(torch.promote_types(total.dtype, torch.float32))
        scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + EPSILON).clamp(1 / CLAMP, CLAMP)
        return total * scale.to(total.dtype)
