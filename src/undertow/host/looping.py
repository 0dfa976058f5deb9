"""The loop of a hosted forward: some of the recorded layers run several times for each token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache

from undertow.depth.adaptive import iterate_until_done
from undertow.depth.cache import DepthCache, Ledger, begin, computing_type, finish
from undertow.depth.exits import ExitRule
from undertow.depth.initial import initial_state
from undertow.depth.loop import iterate, steps_from
from undertow.errors import ConfigError, DataError
from undertow.finite import check_finite
from undertow.host.arguments import Call, pick_rows, replace
from undertow.host.attachment import Attachment, DepthReport
from undertow.host.checkpointing import checkpoints, without_checkpointing
from undertow.host.rollout_cache import RolloutCache
from undertow.host.stack import Recording
from undertow.host.vocabulary import final_norm

# What a looped model's forward and `generate` take besides their own arguments; `HostedLoop` says
# what they mean.
LOOP_ARGUMENTS = ("depth", "exit_rule", "warm_start", "resume", "state_seed", "watch")
REMEDY = (
    "give a smaller depth, attach Looped(..., norm=True) where there is no coda, or lower the "
    "learning rate"
)
# Layer number, its input ``[B, n, D]`` to its output.
RunLayer = Callable[[int, torch.Tensor], torch.Tensor]


class HostedLoop:
    """The loop of one forward.

    The forward's arguments, besides the model's own: `depth` (iterations, of which the last
    `backward` carry gradient, or a pair: without and with gradient), `exit_rule` (lets each token
    stop sooner), `warm_start` (a continued row's first new token starts from the last token's
    state), `resume` (the new tokens have run so many iterations on this cache before it was
    cropped), `state_seed` (of the first states, one or one a row), `watch` (called after each
    iteration with its number and the states before and after).

    Raises:
        ConfigError: the depth is below 1, or arguments that cannot go together are given.
    """

    def __init__(
        self,
        attachment: Attachment,
        recording: Recording,
        inputs: dict[str, Any],
        cache: Cache | None,
        alone: bool,
    ) -> None:
        """`alone` says that there is no recurrence in time besides."""
        assert attachment.looped is not None and attachment.loop is not None
        self.attachment, self.recording, self.inputs = attachment, recording, inputs
        self.settings, self.loop = attachment.looped, attachment.loop
        self.core = range(self.settings.core[0], self.settings.core[-1] + 1)
        self.steps = steps_from(inputs.get("depth"), self.settings.depth, self.settings.backward)
        self.rule: ExitRule | None = inputs.get("exit_rule")
        self.resume, self.warm = int(inputs.get("resume") or 0), bool(inputs.get("warm_start"))
        hidden = recording.hidden
        batch, tokens = hidden.shape[:2]
        self.learning = torch.is_grad_enabled() and (
            hidden.requires_grad
            or any(p.requires_grad for m in (self.loop, *recording.layers) for p in m.parameters())
        )
        self.alone = alone
        self.check(alone)
        past = 0 if cache is None else int(cache.get_seq_length())
        if (
            cache is not None
            and cache.is_compileable
            and past == 0
            and not isinstance(cache, DepthCache)
        ):
            raise DataError(
                "a static cache has no room for iterations; leave it out, or give an "
                "undertow.depth.DepthCache"
            )
        if cache is None and self.rule is not None:
            cache = DepthCache(tokens=tokens)
            self.put_cache(cache)
        elif cache is not None and self.learning and past == 0:
            begin(cache, len(recording.layers), batch, self.steps.total).closed = True
            cache = None
            self.put_cache(
                None
            )  # entries of every iteration that nobody will read would double the memory
        self.cache = cache
        self.ledger: Ledger | None = None
        if cache is not None:
            loop = self.settings
            kind = (
                f"a loop of layers {loop.prelude}, {loop.core}, {loop.coda} with injection "
                f"{loop.injection}"
            )
            kind += ("" if alone else f" beside {attachment.settings}") + (
                " and norm" if loop.norm else ""
            )
            owner = (kind, computing_type(hidden))
            self.ledger = begin(cache, len(recording.layers), batch, self.steps.total, owner=owner)
            past = self.ledger.seen
        self.past, self.batch, self.tokens = past, batch, tokens
        mask = inputs.get("attention_mask")
        known = isinstance(mask, torch.Tensor) and mask.ndim == 2
        self.real = mask[:, past : past + tokens].bool().expand(batch, -1) if known else None  # type: ignore[index]
        self.positions = self.absolute_positions(hidden.device)
        self.state = hidden.new_zeros(batch, tokens, 1)
        self.depths = torch.full((batch, tokens), self.steps.total, device=hidden.device)
        self.norm = final_norm(attachment.owners) if self.settings.norm else None

    def check(self, alone: bool) -> None:
        if self.rule is not None and self.learning:
            raise ConfigError(
                "an exit rule works without gradients only; call the model under torch.no_grad()"
            )
        if self.rule is not None and self.rule.needs_gate and self.loop.gate is None:
            raise ConfigError(
                f"the exit rule {self.rule.kind} needs an exit gate; attach Looped(..., gate=True)"
            )
        if self.rule is not None and self.resume:
            raise ConfigError(
                "an exit rule cannot resume from an earlier iteration; leave out one of exit_rule "
                "and resume"
            )
        if self.resume and not 0 < self.resume < self.steps.total:
            raise ConfigError(
                f"resume is {self.resume} and depth {self.steps.total}; resume from an iteration "
                "before the last"
            )
        if self.warm and self.settings.injection == "none":
            raise ConfigError(
                "warm_start would lose the token: with injection='none' it enters as the first "
                "state alone; leave it out"
            )
        named = {
            "exit_rule": self.rule,
            "resume": self.resume,
            "warm_start": self.warm,
            "watch": self.inputs.get("watch"),
        }
        given = [name for name, value in named.items() if value]
        if given and not alone:
            raise ConfigError(
                f"{', '.join(given)} cannot be given beside a recurrence in time, whose solvers "
                "run the loop on some of the tokens, or again and again; leave it out, or detach "
                "the recurrence"
            )

    def put_cache(self, cache: Cache | None) -> None:
        """Have the recorded layers called with this cache."""
        layouts = self.attachment.layouts
        done: dict[int, Call] = {}
        for index, call in enumerate(self.recording.calls):
            if id(call[1]) not in done:
                at = layouts[index].cache
                done[id(call[1])] = replace(
                    call,
                    lambda path, value, at=at: cache if path == at else value,  # type: ignore[misc]
                )
            self.recording.calls[index] = done[id(call[1])]

    def absolute_positions(self, device: torch.device) -> torch.Tensor:
        """The position of each new token in its row ``[B, T]``."""
        given, mask = self.inputs.get("position_ids"), self.inputs.get("attention_mask")
        if isinstance(given, torch.Tensor) and given.ndim == 2:
            return given.to(device).expand(self.batch, -1)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            found = (mask.long().cumsum(-1) - 1).clamp(min=0)[
                :, self.past : self.past + self.tokens
            ]
            return found.to(device).expand(self.batch, -1)
        return torch.arange(self.past, self.past + self.tokens, device=device)[None].expand(
            self.batch, -1
        )

    # --- running it

    def through(self, start: int, stop: int, hidden: torch.Tensor) -> torch.Tensor:
        """Layers `start` to `stop` of the host on all tokens ``[B, T, D]``, those that are looped
        in their loop."""
        for index in range(start, stop):
            if index in self.core:
                if index == self.core.start:
                    hidden = (
                        self.exits(hidden)
                        if self.rule is not None
                        else self.fixed(hidden, 0, self.recording.run)
                    )
            elif index in self.settings.picked and not (
                self.rule is not None and index > self.core.start
            ):
                hidden = self.recording.run(index, hidden)
        return hidden

    def fixed(
        self,
        embedding: torch.Tensor,
        start: int,
        run: RunLayer,
        rollout: RolloutCache | None = None,
    ) -> torch.Tensor:
        """The loop at its fixed depth on tokens from `start` on, whose embedding e is ``[B, n,
        D]``; their last state."""
        positions = self.positions[:, start : start + embedding.shape[1]]
        cursor = None if self.ledger is None else self.ledger.cursor
        layers = [self.recording.layers[index] for index in self.settings.core]
        checkpointing = (
            self.learning and self.cache is None and any(checkpoints(layer) for layer in layers)
        )

        def iteration(state: torch.Tensor, index: int) -> torch.Tensor:
            if cursor is not None:
                cursor.iteration = index
            if rollout is not None:
                rollout.iteration = index
            hidden = self.enter(state, embedding, index)
            for layer in self.settings.core:
                if checkpointing:
                    with without_checkpointing(self.recording.layers[layer]):
                        hidden = run(layer, hidden)
                else:
                    hidden = run(layer, hidden)
            return hidden

        state = self.first_state(embedding, positions)
        state = iterate(
            iteration, state, self.steps, self.resume, checkpointing, self.inputs.get("watch")
        )
        if cursor is not None:
            cursor.leave_loop()
        if rollout is not None:
            rollout.iteration = 0
        if self.alone:  # a rollout runs some tokens at a time, and nothing resumes from it
            self.state = state
        return state

    def enter(self, state: torch.Tensor, embedding: torch.Tensor, index: int) -> torch.Tensor:
        """What enters the core at an iteration."""
        if self.norm is not None and index > 0:
            state = self.norm(state)
        return self.loop.inject(state, embedding)

    def first_state(self, embedding: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.resume:
            if self.ledger is None:
                raise ConfigError("resume goes on from the states in a cache; give the cache")
            return self.ledger.states(self.past, self.past + self.tokens).clone()
        if self.settings.injection == "none":
            state = embedding
        else:
            given = self.inputs.get("state_seed")
            seed = self.settings.state_seed if given is None else given
            state = initial_state(positions, embedding.shape[2], self.loop.state_std, seed).to(
                embedding.dtype
            )
        if self.warm and self.ledger is not None and self.past:
            state = torch.cat([self.ledger.states(self.past - 1, self.past), state[:, 1:]], dim=1)
        return state

    def exits(self, embedding: torch.Tensor) -> torch.Tensor:
        """The loop with an exit rule, and the coda: the last layer's output ``[B, T, D]`` for each
        token at its depth."""
        assert self.rule is not None and self.ledger is not None
        forward = HostedPass(self, embedding)
        outcome = iterate_until_done(
            forward,
            self.first_state(embedding, self.positions),
            self.rule,
            self.steps.total,
            self.real,
        )
        self.state, self.depths = outcome.states, outcome.depths
        self.ledger.cursor.leave_loop()
        return forward.coda(outcome.states) if forward.finished is None else forward.finished

    def finish(self) -> None:
        """Close the cache's entries of this forward, and report."""
        if self.alone:
            check_finite(self.state, self.real, self.past, REMEDY)
        if self.cache is not None and self.ledger is not None:
            finish(self.cache, self.ledger, self.state, self.depths)
        self.attachment.depth_report = DepthReport(self.depths)


class HostedPass:
    """What the loop with exits needs of the hosted layers; see `AdaptivePass`."""

    def __init__(self, loop: HostedLoop, embedding: torch.Tensor) -> None:
        self.loop, self.embedding, self.positions = loop, embedding, loop.positions
        self.whole = embedding
        self.recording = loop.recording
        self.rows = torch.arange(embedding.shape[0], device=embedding.device)
        self.finished: torch.Tensor | None = None
        self.has_gate = loop.loop.gate is not None
        assert loop.ledger is not None
        self.cursor = loop.ledger.cursor

    def keep(self, rows: torch.Tensor) -> None:
        self.rows = self.cursor.rows = rows
        self.embedding, self.positions = self.whole[rows], self.loop.positions[rows]
        recording = self.loop.recording
        self.recording = copy.copy(recording)
        layouts, done = self.loop.attachment.layouts, {}
        self.recording.calls = []
        for index, call in enumerate(recording.calls):
            if id(call[1]) not in done:
                done[id(call[1])] = pick_rows(call, layouts[index], rows, len(self.whole))
            self.recording.calls.append(done[id(call[1])])

    def iterate(self, state: torch.Tensor, index: int, moving: torch.Tensor | None) -> torch.Tensor:
        self.cursor.iteration, self.cursor.moving, self.cursor.first = index, moving, False
        hidden = self.loop.enter(state, self.embedding, index)
        for layer in self.loop.settings.core:
            hidden = self.recording.run(layer, hidden)
        return hidden

    def coda(self, state: torch.Tensor, recording: Recording | None = None) -> torch.Tensor:
        recording = recording or self.loop.recording
        for layer in self.loop.settings.coda:
            state = recording.run(layer, state)
        return state

    def logits(
        self, state: torch.Tensor, index: int, moving: torch.Tensor | None, first: bool
    ) -> torch.Tensor:
        self.cursor.iteration, self.cursor.moving, self.cursor.first = index, moving, first
        hidden = self.coda(state, self.recording)
        if self.finished is None:
            self.finished = hidden.clone()
        elif moving is None:
            self.finished[self.rows] = hidden
        else:
            self.finished[self.rows] = torch.where(
                moving[..., None], hidden, self.finished[self.rows]
            )
        return self.loop.attachment.decode.logits(hidden)

    def gate(self, state: torch.Tensor) -> torch.Tensor:
        return self.loop.loop.exit_probability(
            state if self.loop.norm is None else self.loop.norm(state)
        )
