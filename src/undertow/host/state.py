"""The recurrent state as one more layer of the model's cache.

Beam search, cropping, chunked prefill, assisted decoding and continuation all act on every layer of
a `Cache`, so the state goes where its row goes and never lives on a module.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from undertow.depth.cache_layers import Ledger, Rows
from undertow.errors import DataError
from undertow.host.arguments import visible
from undertow.host.tokens import Rows as TokenRows
from undertow.host.tokens import last_real

# The states of the last `lag` tokens ``[B, lag, W]`` and, unless all are there, which are ``[B,
# lag, 1]``.
Recent = tuple[torch.Tensor, torch.Tensor | None]
# Tokens to make room for at least, whenever there is no more.
FIRST_ROOM = 32
# What a token's entry in `values` says of it.
PADDING = -1.0
STATELESS = 0.0
PRESENT = 1.0


class StateLayer(Rows):
    """The states of every token of each row.

    `keys` holds the states ``[B, 1, room, W]`` and `values` what is known of each token, ``[B, 1,
    room, 1]``: padding has no state, nor has a token without recurrence. The names are those that
    every operation on a cache layer expects; only the first `seen` tokens count, and the room
    behind them grows by steps. What is known of that room is that its tokens will be present, so
    that a plain token writes its state alone.

    Attributes:
        recurrence: the settings of the recurrence that the states are of.
        computed_in: the type that the layers computed in.
        gaps: whether padding may stand between a row's tokens.
        plain_from: the first token from which on every row's tokens have states.
    """

    is_static = False

    def __init__(
        self, recurrence: Any, lag: int, computed_in: torch.dtype, is_compileable: bool = False
    ) -> None:
        super().__init__()
        self.recurrence, self.lag = recurrence, lag
        self.computed_in = computed_in
        self.is_compileable = (
            is_compileable  # as the other layers: it decides how a static cache is masked
        )
        self.gaps, self.plain_from = False, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def recent(self) -> Recent | None:
        """The states of the last `lag` tokens ``[B, lag, W]`` and, unless all are there, which are
        ``[B, lag, 1]``."""
        if not self.is_initialized or self.seen == 0:
            return None
        start = self.seen - self.lag
        if self.all_there(start):
            states = self.keys[:, 0, start : self.seen]
            # A graph may keep it, and the room is written to.
            return states.clone() if torch.is_grad_enabled() else states, None
        start = 0 if self.gaps else max(start, 0)
        states, known = self.keys[:, 0, start : self.seen], self.values[:, 0, start : self.seen]
        missing = self.lag - states.shape[1]
        if missing > 0:
            states = torch.nn.functional.pad(states, (0, 0, missing, 0))
            known = torch.nn.functional.pad(known, (0, 0, missing, 0), value=PADDING)
        if self.gaps:
            real = known[..., 0] != PADDING
            states, known = last_real(states, real, self.lag), last_real(known, real, self.lag)
        elif torch.is_grad_enabled():
            states = states.clone()
        return states, known == PRESENT

    def is_of(self, recurrence: Any) -> bool:
        """Whether the states are of this recurrence; each decoded token asks."""
        return self.recurrence is recurrence or bool(self.recurrence == recurrence)

    def all_there(self, start: int) -> bool:
        """Whether every row's tokens from `start` on surely have states."""
        return start >= self.plain_from

    def since_real(self) -> torch.Tensor | None:
        """How many tokens back each row's last one is that is no padding, ``[B, 1]``; None where
        all are the last."""
        if not self.is_initialized or not self.gaps:
            return None
        real = self.values[:, 0, : self.seen, 0] != PADDING
        places = torch.arange(self.seen, 0, -1, device=real.device).expand_as(real)
        return places.masked_fill(~real, self.seen + 1).amin(dim=1, keepdim=True)

    def append(self, states: torch.Tensor, rows: TokenRows) -> None:
        """Take in the states ``[B, T, W]`` of one whole forward over `rows`."""
        real, active = rows.real, rows.active
        self.gaps = (
            self.gaps
            or rows.order is not None
            or (real is not None and not bool(real[:, -1].all()))
        )
        known = states.new_full((*states.shape[:2], 1), PRESENT)
        if active is not None:
            known.masked_fill_(~active[..., None], STATELESS)
            missing = (~active).any(dim=0).nonzero()
            self.plain_from = self.seen + int(missing.max()) + 1
        if real is not None:
            known.masked_fill_(~real[..., None], PADDING)
        self.update(states[:, None], known[:, None])

    def add(self, state: torch.Tensor) -> None:
        """Take in the state ``[B, 1, W]`` of one token, which every row has."""
        seen = self.seen
        if seen == self.keys.shape[-2]:
            self._grow(seen + 1)
        self.keys[:, 0, seen] = state[:, 0]
        self.seen = seen + 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.seen, self.seen + key_states.shape[-2]
        if stop > self.keys.shape[-2]:
            self._grow(stop)
        self.keys[:, :, start:stop], self.values[:, :, start:stop] = key_states, value_states
        self.seen = stop
        return self.keys, self.values

    def _grow(self, stop: int) -> None:
        """Room for `stop` tokens: as much as there is to hold at first, then a quarter more at a
        time, so that little is copied for each token."""
        room = stop if self.seen == 0 else stop + stop // 4 + FIRST_ROOM
        self.keys = self._with_room(self.keys, room, 0.0)
        self.values = self._with_room(self.values, room, PRESENT)

    def _with_room(self, old: torch.Tensor, room: int, filling: float) -> torch.Tensor:
        new = old.new_full((*old.shape[:2], room, old.shape[-1]), filling)
        new[:, :, : self.seen] = old[:, :, : self.seen]
        return new

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.plain_from > self.seen:  # the room may hold what was said of tokens that are gone
            self.plain_from = self.seen
            self.keys, self.values = self.keys[:, :, : self.seen], self.values[:, :, : self.seen]

    def reset(self) -> None:
        super().reset()
        self.gaps, self.plain_from = False, 0


class StaticStates(StateLayer):
    """The states of every token of each row, beside a static cache: buffers of one size, and the
    number of tokens on their device, so that a step that is compiled holds no number.

    Attributes:
        count: how many tokens there are.
    """

    is_static = True

    def __init__(self, recurrence: Any, lag: int, computed_in: torch.dtype, room: int) -> None:
        with torch.inference_mode(False):  # a call outside of it may change it
            self.count = torch.zeros((), dtype=torch.long)
        super().__init__(recurrence, lag, computed_in, is_compileable=True)
        self.room = room

    @property
    def seen(self) -> int:
        return int(self.count)

    @seen.setter
    def seen(self, tokens: int) -> None:
        self.count.fill_(tokens)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, rows = key_states.device, key_states.shape[0]
        self.keys = key_states.new_zeros(rows, 1, self.room, key_states.shape[-1])
        self.values = value_states.new_full((rows, 1, self.room, 1), PRESENT)
        self.count = self.count.to(self.device)
        self.is_initialized = True
        if not torch.compiler.is_compiling():  # as the library does with a static cache's
            for buffer in (self.keys, self.values, self.count):
                torch._dynamo.mark_static_address(buffer)

    def all_there(self, start: int) -> bool:
        return False  # a compiled step does not say

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The state that each row's next token receives ``[B, 1, W]``, and whether there is one
        ``[B, 1, 1]``."""
        place = (self.count - self.lag).clamp(min=0).view(1)
        known = self.values[:, 0].index_select(1, place)
        present = (known == PRESENT) & (self.count >= self.lag)
        return self.keys[:, 0].index_select(1, place), present

    def real(self, masks: list[torch.Tensor]) -> torch.Tensor:
        """In which rows the next token is no padding, by what its layers attend to: it does not to
        itself."""
        if not masks:
            return self.count.new_ones(1, dtype=torch.bool)
        widest = masks[0]  # a layer with a sliding window does not see all that others do
        for mask in masks:
            widest = mask if mask.shape[-1] > widest.shape[-1] else widest
        place = self.count.clamp(max=widest.shape[-1] - 1).view(1)
        if widest.ndim == 2:
            return widest.index_select(1, place).bool()
        return visible(widest)[:, 0, -1:].index_select(2, place)

    def add(self, state: torch.Tensor) -> None:
        place = self.count.view(1)
        self.keys.index_copy_(2, place, state[:, None].to(self.keys.dtype))
        self.count.add_(1)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self.values[:, :, self.seen :] = PRESENT


def state_layer(
    cache: Cache,
    layers: int,
    recurrence: Any,
    lag: int,
    computed_in: torch.dtype,
    looped: bool = False,
) -> StateLayer:
    """The state layer of `cache`, appended behind the model's `layers` if nothing is cached yet.

    `looped` says that the model has a recurrence in depth too.

    Raises:
        DataError: the cache holds tokens without this recurrence's states.
    """
    past = int(cache.get_seq_length())
    layer = next((layer for layer in cache.layers[layers:] if isinstance(layer, StateLayer)), None)
    if not looped and any(isinstance(each, Ledger) for each in cache.layers[layers:]):
        raise DataError(
            "the cache was filled by a model with a recurrence in depth, and this one has none; "
            "start with an empty cache and give this model all tokens"
        )
    if past == 0 and (layer is None or not layer.seen):
        cache.layers[layers:] = [other for other in cache.layers[layers:] if other is not layer]
        return add_state_layer(cache, layers, recurrence, lag, computed_in)
    if layer is None:
        raise DataError(
            f"the cache holds {past} tokens but no recurrent states: it was filled without the "
            "recurrence, or made from keys and values alone; start with an empty cache and give "
            "this model all tokens"
        )
    if not layer.is_of(recurrence):
        raise DataError(
            f"the cache holds states of {layer.recurrence}, but this model's recurrence is "
            f"{recurrence}; start with an empty cache and give this model all tokens"
        )
    if layer.seen != past:
        raise DataError(
            f"the cache holds {past} tokens but the recurrent states of {layer.seen}: a forward "
            "was interrupted, ran without the recurrence, or only part of the cache was changed; "
            "start with an empty one, and shorten it by crop"
        )
    check_type(layer, computed_in)
    return layer


def check_type(layer: StateLayer, computed_in: torch.dtype) -> None:
    """Refuse to go on in another type than the states were computed in."""
    if layer.computed_in != computed_in:
        raise DataError(
            f"the cache was filled in {layer.computed_in} and this forward computes in "
            f"{computed_in}; use the same type, or the same torch.autocast, for both"
        )


def is_sliding(layer: Any) -> bool:
    """Whether a cache's layer keeps the keys of a window alone."""
    return bool(layer.is_sliding)


def add_state_layer(
    cache: Cache, layers: int, recurrence: Any, lag: int, computed_in: torch.dtype
) -> StateLayer:
    """Append a state layer behind the model's `layers`."""
    while (
        len(cache.layers) < layers
    ):  # a lazy cache makes its layers at their first update; ours must come after them
        assert cache.layer_class_to_replicate is not None
        cache.layers.append(cache.layer_class_to_replicate())
    compileable = all(other.is_compileable for other in cache.layers)
    layer = StateLayer(recurrence, lag, computed_in, compileable)
    # Where all layers have sliding windows, nothing says how many tokens there may be.
    rooms = [other.get_max_length() for other in cache.layers if not is_sliding(other)]
    if compileable and rooms:
        layer = StaticStates(recurrence, lag, computed_in, max(rooms))
    cache.layers.append(layer)
    return layer
