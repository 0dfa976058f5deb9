"""One more token of each row: the layers run where the backbone calls them.

A generated token has one state to receive, which is known before its first layer. So nothing need
be recorded: what stands in for the layers at the pathway's sites writes, reads, and calls the
layer. It is the continuation of a cache (`modes.Continuation`), where that has a single group of
one token and nothing unusual was asked for; all else goes by that.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import _active_collector

from undertow.depth.cache import computing_type
from undertow.finite import check_finite
from undertow.host.attachment import Attachment
from undertow.host.forward import Forward
from undertow.host.given import ARGUMENTS
from undertow.host.state import StateLayer, StaticStates, check_type, state_layer
from undertow.solvers import SolverReport

ASKED = frozenset(ARGUMENTS)
PADDED = (
    "a compiled step is given padding for a new token, which it cannot leave out; decode that one "
    "without torch.compile"
)


def one_more_token(attachment: Attachment, inputs: dict[str, Any]) -> Cache | None:
    """The cache of a forward of one more token a row, of which nothing unusual is asked; None for
    any other forward."""
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    if (
        attachment.pathway is None
        or attachment.loop is not None
        or attachment.collects_itself
        or given is None
        or given.shape[1] != 1
        or torch.is_grad_enabled()
        or not ASKED.isdisjoint(inputs)
    ):
        return None
    cache = next((value for value in inputs.values() if isinstance(value, Cache)), None)
    states = cache.layers[-1] if cache is not None and cache.layers else None
    mask, compiling = inputs.get("attention_mask"), torch.compiler.is_compiling()
    if not isinstance(states, StateLayer) or not states.is_of(attachment.settings):
        return None
    if states.is_static:
        assert isinstance(states, StaticStates)
        masks = masks_of(mask)
        if states.gaps or not all(isinstance(each, torch.Tensor) for each in masks):
            return None
        if not compiling and (states.seen == 0 or not bool(states.real(masks).all())):
            return None
        return cache
    if cache is None or compiling:
        return None
    past = int(cache.get_seq_length())
    if past == 0 or not (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)):
        return None
    if mask is not None and not mask[:, past : past + 1].all():  # the token is padding
        return None
    return cache


def masks_of(given: Any) -> list[Any]:
    """The masks that a backbone was given: one, or one for each kind of its layers."""
    masks = list(given.values()) if isinstance(given, dict) else [given]
    return [mask for mask in masks if mask is not None]


class Decoding(Forward):
    """The forward of one more token a row, on a cache."""

    def __init__(
        self, stack: nn.ModuleList, attachment: Attachment, inputs: dict[str, Any], cache: Cache
    ) -> None:
        super().__init__(stack, attachment.arity, attachment, inputs)
        assert attachment.pathway is not None
        self.pathway, self.cache = attachment.pathway, cache
        self.readings: list[torch.Tensor] = []

    def stand_ins(self, layers: list[nn.Module]) -> list[Any]:
        if _active_collector.get():  # what is asked for of each layer is the base model's
            return super().stand_ins(layers)
        self.layers = len(layers)
        pathway = self.pathway
        found: list[Any] = [*layers]
        found[0] = Site(self, 0, layers[0])
        for site in pathway.sites:
            if site < len(layers):
                found[site] = Site(self, site, layers[site])
        if pathway.stop_layer == len(layers):
            found[-1] = LastSite(self, len(layers), found[-1])
        return found

    def begin(self, hidden: torch.Tensor) -> None:
        """Look up what the token receives, before any layer's cache has it."""
        pathway, last = self.pathway, self.cache.layers[-1]
        known: torch.Tensor | None
        self.compiling = torch.compiler.is_compiling()
        if self.compiling:  # what is traced may hold no decision
            assert isinstance(last, StateLayer)
            self.states, self.past = last, 0
            check_type(last, computing_type(hidden))
        else:
            self.past, settings = int(self.cache.get_seq_length()), self.attachment.settings
            self.states = state_layer(
                self.cache, self.layers, settings, pathway.lag, computing_type(hidden)
            )
        if self.states.is_static:
            assert isinstance(self.states, StaticStates)
            states, known = self.states.next()
            if self.compiling:  # which could not go the other way
                real = self.states.real(masks_of(self.inputs.get("attention_mask")))
                torch._assert_async(real.all(), PADDED)
        else:
            recent = self.states.recent()
            assert recent is not None
            states, known = recent
            if hidden.is_cuda:  # as in `Forward.in_time`
                held = None if known is None else known[..., 0].bool()
                check_finite(states, held, self.past - pathway.lag, pathway.remedy)
        receiving = None if known is None else known[:, :1].to(hidden.dtype)
        state = states[:, :1]
        self.state = state if receiving is None else state * receiving
        self.written = None if pathway.writes_without_state else receiving
        self.started = 0.0 if self.compiling else time.perf_counter()

    def at(self, site: int, hidden: torch.Tensor) -> torch.Tensor:
        """What is written and read at a site, as in `sites.run_sites`."""
        if site == 0:
            self.begin(hidden)
        pathway = self.pathway
        if site in pathway.writes:
            hidden = pathway.written_where(site, hidden, self.state, self.written)
        if site in pathway.reads:
            self.readings.append(pathway.read(site, hidden))
        if site == pathway.stop_layer:
            self.end()
        return hidden

    def end(self) -> None:
        """Keep the token's own state."""
        state = self.pathway.update(self.readings, self.state)
        if not self.compiling:
            seconds = time.perf_counter() - self.started
            vars(self.attachment)["report"] = SolverReport("sequential", 1, 1, 1, (), seconds)
            if not state.is_cuda:
                check_finite(state, None, self.past, self.pathway.remedy)
        self.states.add(state)
        self.ran = True


class Site:
    """Stands in for the layer behind a site. Attributes are those of the layer."""

    def __init__(self, step: Decoding, site: int, layer: Any) -> None:
        self._step, self._site, self._layer = step, site, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._layer(self._step.at(self._site, hidden), *args, **kwargs)


class LastSite(Site):
    """Stands in for the last layer, behind which is a site."""

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self._layer(hidden, *args, **kwargs)
        if isinstance(output, tuple):
            return self._step.at(self._site, output[0]), *output[1:]
        return self._step.at(self._site, output)
