"""The state goes where its row of the cache goes: beams, samples, assisted decoding, cropping,
reordering, copying."""

import copy
from typing import Any

import pytest
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
    randomize,
    some,
    steps,
    taking_turns,
    tokens,
    unhosted,
)
from transformers import DynamicCache, PreTrainedModel

import undertow
from undertow.host.attachment import find_attachment
from undertow.host.modes import WholeSequence
from undertow.host.state import StateLayer

WITH_CACHE = [name for name in ARCHITECTURES if name != "mpt"]  # mpt generates without one
# A prompt that repeats itself, so that looking up its n-grams finds something.
REPEATING = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7, 8]])


def feed(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **inputs: Any) -> torch.Tensor:
    """The logits of new tokens after what is in the cache."""
    return logits(model, ids, use_cache=True, **{CACHE: cache}, **inputs)


def full(cache: Any) -> Any:
    """Keep in sliding layers what a crop has to bring back, as assisted decoding does."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    return cache


# --- through generate


@pytest.mark.parametrize(("name", "pathway"), some(WITH_CACHE))
def test_beams_carry_their_states(name: str, pathway: str) -> None:
    model, ids = hosted(name, pathway), tokens(2, 7)
    beams = generate(model, ids, num_beams=3)
    assert torch.equal(beams, generate(model, ids, num_beams=3, use_cache=False))


def test_control_beams_without_reordering(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(hosted("llama", "turboconn-1"), tokens(2, 7), num_beams=3)
    monkeypatch.setattr(StateLayer, "reorder_cache", lambda self, beams: None)
    assert not torch.equal(
        generate(hosted("llama", "turboconn-1"), tokens(2, 7), num_beams=3), expected
    )


@pytest.mark.parametrize(("name", "pathway"), some(WITH_CACHE))
def test_sampled_sequences_carry_their_states(name: str, pathway: str) -> None:
    model, ids = hosted(name, pathway), tokens(2, 7)
    torch.manual_seed(0)
    settings: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3}
    sequences, decoded = steps(model, ids, new=6, **settings)
    assert len({tuple(row) for row in sequences.tolist()}) == 6
    assert difference(decoded, logits(model, sequences)[:, 6:-1]) < SAME


@pytest.mark.parametrize(
    ("name", "pathway", "draft"), taking_turns(some(WITH_CACHE), ["plain", "recurrent"], each=1)
)
def test_assisted_decoding(name: str, pathway: str, draft: str) -> None:
    """The draft is the model with disturbed weights, so that some of its tokens are accepted and
    some are not."""
    model, ids, assistant = hosted(name, pathway), tokens(1, 9), unhosted(name)
    greedy = generate(model, ids, new=12)
    if draft == "recurrent":
        randomize(undertow.attach(assistant, PATHWAYS[pathway]))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    assert torch.equal(generate(model, ids, new=12, assistant_model=assistant), greedy)
    assert torch.equal(
        generate(assistant, ids, new=12), generate(assistant, ids, new=12, use_cache=False)
    )


@pytest.mark.parametrize(("name", "pathway"), some(WITH_CACHE))
def test_prompt_lookup(name: str, pathway: str) -> None:
    model = hosted(name, pathway)
    greedy = generate(model, REPEATING, new=12)
    assert torch.equal(generate(model, REPEATING, new=12, prompt_lookup_num_tokens=3), greedy)


@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_assisted_decoding_with_a_recurrent_mask(name: str, pathway: str) -> None:
    model, mask = hosted(name, pathway), torch.ones_like(REPEATING)
    mask[:, 4:9] = 0
    greedy = generate(model, REPEATING, new=12, recurrent_mask=mask)
    for settings in (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": hosted(name, pathway, seed=1)},
    ):
        assert torch.equal(
            generate(model, REPEATING, new=12, recurrent_mask=mask, **settings), greedy
        )


def test_control_a_crop_that_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected tokens that leave states behind are noticed."""
    monkeypatch.setattr(StateLayer, "crop", lambda self, tokens_to_remove: None)
    for pathway in PATHWAYS:
        with pytest.raises(undertow.DataError, match="but the recurrent states of"):
            generate(hosted("llama", pathway), REPEATING, new=12, prompt_lookup_num_tokens=3)


# --- on the cache itself


@pytest.mark.parametrize(
    ("name", "pathway", "taken_back"), taking_turns(some(each=2), ["1", "2", "5"], each=1)
)
def test_cropping_equals_never_having_gone_on(name: str, pathway: str, taken_back: str) -> None:
    model, ids, other = hosted(name, pathway), tokens(2, 13), tokens(2, int(taken_back), seed=7)
    cache = full(DynamicCache(config=model.config))
    first = feed(model, ids[:, :8], cache)
    feed(model, other, full(cache))
    cache.crop(-int(taken_back))
    rest = feed(model, ids[:, 8:], cache)
    assert difference(torch.cat([first, rest], dim=1), logits(model, ids)) < SAME


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_cropping_what_several_forwards_added(pathway: str) -> None:
    """As a draft model does: several forwards of one token between two crops."""
    model, ids = hosted("llama", pathway), tokens(2, 13)
    cache = DynamicCache(config=model.config)
    first = feed(model, ids[:, :5], cache)
    for token in tokens(2, 6, seed=7).split(1, dim=1):
        feed(model, token, cache)
    cache.crop(-6)
    cache.crop(0)
    rest = feed(model, ids[:, 5:], cache)
    assert difference(torch.cat([first, rest], dim=1), logits(model, ids)) < SAME


@pytest.mark.parametrize("pathway", ["turboconn-1", "turboconn-3", "t2mlr-whole"])
def test_cropping_back_to_the_start(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(2, 9)
    cache = DynamicCache(config=model.config)
    feed(model, tokens(2, 4, seed=7), cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 0
    assert difference(feed(model, ids, cache), logits(model, ids)) < SAME


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_cropping_any_number_of_tokens(pathway: str) -> None:
    """Drafts and shared prompts may be of any length, so the states of all tokens are kept."""
    model, ids, long = hosted("llama", pathway), tokens(2, 13), tokens(2, 300, seed=7) % 90
    cache = DynamicCache(config=model.config)
    first = feed(model, ids[:, :5], cache)
    feed(model, long, cache)
    cache.crop(-300)
    rest = feed(model, ids[:, 5:], cache)
    assert difference(torch.cat([first, rest], dim=1), logits(model, ids)) < SAME


def test_long_drafts() -> None:
    """As an assistant makes them: token after token, and then none is accepted."""
    model, ids, cache = hosted("llama", "turboconn-3"), tokens(2, 13), DynamicCache()
    first = feed(model, ids[:, :5], cache)
    for token in (tokens(2, 150, seed=7) % 90).split(1, dim=1):
        feed(model, token, cache)
    cache.crop(-150)
    rest = feed(model, ids[:, 5:], cache)
    assert difference(torch.cat([first, rest], dim=1), logits(model, ids)) < SAME


@pytest.mark.parametrize(("name", "pathway"), some())
def test_selecting_repeating_and_reordering_rows(name: str, pathway: str) -> None:
    model, ids = hosted(name, pathway), tokens(3, 11)
    for operation, rows in (
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ):
        cache = DynamicCache(config=model.config)
        feed(model, ids[:, :7], cache)
        operation(cache)
        rest = feed(model, ids[rows, 7:], cache)
        assert difference(rest, logits(model, ids[rows])[:, 7:]) < SAME


def go_on_as_alone(model: PreTrainedModel) -> list[bool]:
    """For three prompts that begin alike, whether each goes on as it does alone, if what they share
    was prefilled once, in one row. The second needs no padding, the others before their own
    tokens."""
    shared, rest = tokens(1, 7), tokens(3, 5, seed=4)
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    cache = DynamicCache(config=model.config)
    feed(model, shared, cache)
    cache.batch_repeat_interleave(3)
    ids, ones = torch.cat([shared.expand(3, -1), rest], dim=1), padding.new_ones(3, 7)
    given = {"attention_mask": torch.cat([ones, padding], dim=1), "pad_token_id": 0}
    together = generate(model, ids, **{CACHE: cache}, **given)
    alone = [torch.cat([shared, rest[row : row + 1, padding[row].bool()]], 1) for row in range(3)]
    return [
        torch.equal(together[row, 12:], generate(model, ids)[0, ids.shape[1] :])
        for row, ids in enumerate(alone)
    ]


@pytest.mark.parametrize(("name", "pathway"), some(WITH_CACHE))
def test_prompts_that_begin_alike_share_a_prefill(name: str, pathway: str) -> None:
    model = hosted(name, pathway)
    if all(go_on_as_alone(unhosted(name))):
        assert all(go_on_as_alone(model))
    else:  # a sliding window of the library's counts padding
        assert go_on_as_alone(model)[1]


def test_control_without_the_states_of_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = StateLayer.recent

    def forgotten(self: StateLayer) -> Any:
        found = recent(self)
        return found and (torch.zeros_like(found[0]), found[1])

    monkeypatch.setattr(StateLayer, "recent", forgotten)
    assert not all(go_on_as_alone(hosted("llama", "t2mlr-whole")))


@pytest.mark.parametrize(
    "method", ["batch_select_indices", "batch_repeat_interleave", "reorder_cache"]
)
def test_control_states_that_stay_in_their_rows(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateLayer, method, lambda self, *args: None)
    model, ids = hosted("llama", "t2mlr-whole"), tokens(3, 11)
    cache = DynamicCache(config=model.config)
    feed(model, ids[:, :7], cache)
    rows = [0, 0, 1, 1, 2, 2] if method == "batch_repeat_interleave" else [2, 1, 0]
    getattr(cache, method)(2 if method == "batch_repeat_interleave" else torch.tensor(rows))
    if (
        method == "batch_repeat_interleave"
    ):  # three rows of state for six: an error, or the first three
        with pytest.raises(RuntimeError):
            feed(model, ids[rows, 7:], cache)
    else:
        assert (
            difference(feed(model, ids[rows, 7:], cache), logits(model, ids[rows])[:, 7:]) > CHANGED
        )


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_a_copied_cache_continues_on_its_own(pathway: str) -> None:
    """One prompt, several continuations: the copies do not meet."""
    model, prompt = hosted("llama", pathway), tokens(1, 8)
    cache = DynamicCache(config=model.config)
    feed(model, prompt, cache)
    for seed in (3, 4):
        rest = tokens(1, 4, seed=seed)
        got = feed(model, rest, copy.deepcopy(cache))
        assert difference(got, logits(model, torch.cat([prompt, rest], dim=1))[:, 8:]) < SAME


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_a_cache_that_is_reset_starts_anew(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(2, 9)
    cache = DynamicCache(config=model.config)
    before = feed(model, ids, cache)
    cache.reset()
    assert torch.equal(feed(model, ids, cache), before)


def test_the_state_is_one_small_layer_of_the_cache() -> None:
    """Nothing stays on the modules, and the cache tells its length as ever."""
    model, ids = hosted("llama", "turboconn-3"), tokens(2, 9)
    assert (
        len(find_attachment(model).pathway.block) > 0
    )  # the bounds of the block are worked out once, and kept
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    cache = DynamicCache(config=model.config)
    feed(model, ids, cache)
    assert [type(layer) for layer in cache.layers].count(StateLayer) == 1
    assert isinstance(cache.layers[-1], StateLayer)
    assert cache.get_seq_length() == 9
    assert not cache.layers[-1].keys.requires_grad
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_padding_travels_with_a_reordered_row(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    feed(model, ids[:, :7], cache, attention_mask=mask[:, :7], position_ids=places[:, :7])
    cache.reorder_cache(torch.tensor([1, 0]))
    ids, mask, places = ids.flip(0), mask.flip(0), places.flip(0)
    rest = feed(model, ids[:, 7:], cache, attention_mask=mask, position_ids=places[:, 7:])
    assert difference(rest[1:], logits(model, ids[1:, 6:])[:, 1:]) < SAME
    assert difference(rest[:1], logits(model, ids[:1])[:, 7:]) < SAME


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "solver", [undertow.Sequential("adjoint(4)"), undertow.Scan(4, gradient="adjoint(4)")]
)
@pytest.mark.parametrize("pathway", ["turboconn-3", "t2mlr-middle"])
def test_a_forward_with_gradients_fills_its_cache_once(
    pathway: str, solver: Any, length: int
) -> None:
    """Whatever passes a solver makes: also where one group, and so the whole rollout, is all
    tokens."""
    assert filling_error(pathway, solver, length) < SAME


def filling_error(pathway: str, solver: Any, length: int) -> float:
    ids, gradients, cache = tokens(2, length), [], DynamicCache()
    want = logits(hosted("llama", pathway), ids)
    for each, given in ((undertow.Sequential(), None), (solver, cache)):
        model = hosted("llama", pathway, solver=each)
        got = model(ids, use_cache=given is not None, **{CACHE: given}).logits
        got.square().mean().backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        gradients.append(torch.cat([each.flatten() for each in found]))
    lengths = {layer.get_seq_length() for layer in cache.layers}
    assert lengths == {length}, f"tokens in the cache's layers: {lengths}"
    return max(difference(got.detach(), want), difference(gradients[1], gradients[0]))


def test_control_a_cache_that_two_passes_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeSequence, "layers", lambda self, last: self.recording.run)
    with pytest.raises(AssertionError, match="tokens in the cache's layers"):
        filling_error("t2mlr-middle", undertow.Sequential("adjoint(4)"), 1)


# --- caches that do not hold this recurrence's states


def continued(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    return feed(model, tokens(2, 4, seed=9), cache)


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_a_cache_without_states_is_refused(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(2, 7)
    of_base = DynamicCache(config=model.config)
    feed(unhosted("llama"), ids, of_base)
    filled = DynamicCache(config=model.config)
    feed(model, ids, filled)
    rebuilt = DynamicCache([(layer.keys, layer.values) for layer in filled.layers])
    without = copy.deepcopy(filled)
    without.layers.pop()
    for cache in (of_base, rebuilt, without):
        with pytest.raises(undertow.DataError, match="holds 7 tokens but no recurrent states"):
            continued(model, cache)
    assert torch.isfinite(continued(model, filled)).all(), "its own cache is none of these"


def test_a_cache_of_another_recurrence_is_refused() -> None:
    ids = tokens(2, 7)
    for other in ("t2mlr-middle", "turboconn-3", "soft-token"):
        cache = DynamicCache()
        feed(hosted("llama", other), ids, cache)
        with pytest.raises(
            undertow.DataError,
            match=r"the cache holds states of .* but this model's recurrence is TurboConn",
        ):
            continued(hosted("llama", "turboconn-1"), cache)


def test_a_cache_filled_in_another_type_is_refused() -> None:
    model, cache = hosted("llama", "t2mlr-middle"), DynamicCache()
    with torch.autocast("cpu", torch.bfloat16):
        feed(model, tokens(2, 7), cache)
        continued(model, cache)
    with pytest.raises(
        undertow.DataError,
        match=r"filled in torch\.bfloat16 and this forward computes in torch\.float32",
    ):
        continued(model, cache)


def test_a_cache_whose_layers_alone_were_shortened_is_refused() -> None:
    model, cache = hosted("llama", "t2mlr-middle"), DynamicCache()
    feed(model, tokens(2, 7), cache)
    for layer in cache.layers[:-1]:
        layer.crop(-2)
    with pytest.raises(undertow.DataError, match="holds 5 tokens but the recurrent states of 7"):
        continued(model, cache)


def test_a_graph_of_a_continuation_outlives_the_next_one() -> None:
    """The states of a continuation with gradients stay as they were while later forwards write to
    the same cache."""
    model, cache = hosted("llama", "t2mlr-middle"), DynamicCache()
    feed(model, tokens(2, 7), cache)
    loss = model(tokens(2, 3, seed=4), use_cache=True, **{CACHE: cache}).logits.square().mean()
    cache.crop(-3)
    feed(model, tokens(2, 5, seed=5), cache)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
