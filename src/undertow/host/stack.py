"""The container swap: a model's layer list that hands its layers to Undertow while the backbone's
forward runs.

The class of the backbone's `ModuleList` changes and nothing else: children, names and state-dict
keys stay. While a hosted forward runs, iterating the list yields recorders. Each notes how the
backbone called it; the last one has the forward run the real layers, in whatever order the
recurrence asks for. Outside a hosted forward the list is an ordinary `ModuleList`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from undertow.errors import UnsupportedArchitectureError
from undertow.host.arguments import Call
from undertow.host.collecting import Collected
from undertow.host.context import CallContext


@dataclass
class Recording:
    """How one forward of the backbone called its layers.

    Attributes:
        layers: the real layers.
        arity: the length of the tuple that a layer returns; 0 where it returns a tensor.
        hidden: the input of layer 0, ``[B, T, D]``.
        version: how often that had been changed in place before.
        calls: the arguments of each layer besides its input, as (positional, keyword).
        collected: what the forward shall return of each layer; None where nothing was asked for.
    """

    layers: list[nn.Module]
    arity: int
    hidden: torch.Tensor = field(init=False)
    version: int = 0
    calls: list[Call] = field(default_factory=list)
    collected: Collected | None = None

    def through(self, start: int, stop: int, hidden: torch.Tensor) -> torch.Tensor:
        """Layers `start` to `stop` on all tokens ``[B, T, D]``."""
        for index in range(start, stop):
            hidden = self.run(index, hidden)
        return hidden

    def run(
        self,
        index: int,
        hidden: torch.Tensor,
        call: Call | None = None,
        start: int = 0,
        first_key: int = 0,
    ) -> torch.Tensor:
        """Layer `index` on tokens from `start` on, which attend to keys from `first_key` on, by a
        `call`: the backbone's if left out."""
        args, kwargs = call or self.calls[index]
        if self.collected is None:
            output = self.layers[index](hidden, *args, **kwargs)
        else:
            with self.collected.layer(index, start, first_key):
                output = self.layers[index](hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


def version_of(hidden: torch.Tensor) -> int:
    """How often a tensor was changed in place, which torch does not count in inference mode."""
    return 0 if hidden.is_inference() else hidden._version


class HostedForward(Protocol):
    """What becomes of the layers in one forward of the backbone.

    Attributes:
        stack: the list that hands them out; None where they run untouched.
        ran: whether they have run; the list is an ordinary one from then on.
    """

    stack: nn.ModuleList | None
    ran: bool

    def stand_ins(self, layers: list[nn.Module]) -> list[Any]:
        """What the backbone iterates over in place of its layers."""


class RecordedForward(HostedForward, Protocol):
    """One that runs the layers itself, once the backbone has called all of them.

    Attributes:
        arity: the length of the tuple that a layer returns; 0 where it returns a tensor.
    """

    arity: int

    def run(self, recording: Recording) -> torch.Tensor: ...


# The hosted forward that runs in this context, so that threads and nested forwards stay apart.
current_forward: CallContext[HostedForward] = CallContext("undertow_forward")


@dataclass
class Recorder:
    """Stands in for one layer in the backbone's loop. Attributes are those of the layer."""

    _forward: RecordedForward
    _recording: Recording
    _index: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recording.layers[self._index], name)

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recording = self._recording
        if self._index == 0:
            recording.hidden, recording.version = hidden, version_of(hidden)
        if len(recording.calls) != self._index:
            raise UnsupportedArchitectureError(
                f"layer {self._index} was called after {len(recording.calls)} layers: this model "
                "does not run its layers one after another, each once, which a recurrence needs"
            )
        last = self._index == len(recording.layers) - 1
        if hidden is not recording.hidden or (last and version_of(hidden) != recording.version):
            raise UnsupportedArchitectureError(
                f"what layer {self._index - 1} gave was changed before layer {self._index}: this "
                "model changes its residual stream between the layers, as some do for images, "
                "which a recurrence would lose; give it text, or take the recurrence off with "
                "undertow.detach(model)"
            )
        recording.calls.append((args, kwargs))
        if last:
            self._forward.ran = True
            hidden = self._forward.run(recording)
        return hidden if recording.arity == 0 else (hidden, *[None] * (recording.arity - 1))


def recorders(forward: RecordedForward, layers: list[nn.Module]) -> list[Recorder]:
    """A recorder for each layer, of one recording."""
    recording = Recording(layers, forward.arity)
    return [Recorder(forward, recording, index) for index in range(len(layers))]


class Stack(nn.ModuleList):
    """A `ModuleList` whose iteration yields stand-ins inside a hosted forward of the backbone that
    owns it."""

    def _stand_ins(self) -> list[Any] | None:
        forward = current_forward.get()
        if forward is None or forward.stack is not self or forward.ran:
            return None
        return forward.stand_ins(list(self._modules.values()))

    def __iter__(self) -> Iterator[Any]:
        stand_ins = self._stand_ins()
        return super().__iter__() if stand_ins is None else iter(stand_ins)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            stand_ins = self._stand_ins()
            if stand_ins is not None:
                return stand_ins[index]
        return super().__getitem__(index)
