"""One forward of a Huginn model: its layers bound to their inputs, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from undertow.depth.cache import Cursor
from undertow.depth.exits import ExitRule
from undertow.errors import ConfigError
from undertow.models.huginn.blocks import Context, SandwichBlock
from undertow.models.huginn.lean import LeanBlock, bind

if TYPE_CHECKING:
    from undertow.models.huginn.model import HuginnForCausalLM


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


class HuginnPass:
    """One forward of the layers with everything but the state bound: what the loop and its exits
    call.

    Attributes:
        embedding: the prelude's output e ``[b, T, D]``.
        positions: absolute positions ``[b, T]``.
    """

    has_gate = False

    def __init__(
        self,
        model: HuginnForCausalLM,
        embedding: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        cursor: Cursor | None,
    ) -> None:
        """`embedding` ``[B, T, D]`` is the scaled token embedding; the prelude runs here."""
        self.model, self.positions, self.context, self.cursor = model, positions, context, cursor
        self.bound: dict[tuple[str, bool], list[SandwichBlock | LeanBlock]] = {}
        self.embedding = self.run("prelude", embedding)
        self.whole = self.embedding, positions, context

    def keep(self, rows: torch.Tensor) -> None:
        """See `AdaptivePass`."""
        embedding, positions, context = self.whole
        self.embedding, self.positions, self.context = (
            embedding[rows],
            positions[rows],
            context.rows(rows),
        )
        if self.cursor is not None:
            self.cursor.rows = rows

    def keep_all(self) -> None:
        """Out of the loop: all rows again."""
        self.embedding, self.positions, self.context = self.whole
        if self.cursor is not None:
            self.cursor.leave_loop()

    def iterate(
        self, state: torch.Tensor, index: int, moving: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One iteration: the adapter on cat(state, e), then the core."""
        if self.cursor is not None:
            self.cursor.iteration, self.cursor.moving, self.cursor.first = index, moving, False
        hidden = self.model.transformer["adapter"](torch.cat([state, self.embedding], dim=-1))
        return self.run("core_block", hidden)

    def logits(
        self, state: torch.Tensor, index: int, moving: torch.Tensor | None, first: bool
    ) -> torch.Tensor:
        """See `AdaptivePass`."""
        assert self.cursor is not None
        self.cursor.iteration, self.cursor.moving, self.cursor.first = index, moving, first
        return self.model.head(self.finish(state))

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        """The final norm, the coda and the final norm again."""
        norm = self.model.transformer["ln_f"]
        return norm(self.run("coda", norm(state)))

    def run(self, part: str, hidden: torch.Tensor) -> torch.Tensor:
        """All blocks of the prelude, the core or the coda."""
        # Truncated backpropagation changes between iterations without gradient and with it.
        key = part, torch.is_grad_enabled()
        if key not in self.bound:
            self.bound[key] = [bind(block, hidden) for block in self.model.blocks(part)]
        for block in self.bound[key]:
            hidden = block(hidden, self.context)
        return hidden

    def gate(self, state: torch.Tensor) -> torch.Tensor:
        raise ConfigError(
            "Huginn has no exit gate; use a rule that looks at the state or the logits"
        )


def check_exit(rule: ExitRule, embedding: torch.Tensor, resume: int) -> None:
    """Refuse an exit rule that cannot work here."""
    if resume:
        raise ConfigError(
            "an exit rule cannot resume from an earlier iteration; leave out one of exit_rule and "
            "resume"
        )
    if torch.is_grad_enabled() and embedding.requires_grad:
        raise ConfigError(
            "an exit rule works without gradients only; call the model under torch.no_grad()"
        )
    if rule.needs_gate:
        raise ConfigError(
            f"the exit rule {rule.kind} needs a model with an exit gate, which this one has not"
        )


def kept(logits_to_keep: int | torch.Tensor) -> slice | torch.Tensor:
    """The tokens whose logits are wanted: the last so many, all for 0, or those with these
    indices."""
    if isinstance(logits_to_keep, int):
        return slice(-logits_to_keep, None) if logits_to_keep else slice(None)
    return logits_to_keep
