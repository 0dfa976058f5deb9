"""The recurrent state as one more layer of the model's cache.

Beam search, cropping, chunked prefill, assisted decoding and continuation all act on every layer of a `Cache`, so the state
goes where its row goes and never lives on a module.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# Tokens that a crop may take back beyond the last forward: assisted decoding drafts with many forwards between two crops.
HISTORY = 128


class StateLayer(CacheLayerMixin):
    """The states of the last tokens of each row.

    `keys` holds the states ``[B, 1, N, W]`` and `values` whether each is one, ``[B, 1, N, 1]``: a padding token has none.
    The names are those that every operation on a cache layer expects.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    keys: Any
    values: Any

    def __init__(self, lag: int, is_compileable: bool = False) -> None:
        super().__init__()
        self.lag = lag
        self.is_compileable = is_compileable  # as the other layers: it decides how a static cache is masked
        self.seen = 0
        self.all_present = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def recent(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The states of the last `lag` tokens ``[B, lag, W]`` and, unless all are there, which are ``[B, lag, 1]``."""
        if not self.is_initialized or self.seen == 0:
            return None
        states, present = self.keys[:, 0, -self.lag :], self.values[:, 0, -self.lag :]
        missing = self.lag - states.shape[1]
        if missing > 0:
            states = torch.nn.functional.pad(states, (0, 0, missing, 0))
            present = torch.nn.functional.pad(present, (0, 0, missing, 0))
        return states, None if self.all_present and missing <= 0 else present

    def append(self, states: torch.Tensor, present: torch.Tensor | None) -> None:
        """Take in the states ``[B, T, W]`` of one whole forward; `present` ``[B, T, 1]`` says which are states."""
        self.all_present = self.all_present and present is None
        if present is None:
            present = states.new_ones(states.shape[0], states.shape[1], 1)
        self.update(states[:, None], present[:, None].to(states.dtype))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        keep = self.lag + max(tokens, HISTORY)
        self.seen += tokens
        self.keys = torch.cat([self.keys, key_states], dim=-2)[:, :, -keep:]
        self.values = torch.cat([self.values, value_states], dim=-2)[:, :, -keep:]
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        count = abs(tokens_to_remove)
        if count == 0 or not self.is_initialized:
            return
        kept = self.keys.shape[-2] - count
        if kept < min(self.lag, self.seen - count):
            raise RuntimeError(
                f"cannot take back {count} tokens: the recurrent states of the last {self.keys.shape[-2]} are kept; crop at "
                f"most {self.keys.shape[-2] - self.lag} at a time or start a new cache"
            )
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        self.seen -= count

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.seen, self.all_present = 0, True

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (
                self.keys.repeat_interleave(repeats, 0),
                self.values.repeat_interleave(repeats, 0),
            )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]


def state_layer(cache: Cache, layers: int, lag: int) -> StateLayer:
    """The state layer of `cache`, appended behind the model's `layers` if it is not there yet."""
    for layer in cache.layers[layers:]:
        if isinstance(layer, StateLayer):
            return layer
    while len(cache.layers) < layers:  # a lazy cache makes its layers at their first update; ours must come after them
        assert cache.layer_class_to_replicate is not None
        cache.layers.append(cache.layer_class_to_replicate())
    layer = StateLayer(lag, is_compileable=all(other.is_compileable for other in cache.layers))
    cache.layers.append(layer)
    return layer
