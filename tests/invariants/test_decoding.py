"""Decoding token by token equals the teacher-forced pass, for each cache that `generate` can use on
a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from helpers import (
    ARCHITECTURES,
    CACHE,
    CHANGED,
    PATHWAYS,
    SAME,
    difference,
    generate,
    hosted,
    logits,
    recurrent_parameters,
    some,
    steps,
    taking_turns,
    tokens,
    unhosted,
)
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.utils import is_optimum_quanto_available

from undertow.host.state import StateLayer

# The settings of `generate` that lead to each cache; a function of the model makes those that
# belong to one.
CACHES: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "none": lambda model: {"use_cache": False},
    "dynamic, given": lambda model: {CACHE: DynamicCache(config=model.config)},
    "dynamic, given without a config": lambda model: {CACHE: DynamicCache()},
    "static": lambda model: {"cache_implementation": "static"},
    "chunked prefill": lambda model: {"prefill_chunk_size": 4},
    "chunked prefill, static": lambda model: {
        "prefill_chunk_size": 4,
        "cache_implementation": "static",
    },
}
# What these models cannot do without a recurrence either: `test_what_the_base_models_cannot_do`
# says so.
BROKEN = {
    ("falcon", "chunked prefill, static"),
    ("falcon_alibi", "static"),
    ("falcon_alibi", "chunked prefill, static"),
    ("gpt_neo", "static"),
    ("gpt_neo", "chunked prefill, static"),
    ("mpt", "dynamic, given"),
    ("mpt", "dynamic, given without a config"),
    ("mpt", "chunked prefill"),
    ("mpt", "chunked prefill, static"),
}


def decoding_error(
    model: PreTrainedModel, ids: torch.Tensor, new: int = 8, **settings: Any
) -> float:
    """How far the logits of the steps of `generate` are from those of a teacher-forced pass over
    its text."""
    sequences, decoded = steps(model, ids, new, **settings)
    return difference(decoded, logits(model, sequences)[:, ids.shape[1] - 1 : -1])


@pytest.mark.parametrize(("name", "pathway"), some(each=3))
def test_decoding_equals_the_teacher_forced_pass_and_the_definition(
    name: str, pathway: str
) -> None:
    model, ids = hosted(name, pathway), tokens(2, 8)
    sequences, decoded = steps(model, ids, new=10)
    forced = logits(model, sequences)
    assert difference(decoded, forced[:, 7:-1]) < SAME
    with torch.no_grad():
        naive = reference.rollout(
            unhosted(name), PATHWAYS[pathway], recurrent_parameters(model), sequences
        )
    assert difference(forced, naive) < SAME


@pytest.mark.parametrize(
    ("name", "pathway", "cache"),
    [
        case
        for case in taking_turns(some(each=2), CACHES, each=2)
        if (case[0], case[2]) not in BROKEN
    ],
)
def test_every_cache_decodes_the_same(name: str, pathway: str, cache: str) -> None:
    model = hosted(name, pathway)
    assert decoding_error(model, tokens(2, 9), **CACHES[cache](model)) < SAME


@pytest.mark.parametrize(("name", "cache"), sorted(BROKEN))
def test_what_the_base_models_cannot_do(name: str, cache: str) -> None:
    model = unhosted(name)
    try:
        error = decoding_error(model, tokens(2, 9), **CACHES[cache](model))
    except (RuntimeError, ValueError):
        return
    assert error > CHANGED, "mended; take it out of BROKEN"


@pytest.mark.skipif(not is_optimum_quanto_available(), reason="needs optimum-quanto")
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_a_quantised_cache_keeps_exact_states(pathway: str) -> None:
    """Its keys are rounded, so only the first steps can be compared, while all keys are in its
    unrounded tail."""
    assert (
        decoding_error(hosted("llama", pathway), tokens(2, 9), cache_implementation="quantized")
        < SAME
    )


def test_an_offloaded_cache_is_used_where_there_is_something_to_offload_to() -> None:
    """On a CPU `transformers` itself cannot make one; this fails when it can, and the cache belongs
    in `CACHES`."""
    with pytest.raises(Exception):  # noqa: B017
        generate(unhosted("llama"), tokens(1, 4), cache_implementation="offloaded")


@pytest.mark.parametrize(
    ("name", "pathway", "kind"),
    [
        case
        for case in taking_turns(
            some(each=2), ["dynamic", "dynamic without a config", "static"], each=1
        )
        if (case[0], case[2]) not in BROKEN
    ],
)
def test_several_tokens_after_a_cached_prefix(name: str, pathway: str, kind: str) -> None:
    """As in chunked prefill, continuation and assisted decoding; prefix and chunks shorter and
    longer than the lag."""
    model, ids = hosted(name, pathway), tokens(2, 17)
    cache = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "dynamic without a config": DynamicCache,
        "static": lambda: StaticCache(config=model.config, max_cache_len=20),
    }[kind]()
    parts = []
    for chunk in ids.split([2, 6, 1, 1, 2, 4, 1], dim=1):
        parts.append(logits(model, chunk, use_cache=True, **{CACHE: cache}))
    assert difference(torch.cat(parts, dim=1), logits(model, ids)) < SAME


@pytest.mark.parametrize(("name", "pathway"), some(n for n in ARCHITECTURES if n != "mpt"))
def test_a_cache_continues_over_several_calls(name: str, pathway: str) -> None:
    model, ids = hosted(name, pathway), tokens(1, 7)
    whole = generate(model, ids, new=12)
    cache = DynamicCache(config=model.config)
    text = ids
    for new in (1, 4, 7):  # the text may hold the padding token, so the mask is given
        text = generate(model, text, new, attention_mask=torch.ones_like(text), **{CACHE: cache})
    assert torch.equal(text, whole)

    turn = torch.cat(
        [whole, tokens(1, 5, seed=8)], dim=1
    )  # the next turn of a conversation: several new tokens
    assert (
        decoding_error(model, turn, new=4, attention_mask=torch.ones_like(turn), **{CACHE: cache})
        < SAME
    )


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_inputs_may_be_embeddings(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(2, 9)
    embeddings = model.get_input_embeddings()(ids)
    with torch.no_grad():
        got = model(inputs_embeds=embeddings, use_cache=False).logits
    assert torch.equal(got, logits(model, ids))
    new = model.generate(inputs_embeds=embeddings, max_new_tokens=6, do_sample=False)
    assert torch.equal(new, generate(model, ids, new=6)[:, 9:])


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_hidden_states_and_last_logits_only(pathway: str) -> None:
    """What a forward can be asked for besides logits is that of the hosted model."""
    model, ids = hosted("llama", pathway), tokens(2, 9)
    with torch.no_grad():
        all_logits = model(input_ids=ids, use_cache=False).logits
        last = model(input_ids=ids, use_cache=False, logits_to_keep=2).logits
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(last, all_logits[:, -2:])
    expected = torch.nn.functional.cross_entropy(
        all_logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    torch.testing.assert_close(loss, expected)
    assert torch.equal(model.lm_head(hidden), all_logits), (
        "TRL calls the backbone and the head apart"
    )


# --- negative controls: each of these mistakes is seen


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_control_a_dropped_state(pathway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recent = StateLayer.recent

    def dropped(self: StateLayer) -> Any:
        found = recent(self)
        return None if found is None else (torch.zeros_like(found[0]), found[1])

    monkeypatch.setattr(StateLayer, "recent", dropped)
    assert decoding_error(hosted("llama", pathway), tokens(2, 8)) > CHANGED


@pytest.mark.parametrize("pathway", [p for p in PATHWAYS if p != "turboconn-3"])
def test_control_a_state_one_token_late(pathway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append = StateLayer.append
    monkeypatch.setattr(
        StateLayer, "append", lambda self, states, *known: append(self, states.roll(1, 1), *known)
    )
    assert decoding_error(hosted("llama", pathway), tokens(2, 8)) > CHANGED


def test_control_the_state_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    append = StateLayer.append
    monkeypatch.setattr(
        StateLayer, "append", lambda self, states, *known: append(self, states.flip(0), *known)
    )
    assert decoding_error(hosted("llama", "t2mlr-whole"), tokens(2, 8)) > CHANGED


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_control_the_definition_with_another_parameter(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(2, 8)
    weights = {name: p.detach() * 0.8 for name, p in recurrent_parameters(model).items()}
    settings = PATHWAYS[pathway]
    if not weights:  # a soft token has none but its share
        settings = type(settings)(0.1)  # type: ignore[call-arg]
    with torch.no_grad():
        naive = reference.rollout(unhosted("llama"), settings, weights, ids)
    assert difference(logits(model, ids), naive) > CHANGED
