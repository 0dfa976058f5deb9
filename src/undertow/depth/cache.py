"""The depth-aware key-value cache: entries by layer, iteration and token, in preallocated buffers.

A `transformers` cache whose layers hold one slot an iteration. The invariant that everything rests
on: each slot of a token that is done holds the entry of the deepest iteration that the slot stands
for, or else of the deepest that the token ran. So a later token reads one slot, at any iteration,
whatever depth the tokens before it stopped at.

As cache layers the entries go where their row goes: beam search, cropping and repeated rows act on
them as on any other.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache, CacheLayerMixin

from undertow.depth.policy import CachePolicy, Full
from undertow.errors import ConfigError, DataError
from undertow.fields import fitting

# The library's keyword for the cache: `past_key_values` up to transformers 5.23, `cache` since.
CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
# Tokens to make room for where nobody says how many will come; the room doubles when it is full.
FIRST_TOKENS = 64


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

    def leave_loop(self) -> None:
        self.iteration, self.rows, self.moving, self.first = None, None, None, False


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
        self.cursor, self.policy, self.tokens = cursor, policy, tokens

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
        self.owner: Any = None  # the loop that its tokens ran through

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


class DepthCache(Cache):
    """A key-value cache by layer and iteration, to give a recurrent-depth model in place of the one
    it would make.

    Args:
        policy: which iterations to keep: `Full()`, `Last()`, `Budget(n)` or `Anchor(first,
            turning)`.
        tokens: how many tokens to make room for at once; the room doubles whenever it is full.

    Raises:
        ConfigError: the policy is none of these.
    """

    def __init__(self, policy: CachePolicy | None = None, tokens: int = FIRST_TOKENS) -> None:
        if policy is not None and not isinstance(policy, CachePolicy):
            raise ConfigError(
                f"the cache policy is {policy!r}; give one such as undertow.depth.Budget(4)"
            )
        super().__init__(layers=[])
        self.policy, self.tokens = policy or Full(), max(fitting("tokens", int, tokens), 1)

    @property
    def depths(self) -> torch.Tensor:
        """The depth of each token so far ``[B, N]``, 0 for padding."""
        return ledger_of(self).depths

    def memory(self) -> CacheMemory:
        """What it takes."""
        return cache_memory(self)


def computing_type(hidden: torch.Tensor) -> torch.dtype:
    """The type that the layers compute in: autocast's, or that of their input."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def shown(owner: Any) -> str:
    return " in ".join(map(str, owner)) if isinstance(owner, tuple) else str(owner)


def depth_layers(cache: Cache, layers: int, policy: CachePolicy | None = None) -> Ledger:
    """Make the first `layers` layers of an empty cache depth-aware, or find them so, and return the
    ledger behind them.

    A `DepthCache` brings its own policy.

    Raises:
        DataError: the cache holds tokens of a model without this loop.
    """
    for layer in cache.layers[layers:]:
        if isinstance(layer, Ledger):
            if layer.closed:
                raise DataError(
                    "the cache was returned by a forward with gradients, which keeps no entries of "
                    "the loop; fill a cache under torch.no_grad() to go on from it"
                )
            return layer
    if cache.get_seq_length():
        raise DataError(
            "the cache was filled without the recurrence in depth; start with an empty one"
        )
    cursor = Cursor()
    tokens = FIRST_TOKENS
    if isinstance(cache, DepthCache):
        policy, tokens = cache.policy, cache.tokens
    made = [DepthLayer(cursor, policy or Full(), tokens) for _ in range(layers)]
    ledger = Ledger(cursor, tokens)
    cache.layers[:layers] = made
    cache.layers.append(ledger)
    return ledger


def begin(
    cache: Cache,
    layers: int,
    batch: int,
    limit: int,
    policy: CachePolicy | None = None,
    owner: Any = None,
) -> Ledger:
    """Start a forward of `batch` rows, up to `limit` iterations deep, on a cache (see
    `depth_layers`).

    `owner` is anything that compares equal for the forwards that one cache may serve, such as the
    loop's settings.

    Raises:
        DataError: the cache holds tokens of another loop, or computed in another type, or not the
            same everywhere.
    """
    ledger = depth_layers(cache, layers, policy)
    room = [
        layer.keys.shape[3]
        for layer in cache.layers
        if isinstance(layer, DepthLayer) and layer.is_initialized
    ]
    if (held := min([int(cache.get_seq_length()), *room])) != ledger.seen:
        raise DataError(
            f"the cache holds {held} tokens but the loop's states of {ledger.seen}: a forward was "
            "interrupted, or only part of the cache was changed; start with an empty one, and "
            "shorten it by crop"
        )
    if ledger.seen and ledger.owner != owner:
        raise DataError(
            f"the cache was filled by {shown(ledger.owner)}, and this forward is of "
            f"{shown(owner)}; start with an empty one"
        )
    if ledger.seen and len(ledger.keys) != batch:  # which would be broadcast
        raise DataError(
            f"the cache holds {len(ledger.keys)} rows and this forward has {batch}; give as many, "
            "or change the cache's by batch_select_indices or batch_repeat_interleave"
        )
    ledger.owner = owner
    cursor = ledger.cursor
    cursor.batch, cursor.start, cursor.limit = batch, ledger.seen, limit
    cursor.leave_loop()
    return ledger


def finish(cache: Cache, ledger: Ledger, states: torch.Tensor, depths: torch.Tensor) -> None:
    """End a forward: each slot of its tokens gets the deepest entry it can stand for, and the
    ledger its line.

    `states` ``[B, T, D]`` are the tokens' last ones and `depths` ``[B, T]`` the iterations that
    each ran.
    """
    rows = depths.amax(dim=1).clamp(min=1)
    least, most = int(rows.min()), int(rows.max())
    stop = ledger.cursor.start + depths.shape[1]
    for layer in cache.layers:
        if isinstance(layer, DepthLayer):
            layer.seen = stop  # also where the loop leaves a layer out
            if least < layer.slots:
                layer.fill(stop, least if least == most else rows)
    ledger.record(states, depths)


def ledger_of(cache: Cache) -> Ledger:
    """The ledger of a cache that a recurrent-depth model has used.

    Raises:
        DataError: none has.
    """
    for layer in cache.layers:
        if isinstance(layer, Ledger):
            return layer
    raise DataError("no recurrent-depth model has used this cache yet")


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of keys and values: reserved, and in use by the tokens so far; and the iterations kept
    for each token."""

    reserved: int
    used: int
    slots: int

    @property
    def used_per_token(self) -> float:
        return self.used / self.tokens if self.tokens else 0.0

    tokens: int = 0


def rewind(cache: Cache, tokens: int) -> None:
    """Take the last tokens back; what the buffers hold of them stays until others overwrite it."""
    for layer in cache.layers if tokens else ():
        layer.crop(-tokens)  # type: ignore[union-attr]


def cache_memory(cache: Cache) -> CacheMemory:
    """What the keys and values in a recurrent-depth model's cache take."""
    reserved = used = slots = tokens = 0
    for layer in cache.layers:
        if isinstance(layer, DepthLayer) and layer.is_initialized:
            tokens = layer.keys.shape[0] * layer.seen
            slots = max(slots, layer.slots)
            for buffer in (layer.keys, layer.values):
                reserved += buffer.nbytes
                used += buffer.nbytes * layer.seen // buffer.shape[3]
    return CacheMemory(reserved, used, slots, tokens)
