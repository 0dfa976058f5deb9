"""Which tokens take part in the recurrence, and after which: padding, packed documents and
`recurrent_mask`, for every row.

A state follows the idea of order and of document that attention has: padding is no token, wherever
it stands, and a token receives no state of one that attention keeps from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.masking_utils import find_packed_sequence_indices

from undertow.errors import DataError
from undertow.pathways.base import Pathway


class RowOrder:
    """The order of each row's tokens where padding stands between them.

    Attributes:
        real: which tokens are not padding, ``[B, T]``.
    """

    def __init__(self, real: torch.Tensor) -> None:
        self.real = real
        self.places = (~real).byte().argsort(dim=1, stable=True)  # real tokens first, in order

    def together(self, values: torch.Tensor) -> torch.Tensor:
        """Values ``[B, T, ...]`` with those of each row's real tokens first."""
        return _pick(values, self.places)

    def apart(self, values: torch.Tensor) -> torch.Tensor:
        """What `together` was given, from what it returned."""
        return _pick(values, self.places.argsort(dim=1))

    def received(self, recent: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """What tokens `start` to `stop`, at most `lag`, receive of the `recent` states ``[B, lag,
        W]`` before them."""
        real = self.real[:, start:stop].long()
        return _pick(recent, real.cumsum(1) - real)

    def recent(self, before: torch.Tensor, states: torch.Tensor, start: int) -> torch.Tensor:
        """The last states ``[B, lag, W]``, from those `before` and those ``[B, n, W]`` of the
        tokens from `start` on."""
        real = self.real[:, start : start + states.shape[1]]
        known = torch.cat([real.new_ones(before.shape[:2]), real], dim=1)
        return last_real(torch.cat([before, states], dim=1), known, before.shape[1])


def last_real(values: torch.Tensor, real: torch.Tensor, count: int) -> torch.Tensor:
    """The values of each row's last `count` real tokens in order, after others' where it has
    fewer."""
    return _pick(values, real.byte().argsort(dim=1, stable=True)[:, -count:])


def _pick(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.take_along_dim(values, places if values.ndim == 2 else places[..., None], dim=1)


def real_tokens(
    attention_mask: Any, masks: Sequence[torch.Tensor], batch: int, tokens: int, past: int
) -> torch.Tensor | None:
    """Which of the new tokens are not padding, ``[B, T]``; None where all are.

    `attention_mask` is what the model was given. Where that is no ``[B, past + T]`` mask (a static
    cache makes it 4-D before the forward), padding is read off what layers attend to, `masks` ``[B,
    1, T, keys]``: it does not to itself.
    """
    real: torch.Tensor | None = None
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        real = attention_mask[
            :, past : past + tokens
        ].bool()  # Bloom's reaches as far as its static cache
    elif attention_mask is not None and masks:
        offset = min(past, masks[0].shape[-1] - tokens)
        real = masks[0][:, 0].diagonal(offset=offset, dim1=-2, dim2=-1)
    return None if real is None or bool(real.all()) else real.expand(batch, -1)


def active_tokens(
    real: torch.Tensor | None,
    recurrent_mask: torch.Tensor | None,
    batch: int,
    tokens: int,
    past: int,
) -> torch.Tensor | None:
    """Which of the new tokens carry and receive a state, ``[B, T]``; None where all do."""
    if recurrent_mask is None:
        return real
    wanted = _new_part(recurrent_mask, batch, tokens, past)
    active = wanted if real is None else real & wanted.to(real.device)
    return None if bool(active.all()) else active.expand(batch, -1)


def _new_part(mask: torch.Tensor, batch: int, tokens: int, past: int) -> torch.Tensor:
    """The part of a `recurrent_mask` that belongs to the new tokens: it covers these, or all tokens
    so far."""
    if (
        mask.ndim != 2
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (tokens, past + tokens)
    ):
        raise DataError(
            f"recurrent_mask has shape {list(mask.shape)}; it needs one entry a token: [{batch}, "
            f"{tokens}]" + (f", or [{batch}, {past + tokens}] with the cached ones" if past else "")
        )
    if (
        mask.is_floating_point() or mask.is_complex()
    ):  # 0 and -inf, as some attention masks are, would be taken for 0 and 1
        raise DataError(
            f"recurrent_mask is of type {mask.dtype}; give whole numbers, 1 and 0, or True and "
            "False"
        )
    return mask[:, -tokens:].bool()


def row_order(real: torch.Tensor | None, continues: bool) -> RowOrder | None:
    """The order of the new tokens, unless it is that in which they stand: padding, if any, before
    or after them all.

    `continues` says whether there are cached tokens before them.
    """
    if real is None:
        return None
    before = (~real).cumsum(1)
    leading = 0 if continues else (before * (real.cumsum(1) == 0)).amax(dim=1, keepdim=True)
    return RowOrder(real) if bool((real & (before != leading)).any()) else None


def documents(
    attention_mask: Any,
    position_ids: torch.Tensor | None,
    masks: Sequence[torch.Tensor],
    real: torch.Tensor | None,
    past: int,
    by_positions: bool,
    since: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The packed document of each new token, ``[B, T]``, as attention tells them apart; None for a
    single one.

    The library tells documents by their positions where it is given neither a mask nor a cache, and
    a 4-D mask of the user's own may keep them apart as it likes; beside one of padding alone there
    is a single document. Both show in what the layers attend to, `masks` ``[B, 1, T, keys]``: a
    document begins where a token does not attend to the one before. With `by_positions` attention
    makes no masks, and goes by the positions. `since` ``[B, 1]`` is how far before the first new
    token each row's last cached one is that is not padding; None for 1.
    """
    if attention_mask is None:
        if position_ids is None or position_ids.shape[-1] == 1:
            return None
        if position_ids.ndim == 3:  # multimodal rotary positions: the first axis holds the text's
            position_ids = position_ids[0]
        found: torch.Tensor | None = find_packed_sequence_indices(position_ids)
        if found is None or by_positions:
            return found
    if not masks:
        return None
    rows = max(len(mask) for mask in masks)
    keys = max(
        mask.shape[-1] for mask in masks
    )  # a layer with a sliding window does not see all that others do
    seen = torch.stack(
        [mask[:, 0].expand(rows, -1, -1) for mask in masks if mask.shape[-1] == keys]
    )
    tokens = seen.shape[2]
    place = torch.arange(tokens, device=seen.device).expand(seen.shape[1], -1)
    first = (
        place.new_full((place.shape[0], 1), -1)
        if since is None
        else -since.to(place.device).expand(place.shape[0], 1)
    )
    if real is not None:
        place = place.masked_fill(~real, -1 - past)
    # The real token before each; those below 0 are cached. The new tokens' keys are the last, but
    # for a static cache's room.
    before = torch.cat([first, place[:, :-1]], dim=1).cummax(1).values
    key = (before + min(past, keys - tokens)).clamp(min=0)
    attends = seen.any(0).gather(2, key[..., None])[..., 0]
    begins = ~attends & (True if past else before >= 0)
    if real is not None:
        begins &= real
    return begins.long().cumsum(1) if bool(begins.any()) else None


def present_states(
    active: torch.Tensor | None,
    document: torch.Tensor | None,
    cached: torch.Tensor | None,
    has_cached: bool,
    tokens: int,
    lag: int,
    order: RowOrder | None = None,
) -> torch.Tensor | None:
    """Whether there is a state for each new token to receive, ``[B, T]``; None where there is one
    for all.

    The state of the token `lag` back counts if that token is active and in the same document.
    `cached` ``[B, lag]`` says which of the cached states are there, None if all are. Without cached
    states the first `lag` tokens have nothing to receive, which the caller knows; their entries
    here are then only placeholders.
    """
    if order is not None:
        active = None if active is None else order.together(active)
        document = None if document is None else order.together(document)
    elif active is None and document is None and (cached is None or not has_cached):
        return None
    some = [
        mask
        for mask in (active, document, cached, None if order is None else order.real)
        if mask is not None
    ]
    present = torch.ones(
        max(len(mask) for mask in some), tokens, dtype=torch.bool, device=some[0].device
    )
    head = min(lag, tokens)
    if has_cached and cached is not None:
        present[:, :head] &= cached[:, :head].bool()
    if active is not None:
        present &= active
        present[:, lag:] &= active[:, :-lag] if tokens > lag else active[:, :0]
    if document is not None:
        present[:, :head] &= document[:, :head] == 0  # what is cached belongs to the first document
        present[:, lag:] &= (
            (document[:, lag:] == document[:, :-lag]) if tokens > lag else document[:, :0].bool()
        )
    if order is None:
        return present
    if not has_cached:
        present[:, :head] = False
    return order.apart(present)


class Rows:
    """What a forward knows of its new tokens: which receive a state, and where a write counts.

    Attributes:
        real: which are not padding, ``[B, T]``; None for all.
        active: which carry and receive a state, ``[B, T]``; None for all.
        present: which have a state to receive, ``[B, T]``; None for all. It says so of all but a
            sequence's first `lag` tokens, unless there is an `order`.
        order: the order of those that are not padding; None where they stand in it.
        starts: whether the sequence's first `lag` tokens, which receive nothing, are not among
            those of `present`.
    """

    def __init__(
        self,
        pathway: Pathway,
        continues: bool,
        real: torch.Tensor | None,
        active: torch.Tensor | None,
        present: torch.Tensor | None,
        order: RowOrder | None,
    ) -> None:
        """`continues` says that tokens with states are before them."""
        self.real, self.active = real, active
        self.present, self.order = present, order
        self.lag, self.always_written = pathway.lag, pathway.writes_without_state
        self.starts = not continues and order is None

    def fit(self, hidden: torch.Tensor) -> None:
        """Make masks ``[B, T, 1]`` of the type of `hidden` ``[B, T, D]``, the block's input."""
        active, present = self.active, self.present
        self.device, self.dtype = hidden.device, hidden.dtype
        self.receiving = None if present is None else present[..., None].to(hidden.dtype)
        self.writing = None if active is None else active[..., None].to(hidden.dtype)

    def between(self, start: int, stop: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which of the tokens `start` to `stop` have a state to receive, and where a write counts,
        ``[B, n, 1]``; None for all.

        A write counts at active tokens that have a state, if the pathway needs one.
        """
        receiving = None if self.receiving is None else self.receiving[:, start:stop]
        if self.starts and start < self.lag:
            places = torch.arange(start, stop, device=self.device)
            head = places.ge(self.lag)[None, :, None].to(self.dtype)
            receiving = head if receiving is None else receiving * head
        if not self.always_written:
            return receiving, receiving
        return receiving, None if self.writing is None else self.writing[:, start:stop]

    def of_group(
        self, state: torch.Tensor, start: int, stop: int, receiving: torch.Tensor | None
    ) -> torch.Tensor:
        """What tokens `start` to `stop`, at most `lag`, receive of the `state` ``[B, lag, W]`` of
        those before them."""
        if self.order is None:
            state = state[:, : stop - start]
        else:
            state = self.order.received(state, start, stop)
        return state if receiving is None else state * receiving
