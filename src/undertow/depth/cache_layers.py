"""The layers of the depth-aware key-value cache: one slot an iteration, and the ledger behind them.

The invariant that everything rests on: each slot of a token that is done holds the entry of the
deepest iteration that the slot stands for, or else of the deepest that the token ran. So a later
token reads one slot, at any iteration, whatever depth the tokens before it stopped at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from undertow.depth.policy import CachePolicy
from undertow.errors import DataError


@dataclass
class Cursor:
    """Where the running forward writes, shared by the layers of one cache.

    Attributes:
        batch: rows of the whole batch.
        start: tokens that the cache held before this forward.
        limit: iterations that a token can run in this forward.
        iteration: the running one; None outside the loop, where a layer's entry stands for every
            iteration.
        rows: which rows are computed ``[b]``; None for all.
        moving: which of their tokens still move ``[b, T]``; None for all. The others keep their
            last entry.
        first: whether this is the first entry of these tokens in a layer that skipped the
            iterations before.
    """

    batch: int = 0
    start: int = 0
    limit: int = 1
    iteration: int | None = None
    rows: torch.Tensor | None = None
    moving: torch.Tensor | None = None
    first: bool = False

    def enter(
        self, iteration: int, moving: torch.Tensor | None = None, first: bool = False
    ) -> None:
        """Write the entries of an iteration, those of the tokens `moving` ``[b, T]`` alone."""
        self.iteration = iteration
        self.moving = moving
        self.first = first

    def leave_loop(self) -> None:
        """Back to layers that run once, for all rows and tokens."""
        self.iteration = None
        self.rows = None
        self.moving = None
        self.first = False


class Rows(CacheLayerMixin):
    """A cache layer of buffers ``[B, ...]`` with room: one length, and operations on rows."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens. Their entries stay in the buffers until others overwrite them."""
        if (
            tokens_to_remove > 0
        ):  # as the library's layers, for which this once was the length to keep
            raise DataError(
                f"crop is given {tokens_to_remove}; give the number of tokens to take back as a "
                f"negative one, as crop(-{tokens_to_remove})"
            )
        self.seen = max(self.seen + tokens_to_remove, 0)

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.seen = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (
                self.keys.repeat_interleave(repeats, 0),
                self.values.repeat_interleave(repeats, 0),
            )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if (
            self.is_initialized
        ):  # a layer that the loop leaves out holds nothing, however many tokens there were
            self.batch_select_indices(beam_idx.to(self.keys.device))


class DepthLayer(Rows):
    """Keys and values of one layer, ``[B, slots, heads, N, head width]`` each, for N tokens."""

    def __init__(self, cursor: Cursor, policy: CachePolicy, tokens: int) -> None:
        super().__init__()
        self.cursor = cursor
        self.policy = policy
        self.tokens = tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = (
            self._room(key_states, 1, self.tokens),
            self._room(value_states, 1, self.tokens),
        )
        self.is_initialized = True

    def _room(self, entry: torch.Tensor, slots: int, tokens: int) -> torch.Tensor:
        return entry.new_zeros(
            self.cursor.batch or entry.shape[0], slots, entry.shape[-3], tokens, entry.shape[-1]
        )

    @property
    def slots(self) -> int:
        return self.keys.shape[1] if self.is_initialized else 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Enter the new tokens' keys and values ``[b, heads, T, head width]``; those of all tokens
        so far for attention."""
        if not self.is_initialized:
            self.lazy_initialization(key_states.detach(), value_states.detach())
        cursor = self.cursor
        stop = cursor.start + key_states.shape[-2]
        slots = 1 if cursor.iteration is None else self.policy.slots(cursor.limit)
        self._make_room(slots, stop)
        self.seen = stop
        return self._enter(self.keys, key_states, stop), self._enter(
            self.values, value_states, stop
        )

    def _make_room(self, slots: int, tokens: int) -> None:
        held_slots, held_tokens = self.keys.shape[1], self.keys.shape[3]
        slots, tokens = (
            max(slots, held_slots),
            tokens if tokens <= held_tokens else max(tokens, 2 * held_tokens),
        )
        tokens = max(tokens, held_tokens)
        if (slots, tokens) == (held_slots, held_tokens):
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._room(old, slots, tokens)
            new[:, :held_slots, :, :held_tokens] = old
            # A slot beyond those that there were stands for iterations that no token ran: the
            # deepest entry fills it.
            new[:, held_slots:, :, :held_tokens] = old[:, -1:]
            setattr(self, name, new)

    def _enter(self, buffer: torch.Tensor, new: torch.Tensor, stop: int) -> torch.Tensor:
        cursor = self.cursor
        start, iteration = cursor.start, cursor.iteration
        entry = new.detach()
        if iteration is None:
            buffer[:, :, :, start:stop] = entry[:, None]
            read = buffer[:, -1, :, :stop]
        else:
            slot = self.policy.slot(iteration)
            if cursor.moving is not None:
                before = buffer[
                    :, slot if iteration >= buffer.shape[1] else max(slot - 1, 0), :, start:stop
                ]
                before = before if cursor.rows is None else before[cursor.rows]
                entry = torch.where(cursor.moving[:, None, :, None], entry, before)
            for each in range(slot + 1) if cursor.first else (slot,):
                if cursor.rows is None:
                    buffer[:, each, :, start:stop] = entry
                else:
                    buffer[:, each, :, start:stop].index_copy_(0, cursor.rows, entry)
            read = buffer[:, slot, :, :stop]
            read = read if cursor.rows is None else read.index_select(0, cursor.rows)
        if new.requires_grad:  # the buffers carry no gradient; what is new must
            return new if start == 0 else torch.cat([read[..., :start, :].clone(), new], dim=-2)
        return read

    def fill(self, stop: int, depths: int | torch.Tensor) -> None:
        """Give the new tokens' slots beyond the last iteration that their row ran, ``[B]`` or one
        for all, its entry."""
        start, slots = self.cursor.start, self.slots
        for buffer in (self.keys, self.values):
            new = buffer[:, :, :, start:stop]
            if isinstance(depths, int):
                new[:, depths:] = new[:, depths - 1 : depths]
            else:
                source = torch.arange(slots, device=buffer.device)[None].minimum(
                    depths[:, None] - 1
                )
                new.copy_(new.gather(1, source[:, :, None, None, None].expand_as(new)))


class Ledger(Rows):
    """What is known of each token: its last state (`keys`, ``[B, 1, N, D]``) and depth (`values`,
    ``[B, 1, N, 1]``)."""

    def __init__(self, cursor: Cursor, tokens: int) -> None:
        super().__init__()
        self.cursor, self.tokens = cursor, tokens
        self.closed = False  # a forward with gradients went by and left no entries
        self.owner: object = None  # the loop that its tokens ran through

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys = key_states.new_zeros(key_states.shape[0], 1, self.tokens, key_states.shape[-1])
        self.values = value_states.new_zeros(value_states.shape[0], 1, self.tokens, 1)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        start, stop = self.cursor.start, self.cursor.start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        missing = stop - self.keys.shape[2]
        if missing > 0:
            missing = max(missing, self.keys.shape[2])
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, missing))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, missing))
        self.keys[:, :, start:stop], self.values[:, :, start:stop] = key_states, value_states
        self.seen = stop
        return self.keys, self.values

    def record(self, states: torch.Tensor, depths: torch.Tensor) -> None:
        """Note the last states ``[B, T, D]`` and the depths ``[B, T]`` of the new tokens."""
        self.update(states.detach()[:, None], depths[:, None, :, None])

    def states(self, start: int, stop: int) -> torch.Tensor:
        """The last states of tokens `start` to `stop`, ``[B, n, D]``; also of tokens that were
        cropped a moment ago."""
        if not self.is_initialized or stop > self.keys.shape[2]:
            raise DataError(
                f"the cache knows no states of tokens {start} to {stop}; run them first"
            )
        found: torch.Tensor = self.keys[:, 0, start:stop]
        return found

    @property
    def depths(self) -> torch.Tensor:
        """The depth of each token ``[B, N]``, 0 for padding."""
        found: torch.Tensor = self.values[:, 0, : self.seen, 0]
        return found
