"""The depth-aware key-value cache: entries by layer, iteration and token, in preallocated buffers.

As cache layers the entries go where their row goes: beam search, cropping and repeated rows act on
them as on any other.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache

from undertow.depth.arguments import is_whole
from undertow.depth.cache_layers import Cursor, DepthLayer, Ledger
from undertow.depth.policy import CachePolicy, Full
from undertow.errors import ConfigError, DataError

# Tokens to make room for where nobody says how many will come; the room doubles when it is full.
FIRST_TOKENS = 64


@functools.cache
def cache_keyword() -> str:
    """The library's keyword for the cache: `past_key_values` up to transformers 5.23, `cache`
    since."""
    from transformers import GenerationMixin  # takes a second, which whoever reads a recipe saves

    taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in taken else "past_key_values"


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
        if not is_whole(tokens):
            raise ConfigError(f"tokens is {tokens!r}; give a whole number")
        super().__init__(layers=[])
        self.policy, self.tokens = policy or Full(), max(int(tokens), 1)

    @property
    def depths(self) -> torch.Tensor:
        """The depth of each token so far ``[B, N]``, 0 for padding."""
        return ledger_of(self).depths

    def memory(self) -> CacheMemory:
        """What it takes."""
        return cache_memory(self)


class CacheOwner(NamedTuple):
    """Which loop fills a cache: one cache serves the forwards of which both are the same."""

    loop: str
    """The loop in words."""
    dtype: torch.dtype
    """What its layers compute in."""

    def __str__(self) -> str:
        return f"{self.loop} in {self.dtype}"


def computing_type(hidden: torch.Tensor) -> torch.dtype:
    """The type that the layers compute in: autocast's, or that of their input."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def depth_layers(cache: Cache, layers: int) -> Ledger:
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
    room = cache if isinstance(cache, DepthCache) else DepthCache()
    tokens = room.tokens
    made = [DepthLayer(cursor, room.policy, tokens) for _ in range(layers)]
    ledger = Ledger(cursor, tokens)
    cache.layers[:layers] = made
    cache.layers.append(ledger)
    return ledger


def begin_forward(cache: Cache, layers: int, batch: int, limit: int, owner: CacheOwner) -> Ledger:
    """Start a forward of `batch` rows, up to `limit` iterations deep, on a cache (see
    `depth_layers`) of the loop `owner`.

    Raises:
        DataError: the cache holds tokens of another loop, or computed in another type, or not the
            same everywhere.
    """
    ledger = depth_layers(cache, layers)
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
            f"the cache was filled by {ledger.owner}, and this forward is of {owner}; start with "
            "an empty one"
        )
    if ledger.seen and len(ledger.keys) != batch:  # which would be broadcast
        raise DataError(
            f"the cache holds {len(ledger.keys)} rows and this forward has {batch}; give as many, "
            "or change the cache's by batch_select_indices or batch_repeat_interleave"
        )
    ledger.owner = owner
    cursor = ledger.cursor
    cursor.batch = batch
    cursor.start = ledger.seen
    cursor.limit = limit
    cursor.leave_loop()
    return ledger


def finish_forward(
    cache: Cache, ledger: Ledger, states: torch.Tensor, depths: torch.Tensor
) -> None:
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


def rewind(cache: Cache, tokens: int) -> None:
    """Take the last tokens back; what the buffers hold of them stays until others overwrite it."""
    for layer in cache.layers if tokens else ():
        layer.crop(-tokens)  # type: ignore[union-attr]


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
