"""A decoded token goes the short way, and gets what the continuation of a cache gives it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from helpers import (
    CACHE,
    CHANGED,
    PATHWAYS,
    ROUNDING,
    WITHOUT_SOFT_TOKENS,
    difference,
    hosted,
    tokens,
)
from transformers import DynamicCache

import undertow
from undertow.errors import DataError, DivergedError
from undertow.host import intercept
from undertow.host.decoding import Decoding, one_more_token

NAMES = list(zoo.ARCHITECTURES)


def pathway_for(name: str) -> str:
    """One for each architecture, taking turns."""
    fitting = [p for p in PATHWAYS if not (p == "soft-token" and name in WITHOUT_SOFT_TOKENS)]
    return fitting[NAMES.index(name) % len(fitting)]


@torch.no_grad()
def decoded(model: Any, ids: torch.Tensor, mask: torch.Tensor, short: bool) -> list[torch.Tensor]:
    """The logits of each token after the first four, decoded one by one."""
    cache = DynamicCache(config=model.config)
    logits = []
    with mock.patch.object(intercept, "one_more_token", one_more_token if short else never):
        for start, stop in [(0, 4), *((t, t + 1) for t in range(4, ids.shape[1]))]:
            output = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                **{CACHE: cache},
                use_cache=True,
            )
            logits.append(output.logits[:, -1])
    return logits


def never(attachment: Any, inputs: Any) -> None:
    return None


def masks() -> dict[str, torch.Tensor]:
    """Rows without padding, with padding on the left, and with a gap."""
    full = torch.ones(2, 8, dtype=torch.long)
    left, gap = full.clone(), full.clone()
    left[0, :3] = 0
    gap[1, 2] = 0
    return {"full": full, "left": left, "gap": gap}


@pytest.mark.parametrize("name", NAMES)
def test_the_short_way_equals_the_continuation(name: str) -> None:
    model = hosted(name, pathway_for(name))
    ids = tokens(2, 8)
    for mask in masks().values():
        with mock.patch.object(
            Decoding, "begin", autospec=True, side_effect=Decoding.begin
        ) as went:
            short = decoded(model, ids, mask, short=True)
        long = decoded(model, ids, mask, short=False)
        assert went.call_count == (0 if model_collects(model) else 4)
        for own, other in zip(short, long, strict=True):
            assert difference(own, other) < ROUNDING


def watched() -> Any:
    """Counts the forwards that go the short way."""
    return mock.patch.object(Decoding, "begin", autospec=True, side_effect=Decoding.begin)


def model_collects(model: Any) -> bool:
    """Whether the model collects hidden states itself, in its loop over the layers."""
    collects: bool = undertow.host.attachment.find_attachment(model).collects_itself
    return collects


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_control_without_a_write_it_differs(pathway: str) -> None:
    model = hosted("llama", pathway)
    ids, mask = tokens(2, 8), masks()["full"]
    with mock.patch.object(
        Decoding, "at", lambda self, site, hidden: at_without_write(self, site, hidden)
    ):
        short = decoded(model, ids, mask, short=True)
    assert difference(short[-1], decoded(model, ids, mask, short=False)[-1]) > CHANGED


def at_without_write(self: Decoding, site: int, hidden: torch.Tensor) -> torch.Tensor:
    if site == 0:
        self.begin(hidden)
    if site in self.pathway.reads:
        self.readings.append(self.pathway.read(site, hidden))
    if site == self.pathway.stop_layer:
        self.end()
    return hidden


def went_short(model: Any, **changes: Any) -> bool:
    """Whether a forward of one token after three others goes the short way."""
    cache = DynamicCache(config=model.config)
    ids = tokens(2, 4)
    with torch.no_grad():
        model(input_ids=ids[:, :3], **{CACHE: cache}, use_cache=True)
    given = {"input_ids": ids[:, 3:], CACHE: cache, "use_cache": True} | changes
    with watched() as went:
        model(**given)
    return went.call_count == 1


def test_all_else_goes_the_other_way() -> None:
    model = hosted("llama", "t2mlr-middle")
    with torch.no_grad():
        assert went_short(model)
        assert went_short(model, attention_mask=torch.ones(2, 4))
        padded = torch.ones(2, 4)
        padded[1, -1] = 0
        assert not went_short(model, attention_mask=padded)
        assert not went_short(model, input_ids=tokens(2, 2))
        assert not went_short(model, recurrent_mask=torch.ones(2, 1, dtype=torch.long))
        assert not went_short(model, attention_mask=torch.zeros(2, 1, 1, 4))
    assert not went_short(model)  # with gradients


@torch.no_grad()
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_outputs_of_each_layer_are_the_same(pathway: str) -> None:
    model = hosted("llama", pathway)
    found = []
    for way in (one_more_token, never):
        cache = DynamicCache(config=model.config)
        with mock.patch.object(intercept, "one_more_token", way):
            model(input_ids=tokens(2, 3), **{CACHE: cache}, use_cache=True)
            output = model(
                input_ids=tokens(2, 1),
                **{CACHE: cache},
                use_cache=True,
                output_hidden_states=True,
                output_attentions=True,
            )
        found.append([*output.hidden_states, *output.attentions])
    assert len(found[0]) == len(found[1]) >= 5
    for own, other in zip(*found, strict=True):
        assert difference(own, other) < ROUNDING


def test_a_token_that_is_no_number_is_told() -> None:
    model = hosted("llama", "t2mlr-middle")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.fill_(torch.nan)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), pytest.raises(DivergedError, match="token 0 in row 0"):
        model(input_ids=tokens(1, 2), **{CACHE: cache}, use_cache=True)


def test_a_cache_of_another_recurrence_is_refused_and_left_as_it_was() -> None:
    cache = DynamicCache(config=hosted("llama", "t2mlr-middle").config)
    with torch.no_grad():
        hosted("llama", "t2mlr-middle")(input_ids=tokens(1, 3), **{CACHE: cache}, use_cache=True)
        with pytest.raises(DataError, match="this model's recurrence is"):
            hosted("llama", "t2mlr-whole")(input_ids=tokens(1, 1), **{CACHE: cache}, use_cache=True)
    assert cache.get_seq_length() == 3
