"""What a model's forward returns of each layer: `output_hidden_states`, `output_attentions` and
`output_router_logits`.

The library collects these by hooks, in the order of the layer calls, which here are those of every
sweep, group of tokens and iteration. So each call's are kept apart; a later call of a layer on the
same tokens takes the place of an earlier one, and what is left is put together along the tokens:
one entry a layer, as the base model returns, of the pass that gave the output. A hidden state is
what a layer returned, before the recurrence writes there. A looped layer's is its last iteration's;
a layer that the loop leaves out passes its input on.

A loss on what was collected has its gradient through that pass alone: an `adjoint` carries only the
loss on the model's output into earlier states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers.utils.output_capturing import _active_collector

from undertow.errors import ConfigError
from undertow.host.attachment import Attachment
from undertow.host.support import refuse

OUTPUTS = ("hidden_states", "attentions", "router_logits")


@dataclass
class Piece:
    """What one call of a layer gave, by the output's name: tokens from `start` on, keys from
    `first_key` on."""

    start: int
    first_key: int
    found: dict[str, list[torch.Tensor]]


class Collected:
    """The outputs of one forward's layers. `collector` is the library's own, a list for each name
    that was asked for."""

    def __init__(self, collector: dict[str, Any]) -> None:
        self.collector, self.held = collector, dict(collector)
        self.names = [
            name for name in collector if not name.startswith("_")
        ]  # others say which states are wanted
        self.pieces: dict[int, list[Piece]] = {}
        collector.clear()  # nothing is collected but in `layer`

    @contextmanager
    def layer(self, index: int, start: int, first_key: int) -> Iterator[None]:
        """Collect of one call of a layer."""
        piece = Piece(start, first_key, {name: [] for name in self.names})
        self.collector.update(piece.found)
        try:
            yield
        finally:
            self.collector.clear()
        earlier = [other for other in self.pieces.get(index, []) if other.start < start]
        self.pieces[index] = [*earlier, piece]

    def hand_over(self, hidden: torch.Tensor, layers: int) -> None:
        """Give the library what it would have collected of `layers` that run once each, the first
        on `hidden`."""
        self.collector.update(self.held)
        selected = self.held.get("_hidden_states_layers")
        for index in range(layers):
            pieces = self.pieces.get(index, [])
            for name in self.names:
                calls = zip(*(piece.found[name] for piece in pieces), strict=True)
                whole = [joined(name, pieces, values, len(hidden)) for values in calls]
                if name != "hidden_states":
                    self.collector[name] += whole
                    continue
                states = self.collector[name]
                if len(whole) == 2 and not states:  # the first layer's input, too
                    states.append(hidden if selected is None or 0 in selected else None)
                hidden = whole[-1] if whole else hidden
                states.append(hidden if selected is None or len(states) in selected else None)


def joined(
    name: str, pieces: list[Piece], values: tuple[torch.Tensor, ...], batch: int
) -> torch.Tensor:
    """One output of a layer for all tokens, from those of the groups of tokens that it was called
    with."""
    if len(values) == 1:
        return values[0]
    if name == "hidden_states":
        return torch.cat(values, dim=1)
    if name == "attentions":  # [B, heads, n, keys]: later keys are not seen
        stops = [
            piece.first_key + value.shape[-1] for piece, value in zip(pieces, values, strict=True)
        ]
        keys = max(stops)
        parts = zip(pieces, values, stops, strict=True)
        return torch.cat(
            [F.pad(value, (piece.first_key, keys - stop)) for piece, value, stop in parts], dim=-2
        )
    if values[0].ndim == 2:  # [B * n, experts]
        return torch.cat([value.unflatten(0, (batch, -1)) for value in values], dim=1).flatten(0, 1)
    return torch.cat(values, dim=1)


@contextmanager
def collecting(
    attachment: Attachment, inputs: Mapping[str, Any], hidden: torch.Tensor, layers: int
) -> Iterator[Collected | None]:
    """Have the layer calls of one forward collected as those of a single pass of `layers` on
    `hidden`; None where nothing is asked for.

    Raises:
        UnsupportedArchitectureError: the model collects what is asked for itself, in its loop over
            the layers.
        ConfigError: an exit rule is given besides.
    """
    collector: dict[str, Any] = _active_collector.get() or {}
    model = attachment.owners.model
    # Few models take these as inputs; the others spare each decode step the look into the config.
    for name in (
        name
        for name in OUTPUTS
        if f"output_{name}" in attachment.input_names and name not in collector
    ):
        asked = inputs.get(f"output_{name}")
        if asked is None:
            asked = getattr(model.config.get_text_config(), f"output_{name}", False)
        if asked:
            raise refuse(
                model,
                f"output_{name} is asked for, which this model collects while it iterates over "
                f"layers that have not yet run; leave output_{name} out, or register forward "
                "hooks on the layers",
            )
    if not collector:
        yield None
        return
    if inputs.get("exit_rule") is not None:
        asked_for = f"output_{next(iter(collector))}"
        raise ConfigError(
            f"{asked_for} and exit_rule are both given, but then each token ends in a pass of its "
            "own; leave out one"
        )
    collected = Collected(collector)
    yield collected
    collected.hand_over(hidden, layers)
