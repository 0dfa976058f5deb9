"""Which tokens take part in the recurrence: padding, packed documents and `recurrent_mask`, for every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import find_packed_sequence_indices

from undertow.errors import DataError


def active_tokens(
    attention_mask: Any,
    find_layer_mask: Callable[[], Any],
    recurrent_mask: torch.Tensor | None,
    batch: int,
    tokens: int,
    past: int,
) -> torch.Tensor | None:
    """Which of the new tokens carry and receive a state, ``[B, T]``; None where all do.

    `attention_mask` is what the model was given. Where that is no ``[B, past + T]`` mask (a static cache makes it 4-D
    before the forward), padding is read off the mask of a layer, which `find_layer_mask` finds: a padding token does not
    attend to itself.
    """
    active: torch.Tensor | None = None
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        active = attention_mask[:, past : past + tokens].bool()  # Bloom's reaches as far as its static cache
    elif attention_mask is not None and isinstance(layer_mask := find_layer_mask(), torch.Tensor) and layer_mask.ndim == 4:
        own = layer_mask[:, 0].diagonal(offset=min(past, layer_mask.shape[-1] - tokens), dim1=-2, dim2=-1)
        active = own if own.dtype == torch.bool else own == 0
    if recurrent_mask is not None:
        wanted = _new_part(recurrent_mask, batch, tokens, past)
        active = wanted if active is None else active & wanted.to(active.device)
    return None if active is None or bool(active.all()) else active.expand(batch, -1)


def _new_part(mask: torch.Tensor, batch: int, tokens: int, past: int) -> torch.Tensor:
    """The part of a `recurrent_mask` that belongs to the new tokens: it covers these, or all tokens so far."""
    if mask.ndim != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] not in (tokens, past + tokens):
        raise DataError(
            f"recurrent_mask has shape {list(mask.shape)}; it needs one entry a token: [{batch}, {tokens}]"
            + (f", or [{batch}, {past + tokens}] with the cached ones" if past else "")
        )
    return mask[:, -tokens:].bool()


def documents(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """The packed document of each new token, ``[B, T]``, told by positions that start again; None for a single one."""
    if position_ids is None or position_ids.shape[-1] == 1:
        return None
    if position_ids.ndim == 3:  # multimodal rotary positions: the first axis holds the text's
        position_ids = position_ids[0]
    found: torch.Tensor | None = find_packed_sequence_indices(position_ids)
    return found


def present_states(
    active: torch.Tensor | None,
    document: torch.Tensor | None,
    cached: torch.Tensor | None,
    has_cached: bool,
    tokens: int,
    lag: int,
) -> torch.Tensor | None:
    """Whether there is a state for each new token to receive, ``[B, T]``; None where there is one for all.

    The state of the token `lag` back counts if that token is active and in the same document. `cached` ``[B, lag]`` says
    which of the cached states are there, None if all are. Without cached states the first `lag` tokens have nothing to
    receive, which the caller knows; their entries here are then only placeholders.
    """
    if active is None and document is None and (cached is None or not has_cached):
        return None
    some = next(mask for mask in (active, document, cached) if mask is not None)
    rows = max(mask.shape[0] for mask in (active, document, cached) if mask is not None)
    present = torch.ones(rows, tokens, dtype=torch.bool, device=some.device)
    head = min(lag, tokens)
    if has_cached and cached is not None:
        present[:, :head] &= cached[:, :head].bool()
    if active is not None:
        present &= active
        present[:, lag:] &= active[:, :-lag] if tokens > lag else active[:, :0]
    if document is not None:
        present[:, :head] &= document[:, :head] == 0  # what is cached belongs to the first document
        present[:, lag:] &= (document[:, lag:] == document[:, :-lag]) if tokens > lag else document[:, :0].bool()
    return present
