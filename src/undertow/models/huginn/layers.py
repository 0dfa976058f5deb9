"""Huginn's layers in one forward, bound to their inputs, and what a forward returns."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from undertow.models.huginn.blocks import Context, SandwichBlock
from undertow.models.huginn.lean import LeanBlock, bind


@dataclass
class HuginnOutput(CausalLMOutputWithPast):
    """What a forward returns: loss, logits ``[B, T, V]`` in fp32, the cache under the library's
    name for it, and

    Attributes:
        states: each token's last state ``[B, T, D]``, before the final norm.
        depths: the iterations that each token ran ``[B, T]``; 0 for padding where an exit rule
            chose.
    """

    states: torch.Tensor | None = None
    depths: torch.Tensor | None = None


class HuginnLayers:
    """Prelude, core and coda (see `LoopedLayers`) of one forward."""

    def __init__(self, parts: nn.ModuleDict, context: Context, checkpointing: bool) -> None:
        """`parts` is the model's ``transformer``."""
        self.parts = parts
        self.context = context
        self.checkpointing = checkpointing
        self.bound: dict[tuple[str, bool], list[SandwichBlock | LeanBlock]] = {}

    def prelude(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.run("prelude", hidden)

    def iterate(self, state: torch.Tensor, embedding: torch.Tensor, index: int) -> torch.Tensor:
        """The adapter on cat(state, e), then the core."""
        hidden = self.parts["adapter"](torch.cat([state, embedding], dim=-1))
        return self.run("core_block", hidden)

    def coda(self, state: torch.Tensor) -> torch.Tensor:
        """The final norm, and the coda; the head norms once more."""
        return self.run("coda", self.parts["ln_f"](state))

    def of_rows(self, rows: torch.Tensor) -> HuginnLayers:
        part = copy.copy(self)
        part.context = self.context.rows(rows)
        return part

    def run(self, part: str, hidden: torch.Tensor) -> torch.Tensor:
        """All blocks of the prelude, the core or the coda."""
        # Truncated backpropagation changes between iterations without gradient and with it.
        key = part, torch.is_grad_enabled()
        if key not in self.bound:
            blocks: Any = self.parts[part]
            self.bound[key] = [bind(block, hidden) for block in blocks]
        for block in self.bound[key]:
            hidden = block(hidden, self.context)
        return hidden


def kept(logits_to_keep: int | torch.Tensor) -> slice | torch.Tensor:
    """The tokens whose logits are wanted: the last so many, all for 0, or those with these
    indices."""
    if isinstance(logits_to_keep, int):
        return slice(-logits_to_keep, None) if logits_to_keep else slice(None)
    return logits_to_keep
