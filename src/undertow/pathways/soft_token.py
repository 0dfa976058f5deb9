"""Soft-token feedback: the expected embedding of a token mixed into its input (TurboConn's
baseline, arXiv 2602.17993)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from undertow.errors import ConfigError
from undertow.pathways.base import Decode, Pathway, Recurrence
from undertow.registry import register


@register
class SoftToken(Recurrence):
    """Mix what the last token predicted, as an expected embedding, into the embedding of this one.
    No parameters."""

    kind: ClassVar[str] = "soft-token"

    weight: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the expected embedding in the input, between 0 and 1: the paper's lambda. With 0 the
    model is the base."""

    def build(self, layers: int, width: int, decode: Decode | None = None) -> SoftTokenPathway:
        if decode is None:
            raise ConfigError(
                "soft-token feedback needs the model's vocabulary; attach it to a causal language "
                "model"
            )
        return SoftTokenPathway(self, layers, width, decode)


class SoftTokenPathway(Pathway):
    """Writes ``(1 - λ) e + λ R`` at site 0, where R is ``softmax(head(norm(h))) E`` of the last
    token."""

    lag = 1
    remedy = (
        "its states are bounded, so the layers overflow: lower the learning rate, or use fp32 or "
        "bf16 in place of fp16"
    )
    reads_residual = False  # the head would decode embeddings

    def __init__(self, settings: SoftToken, layers: int, width: int, decode: Decode) -> None:
        super().__init__()
        self.weight = settings.weight
        self.state_width = width
        self.writes = frozenset({0})
        self.reads = frozenset({layers})
        self.decode = decode

    def write(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.weight * (state - hidden)

    def read(self, site: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.decode(hidden)

    def update(self, readings: list[torch.Tensor], state: torch.Tensor | None) -> torch.Tensor:
        return readings[0]

    def scan(
        self,
        readings: list[torch.Tensor],
        initial: torch.Tensor | None,
        present: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.update(readings, None)  # it does not look at the state
