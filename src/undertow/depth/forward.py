"""One forward in depth, of looped host models and of native ones alike.

    e = prelude(x);  s_i = core(inject(s_{i-1}, e)), i = 1..r;  coda(s_r)

Written once here: what its arguments ask for, the cache's entries and its ledger, where the states
start, padding, the loop at a fixed depth or with exits. The layers are the model's own
(`LoopedLayers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers.cache_utils import Cache

from undertow.depth.adaptive import ExitLoop, LoopedLayers
from undertow.depth.arguments import LoopArguments
from undertow.depth.cache import (
    CacheOwner,
    DepthCache,
    begin_forward,
    computing_type,
    finish_forward,
)
from undertow.depth.cache_layers import Cursor, Ledger
from undertow.depth.handle import DepthHandle
from undertow.depth.initial import initial_state
from undertow.depth.loop import iterate, steps_from
from undertow.errors import ConfigError, DataError
from undertow.finite import check_finite


@dataclass(frozen=True)
class DepthReport:
    """How deep the tokens of a forward went: iterations ``[B, T]``, 0 for padding where an exit
    rule chose."""

    depths: torch.Tensor

    @property
    def mean(self) -> float:
        """Average over the tokens that ran."""
        ran = self.depths[self.depths > 0]
        return float(ran.float().mean()) if len(ran) else 0.0


class DepthForward:
    """One forward of a batch.

    Attributes:
        steps: the iterations, without and with gradient.
        cache: the cache that it uses; one of its own where an exit rule needs one.
        ledger: the cache's, if there is a cache.
        cursor: where its layers write.
        past: the tokens that the cache held before.
        states, depths: each token's last state ``[B, T, D]`` and iterations ``[B, T]``, once it has
            run.
        logits: the logits ``[B, T, V]`` that an exit rule looked at, if any did.
    """

    def __init__(
        self,
        handle: DepthHandle,
        asked: LoopArguments,
        hidden: torch.Tensor,
        cache: Cache | None,
        learning: bool,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> None:
        """
        Args:
            hidden: what enters the first layer ``[B, T, D]``, or is like it.
            learning: whether this forward carries gradient.
            mask: 0 at padding ``[B or 1, cached + T]``; None where all tokens are real.
            position_ids: absolute positions ``[B or 1, T]``; counted from the mask if left out.

        Raises:
            ConfigError: the depth is below 1, or what is asked for cannot be done here.
            DataError: the cache is another loop's, or was left half-way.
        """
        self.handle = handle
        self.asked = asked
        self.settings = handle.settings
        self.steps = steps_from(asked.depth, self.settings.depth, self.settings.backward)
        if cache is None and asked.exit_rule is not None:
            cache = DepthCache(tokens=hidden.shape[1])
        self.cache = cache
        self.ledger: Ledger | None = None
        self.cursor = Cursor()
        self.check(learning)
        self.batch, self.tokens = hidden.shape[:2]
        if cache is not None:
            owner = CacheOwner(handle.owner, computing_type(hidden))
            self.ledger = begin_forward(cache, handle.layers, self.batch, self.steps.total, owner)
            self.cursor = self.ledger.cursor
        self.past = self.cursor.start
        self.mask = mask
        self.position_ids = position_ids
        self.device = hidden.device
        self.states = hidden.new_zeros(self.batch, self.tokens, 1)
        self.depths = torch.full((self.batch, self.tokens), self.steps.total, device=hidden.device)
        self.logits: torch.Tensor | None = None

    def check(self, learning: bool) -> None:
        """Refuse what is asked for where it cannot be done."""
        rule, resume = self.asked.exit_rule, self.asked.resume
        if rule is not None and learning:
            raise ConfigError(
                "an exit rule works without gradients only; call the model under torch.no_grad()"
            )
        if rule is not None and rule.needs_gate and not self.settings.gate:
            raise ConfigError(
                f"the exit rule {rule.kind} needs an exit gate, and this model has none; use "
                "another rule, or attach Looped(..., gate=True)"
            )
        if rule is not None and resume:
            raise ConfigError(
                "an exit rule cannot resume from an earlier iteration; leave out one of exit_rule "
                "and resume"
            )
        if resume and not resume < self.steps.total:
            raise ConfigError(
                f"resume is {resume} and depth {self.steps.total}; resume from an iteration before "
                "the last"
            )
        if resume and self.cache is None:
            raise ConfigError("resume goes on from the states in a cache; give the cache")
        if self.asked.warm_start and self.settings.injection == "none":
            raise ConfigError(
                "warm_start would lose the token: with injection='none' it enters as the first "
                "state alone; leave it out"
            )

    @cached_property
    def real(self) -> torch.Tensor | None:
        """Which of the tokens are no padding ``[B, T]``; None where all are."""
        if self.mask is None:
            return None
        return self.mask[:, self.past : self.past + self.tokens].bool().expand(self.batch, -1)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position of each token in its row ``[B or 1, T]``."""
        stop = self.past + self.tokens
        if self.position_ids is not None:
            return self.position_ids.to(self.device)
        if self.mask is None:
            return torch.arange(self.past, stop, device=self.device)[None]
        places = (self.mask.long().cumsum(-1) - 1).clamp(min=0)
        return places[:, self.past : stop].to(self.device)

    def run(self, layers: LoopedLayers, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer's output ``[B, T, D]`` of each token at its depth."""
        embedding = layers.prelude(hidden)
        rule = self.asked.exit_rule
        if rule is None:
            self.states = self.loop(layers, embedding)
            return layers.coda(self.states)
        exits = ExitLoop(self.handle, rule, self.steps.total, self.cursor)
        positions = self.positions.expand(self.batch, -1)
        state = self.first_state(embedding, positions)
        try:
            found = exits.run(layers, state, embedding, positions, self.real)
        finally:
            self.cursor.leave_loop()
        self.states, self.depths = found.states, found.depths
        if not found.readout:
            return layers.coda(found.states)
        output, self.logits = found.readout
        return output

    def loop(self, layers: LoopedLayers, embedding: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The last states ``[B, n, D]`` of tokens from `start` on, whose embedding is ``[B, n,
        D]``, at the fixed depth."""

        def iteration(state: torch.Tensor, index: int) -> torch.Tensor:
            self.cursor.enter(index)
            try:
                return layers.iterate(state, embedding, index)
            finally:  # also where it is computed again, amid layers that are not looped
                self.cursor.leave_loop()

        positions = self.positions[:, start : start + embedding.shape[1]]
        state = self.first_state(embedding, positions.expand(self.batch, -1))
        asked = self.asked
        return iterate(
            iteration, state, self.steps, asked.resume, layers.checkpointing, asked.watch
        )

    def first_state(self, embedding: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens at these `positions` ``[B, n]`` start, ``[B, n, D]``."""
        asked = self.asked
        ledger = self.ledger
        past = self.past
        if asked.resume and ledger is not None:
            return ledger.states(past, past + self.tokens).clone()
        if asked.initial is not None:
            if asked.initial.shape != embedding.shape:
                raise DataError(
                    f"initial has shape {list(asked.initial.shape)}; the states have "
                    f"{list(embedding.shape)}"
                )
            return asked.initial.to(embedding.dtype)
        if self.settings.injection == "none":
            return embedding
        width = embedding.shape[2]
        seed = self.settings.state_seed if asked.state_seed is None else asked.state_seed
        state = initial_state(positions, width, self.settings.first_std(width), seed)
        state = state.to(embedding.dtype)
        if asked.warm_start and ledger is not None and past:
            state = torch.cat([ledger.states(past - 1, past), state[:, 1:]], dim=1)
        return state

    def finish(self) -> None:
        """Refuse states that are no numbers, and close the cache's entries.

        Raises:
            DivergedError: a state is not finite.
        """
        norm = "" if self.settings.coda or self.settings.norm else "attach Looped(..., norm=True), "
        remedy = f"give a smaller depth, {norm}or lower the learning rate"
        check_finite(self.states, self.real, self.past, remedy)
        self.close()

    def close(self) -> None:
        """Close the cache's entries, and enter the tokens into its ledger."""
        if self.cache is not None and self.ledger is not None:
            finish_forward(self.cache, self.ledger, self.states, self.depths)
