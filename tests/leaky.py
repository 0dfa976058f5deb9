"""A pathway of one's own: a memory that decays, by no more than the contract asks for."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from helpers import hosted
from torch import nn

from undertow.pathways import Pathway, Recurrence
from undertow.pathways.base import Decode


class LeakyPathway(Pathway):
    """A low-rank memory that decays, with a rate that is learned, and no scan of its own."""

    def __init__(self, lag: int, width: int) -> None:
        super().__init__()
        self.lag, self.state_width = lag, 6
        self.reads, self.writes = frozenset({3}), frozenset({1})
        self.down, self.up = nn.Linear(width, 6), nn.Linear(6, width)
        self.rate = nn.Parameter(torch.full((6,), 0.7))

    def read(self, site: int, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(hidden))

    def write(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.up(state)

    def update(self, readings: list[torch.Tensor], state: torch.Tensor | None) -> torch.Tensor:
        return readings[0] if state is None else readings[0] + self.rate * state


@dataclass(frozen=True)
class Leaky(Recurrence):
    kind: ClassVar[str] = "leaky"
    lag: int = 1
    pathway: Any = LeakyPathway

    def build(self, layers: int, width: int, decode: Decode | None = None) -> Pathway:
        return self.pathway(self.lag, width)


def leaky(lag: int = 1) -> Any:
    model = hosted("llama", Leaky(lag))
    with torch.no_grad():
        model.model.recurrence.pathway.rate.fill_(0.7)
    return model
