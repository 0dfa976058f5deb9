"""Looping the layers of a pretrained model: identity, caches, rows, exits and drafts over the
architectures."""

import copy
from typing import Any

import pytest
import torch
from helpers import ARCHITECTURES, CACHE, SAME, difference, generate, tokens, unhosted
from small_looped import LOOPS, looped, padded, run

import undertow
from undertow import Looped
from undertow.depth import (
    Budget,
    DepthCache,
    KLDivergence,
    Last,
    LatentDifference,
    LearnedGate,
    Scripted,
    ledger_of,
)
from undertow.depth.speculative import generate_speculative
from undertow.host.attachment import find_attachment

FEW = ["llama", "gemma3", "falcon_alibi", "gpt_neox", "bloom", "qwen3_swa"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_iteration_of_every_layer_is_the_host(name: str) -> None:
    ids, mask, _ = padded()
    host = unhosted(name)
    expected = run(host, ids, attention_mask=mask, use_cache=False).logits
    for loop in (
        Looped((0,), (1, 2), (3,)),
        Looped.whole(4),
        Looped((), (0, 1, 2, 3), (), injection="none"),
    ):
        model = undertow.attach(copy.deepcopy(host), loop)
        assert torch.equal(
            run(model, ids, attention_mask=mask, use_cache=False, depth=1).logits, expected
        )
        deeper = run(model, ids, attention_mask=mask, use_cache=False, depth=3).logits
        if loop.injection == "none":
            assert not torch.allclose(deeper, expected, rtol=1e-3, atol=1e-3)
        undertow.detach(model)
        assert torch.equal(run(model, ids, attention_mask=mask, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cached_equals_uncached_and_rows_alone(name: str) -> None:
    loop = list(LOOPS)[ARCHITECTURES.index(name) % len(LOOPS)]
    model = looped(name, loop)
    ids, mask, rows = padded()
    expected = run(model, ids, attention_mask=mask, use_cache=False).logits
    cache, parts = DepthCache(tokens=4), []
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        inputs: dict[str, Any] = {CACHE: cache, "use_cache": True, "attention_mask": mask[:, :stop]}
        if name not in ("bloom", "falcon_alibi", "mpt"):
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
        parts.append(run(model, ids[:, start:stop], **inputs).logits)
    real = mask.bool()
    if name not in ("bloom", "falcon_alibi", "mpt"):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = run(
            model, ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
    found = torch.cat(parts, dim=1)
    assert difference(found[real], expected[real]) < SAME
    for row, text in enumerate(rows):
        alone = run(model, text, use_cache=False).logits[0]
        assert difference(expected[row][real[row]], alone) < SAME


@pytest.mark.parametrize("loop", ["adapter", "dropping"])
@pytest.mark.parametrize("name", FEW)
def test_generate_with_depth_and_beams(name: str, loop: str) -> None:
    model = looped(name, loop)
    ids = tokens(2, 5)
    for settings in ({}, {"num_beams": 3}):
        cached = generate(model, ids, depth=3, attention_mask=torch.ones_like(ids), **settings)
        uncached = generate(
            model, ids, depth=3, attention_mask=torch.ones_like(ids), use_cache=False, **settings
        )
        assert torch.equal(cached, uncached)
    shallow = run(model, ids, depth=1, use_cache=False).logits
    assert difference(run(model, ids, depth=3, use_cache=False).logits, shallow) > 1e-2


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("rule", ["latent", "scripted", "kl", "gate"])
def test_exits_per_row(name: str, rule: str) -> None:
    loop = "whole" if rule == "gate" else "adapter"
    model = looped(name, loop)
    rules = {
        "latent": LatentDifference(0.35),
        "scripted": Scripted((3, 1, 4, 2)),
        "kl": KLDivergence(0.02),
        "gate": LearnedGate(0.8),
    }
    ids, mask, rows = padded()
    settings: dict[str, Any] = {"depth": 6, "exit_rule": rules[rule]}
    positions = (
        {}
        if name in ("bloom", "falcon_alibi")
        else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    )
    whole = run(model, ids, attention_mask=mask, use_cache=False, **positions, **settings).logits
    depths = undertow.depth_report(model).depths
    real = mask.bool()
    cache, parts, found = DepthCache(), [], []
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        inputs: dict[str, Any] = {CACHE: cache, "use_cache": True, "attention_mask": mask[:, :stop]}
        inputs |= {key: value[:, start:stop] for key, value in positions.items()}
        parts.append(run(model, ids[:, start:stop], **inputs, **settings).logits)
        found.append(undertow.depth_report(model).depths)
    assert torch.equal(torch.cat(found, dim=1), depths)
    assert torch.equal(ledger_of(cache).depths, depths)
    assert difference(torch.cat(parts, dim=1)[real], whole[real]) < SAME
    for row, text in enumerate(rows):
        alone = run(model, text, use_cache=False, **settings).logits[0]
        assert torch.equal(undertow.depth_report(model).depths[0], depths[row][real[row]])
        assert difference(whole[row][real[row]], alone) < SAME
    assert len(set(depths[real].tolist())) > 1


def test_rows_that_exit_stop_computing() -> None:
    model = looped("llama")
    computed: list[int] = []
    layer = model.model.layers._modules["1"]
    handle = layer.register_forward_hook(lambda module, args, out: computed.append(out.shape[0]))
    ids = tokens(4, 1)
    run(
        model,
        ids,
        position_ids=torch.tensor([[0], [1], [2], [3]]),
        depth=6,
        exit_rule=Scripted((1, 3, 3, 6)),
    )
    handle.remove()
    assert computed == [4, 3, 3, 1, 1, 1]


@pytest.mark.parametrize("policy", [Budget(2), Last()])
def test_smaller_caches(policy: Any) -> None:
    model = looped("llama")
    ids, mask, rows = padded((7, 4))
    settings: dict[str, Any] = {"depth": 4, "max_new_tokens": 5, "do_sample": False}
    batch = model.generate(ids, attention_mask=mask, **{CACHE: DepthCache(policy)}, **settings)
    for row, text in enumerate(rows):
        cache = DepthCache(policy)
        alone = model.generate(
            text, attention_mask=torch.ones_like(text), **{CACHE: cache}, **settings
        )
        assert torch.equal(batch[row, 7:], alone[0, text.shape[1] :])
    full = DepthCache()
    model.generate(rows[1], attention_mask=torch.ones_like(rows[1]), **{CACHE: full}, **settings)
    assert cache.memory().used < full.memory().used


@pytest.mark.parametrize("name", ["llama", "falcon_alibi"])
@pytest.mark.parametrize("loop", ["adapter", "whole"])
def test_self_speculative_equals_greedy(name: str, loop: str) -> None:
    model = looped(name, loop)
    ids = tokens(1, 5)
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, depth=5
    )
    found = generate_speculative(model, ids, max_new_tokens=12, depth=5, draft_depth=2, lookahead=3)
    assert torch.equal(found.sequences, plain)


@pytest.mark.parametrize("training", [True, False])
def test_truncated_gradient_in_either_mode(training: bool) -> None:
    model = looped("llama").train(training)
    ids = tokens(2, 6)

    def gradients(depth: Any, checkpointing: bool = False) -> dict[str, torch.Tensor]:
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids, depth=depth).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    default = gradients(5)  # backward is 2
    given = gradients((3, 2))
    full = gradients((0, 5))
    assert all(torch.equal(default[name], given[name]) for name in default)
    assert float(default["model.recurrence.loop.adapter.weight"].abs().sum()) > 0
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.allclose(default[name], full[name], rtol=1e-3, atol=1e-6)
    again = gradients(5, checkpointing=True)
    assert all(torch.allclose(again[name], default[name], rtol=1e-4, atol=1e-6) for name in default)


def test_iterations_that_are_computed_again_drop_out_the_same() -> None:
    model = looped("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    ids, found = tokens(2, 6), []
    for checkpointing, seed in ((False, 0), (True, 0), (False, 1)):
        if checkpointing:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        model.zero_grad()
        torch.manual_seed(seed)
        model(input_ids=ids, labels=ids, depth=4).loss.backward()
        found.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    plain, again, other = found
    assert all(torch.allclose(again[name], plain[name], rtol=1e-4, atol=1e-6) for name in plain)
    assert not all(
        torch.allclose(other[name], plain[name], rtol=1e-2, atol=1e-4) for name in plain
    ), "nothing is dropped"


def test_a_cache_of_a_forward_with_gradients_is_refused() -> None:
    model = looped("llama")
    ids = tokens(1, 4)
    cache = model(input_ids=ids, use_cache=True)[CACHE]
    with pytest.raises(undertow.DataError, match="with gradients"):
        run(model, ids[:, :1], **{CACHE: cache})


def test_warm_start_and_watch() -> None:
    model = looped("llama")
    ids = tokens(1, 5)
    cache, states = DepthCache(), []
    run(model, ids[:, :4], **{CACHE: cache}, watch=lambda i, before, after: states.append(after))
    starts: list[torch.Tensor] = []
    run(
        model,
        ids[:, 4:],
        **{CACHE: cache},
        warm_start=True,
        watch=lambda i, before, after: starts.append(before),
    )
    assert torch.equal(starts[0], states[-1][:, -1:])
    assert find_attachment(model).depth_report.mean == 4
