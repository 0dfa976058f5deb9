"""A looped model that carries a recurrence in time too."""

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers import CACHE, CHANGED, ROUNDING, SAME, difference, generate, randomize, tokens
from small_looped import looped, padded, run
from transformers import AutoModelForCausalLM, DynamicCache

import undertow
from undertow import T2MLR, Looped, TurboConn
from undertow.depth import DepthCache, LatentDifference
from undertow.pathways import Recurrence
from undertow.solvers import Jacobi, Scan, Sequential

# Around the core, which is layers 1 and 2 of four; in front of it; behind it.
PATHWAYS: dict[str, Recurrence] = {
    "t2mlr-around": T2MLR(1, 2),
    "t2mlr-whole": T2MLR(0, 3),
    "turboconn-around": TurboConn(((2, 0), (3, 0)), lag=2, alpha=0.5, rank=6),
    "turboconn-behind": TurboConn(((3, 2),), lag=1, alpha=0.5, rank=6),
    "t2mlr-before": T2MLR(0, 0),
}


def both(name: str, pathway: str, loop: str = "adapter") -> Any:
    return randomize(undertow.attach(looped(name, loop), PATHWAYS[pathway]))


@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_decoding_equals_the_whole_pass_and_rows_alone(name: str, pathway: str) -> None:
    model = both(name, pathway)
    ids, mask, rows = padded((8, 5))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = run(model, ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache, parts = DepthCache(), []
    for start, stop in ((0, 4), (4, 5), (5, 8)):
        inputs: dict[str, Any] = {
            CACHE: cache,
            "attention_mask": mask[:, :stop],
            "position_ids": positions[:, start:stop],
        }
        parts.append(run(model, ids[:, start:stop], use_cache=True, **inputs).logits)
    real = mask.bool()
    assert difference(torch.cat(parts, dim=1)[real], whole[real]) < SAME
    for row, text in enumerate(rows):
        assert difference(whole[row][real[row]], run(model, text, use_cache=False).logits[0]) < SAME
    # Both recurrences act.
    alone = run(
        looped(name), ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits
    assert difference(whole[real], alone[real]) > CHANGED
    shallow = run(
        model, ids, attention_mask=mask, position_ids=positions, use_cache=False, depth=1
    ).logits
    assert difference(whole[real], shallow[real]) > CHANGED


@pytest.mark.parametrize("pathway", ["t2mlr-around", "turboconn-around"])
def test_generate_and_beams(pathway: str) -> None:
    model = both("llama", pathway)
    ids = tokens(2, 5)
    for settings in ({}, {"num_beams": 2}):
        inputs = {"attention_mask": torch.ones_like(ids), "depth": 3, **settings}
        assert torch.equal(
            generate(model, ids, **inputs), generate(model, ids, use_cache=False, **inputs)
        )


@pytest.mark.parametrize("pathway", ["t2mlr-around", "turboconn-around", "t2mlr-whole"])
def test_parallel_solvers_run_to_the_end_equal_the_rollout(pathway: str) -> None:
    """Logits and gradients, with backpropagation truncated in depth as well."""
    ids = tokens(2, 6)
    found: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
    for name, solver in (("exact", Sequential()), ("jacobi", Jacobi(6, 6)), ("scan", Scan(6, 6))):
        model = both("llama", pathway)
        undertow.set_solver(model, solver)
        output = model(input_ids=ids, labels=ids, depth=(1, 2), use_cache=name != "jacobi")
        output.loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        found[name] = output.logits.detach(), gradients
    for name in ("jacobi", "scan"):
        assert difference(found[name][0], found["exact"][0]) < SAME
    keys = found["exact"][1].keys()
    assert any("recurrence.loop.adapter" in key for key in keys) and any(
        "recurrence.pathway" in key for key in keys
    )
    for key in keys:
        got, want = found["jacobi"][1][key], found["exact"][1][key]
        assert float((got - want).abs().max()) < 1e-3 * float(want.abs().max()) + 1e-9, key


def test_attaching_in_either_order_is_the_same(tmp_path: Any) -> None:
    ids = tokens(1, 6)
    first = both("llama", "t2mlr-around")
    second = undertow.attach(undertow.detach(copy.deepcopy(first)), PATHWAYS["t2mlr-around"])
    undertow.attach(second, Looped((0,), (1, 2), (3,), depth=4, backward=2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(run(first, ids).logits, run(second, ids).logits)
    first.save_pretrained(tmp_path / "both")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    assert difference(run(loaded, ids).logits, run(first, ids).logits) < ROUNDING


def test_mistakes() -> None:
    model = looped("llama")
    with pytest.raises(undertow.ConfigError, match="inside the looped layers 1 to 2"):
        undertow.attach(model, T2MLR(2, 2))
    assert (
        run(model, tokens(1, 3)).logits.shape[1] == 3
    )  # the failed attempt left the model as it was
    with pytest.raises(undertow.ConfigError, match="already has a recurrence of this kind"):
        undertow.attach(model, Looped((0,), (1,), (2,)))
    time_only = undertow.attach(undertow.detach(looped("llama")), T2MLR(1, 2))
    with pytest.raises(undertow.ConfigError, match="inside the looped layers"):
        undertow.attach(time_only, Looped((0,), (1, 2, 3), ()))
    with pytest.raises(undertow.ConfigError, match="beside a recurrence in time"):
        run(both("llama", "t2mlr-around"), tokens(1, 3), exit_rule=LatentDifference())
    with pytest.raises(undertow.ConfigError, match="depth is given, but"):
        run(time_only, tokens(1, 3), depth=3)


# --- caches that another model filled, or that were left half-way


def feed(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    found: torch.Tensor = run(model, ids, use_cache=True, **{CACHE: cache}).logits
    return found


def test_a_cache_of_a_model_with_other_recurrences_is_refused() -> None:
    """Of one axis, of both, or of a loop that enters its tokens otherwise."""
    ids, time = tokens(2, 7), T2MLR(0, 3)
    models = {
        "both": both("llama", "t2mlr-whole"),
        "depth": looped("llama"),
        "no injection": looped("llama", "plain"),
        "time": randomize(undertow.attach(undertow.detach(looped("llama")), time)),
    }
    for filler, other in itertools.product(models, models):
        cache = DynamicCache()
        feed(models[filler], ids[:, :5], cache)
        if filler == other:
            whole = run(models[other], ids, use_cache=False).logits
            assert difference(feed(models[other], ids[:, 5:], cache), whole[:, 5:]) < SAME
            continue
        with pytest.raises(
            undertow.DataError,
            match=r"the cache was filled|the cache holds 5 tokens but no recurrent states",
        ):
            feed(models[other], ids[:, 5:], cache)


def interrupted(model: Any, layer: int) -> DynamicCache:
    """A cache of four tokens in which a decoded one was stopped at a layer."""
    cache = DynamicCache()
    feed(model, tokens(2, 4), cache)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[layer].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        feed(model, tokens(2, 1), cache)
    handle.remove()
    return cache


@pytest.mark.parametrize("make", [lambda: looped("llama"), lambda: both("llama", "t2mlr-whole")])
def test_a_cache_that_was_left_half_way_is_refused(make: Any) -> None:
    model = make()
    for layer in (1, 2, 3):
        with pytest.raises(
            undertow.DataError,
            match="holds 5 tokens but the loop's states of 4: a forward was interrupted",
        ):
            feed(model, tokens(2, 1), interrupted(model, layer))
    assert feed(model, tokens(2, 1), interrupted(model, 0)).isfinite().all(), (
        "control: nothing had been written"
    )


def test_a_looped_cache_that_was_changed_by_hand_is_refused() -> None:
    model, ids = looped("llama"), tokens(2, 7)
    caches = [DynamicCache() for _ in range(3)]
    for cache in caches:
        feed(model, ids, cache)
    for layer in caches[0].layers[:-1]:
        layer.keys, layer.values = layer.keys[..., :5, :], layer.values[..., :5, :]
    with pytest.raises(undertow.DataError, match="holds 5 tokens but the loop's states of 7"):
        feed(model, ids[:, 5:], caches[0])
    with pytest.raises(
        undertow.DataError, match="holds 2 rows and this forward has 1; give as many"
    ):
        feed(model, ids[:1], caches[1])
    with pytest.raises(undertow.DataError, match=r"crop is given 5; .* as crop\(-5\)"):
        caches[2].crop(5)
    caches[2].crop(-2)
    whole = run(model, ids, use_cache=False).logits
    assert difference(feed(model, ids[:, 5:], caches[2]), whole[:, 5:]) < SAME


@pytest.mark.parametrize("pathway", ["t2mlr-around", "t2mlr-whole"])
def test_activation_checkpointing_gives_the_same_gradients(pathway: str) -> None:
    """A layer below the loop is computed again after iterations have been, and is no part of
    them."""
    ids, found = tokens(2, 6), []
    for checkpointing in (False, True):
        model = both("llama", pathway).train()
        undertow.set_solver(model, Sequential())
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids, depth=(2, 2)).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, again = found
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert torch.allclose(again[name], gradient, rtol=1e-4, atol=1e-6), name
