"""A group of a rollout by one call with keys and values as inputs gives what the eager group
gives, gradients too, and is compiled once for all lengths."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from helpers import SAME, hosted, some, tokens

from undertow import Sequential
from undertow.host import compiled_group, compiling
from undertow.host.attachment import find_attachment
from undertow.host.compiled_group import CompiledGroups, KeysOnce, run_group
from undertow.host.rollout_cache import RolloutLayer
from undertow.host.weight_gradients import WeightGradients

MASK = torch.tensor([[0] * 3 + [1] * 8, [1] * 4 + [0] * 2 + [1] * 5])
Gradients = dict[str, torch.Tensor]


def gradients(model: Any, ids: torch.Tensor, **inputs: Any) -> Gradients:
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst(found: Gradients, wanted: Gradients) -> float:
    assert found.keys() == wanted.keys()
    scale = max(float(each.norm()) for each in wanted.values())
    return max(float((found[name] - wanted[name]).norm()) for name in wanted) / scale


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first tokens of the groups that ran in one call, which is not compiled here."""
    starts: list[int] = []
    run = CompiledGroups.run

    def spy(self: CompiledGroups, start: int, *rest: Any) -> Any:
        starts.append(start)
        return run(self, start, *rest)

    monkeypatch.setattr(CompiledGroups, "run", spy)
    monkeypatch.setattr(compiled_group, "compiled_group", lambda: run_group)
    return starts


def in_one_call(model: Any) -> Any:
    """A copy of a model whose groups run in one call."""
    copied = copy.deepcopy(model)
    compiling._compiled.add(find_attachment(copied).stack)
    return copied


@pytest.mark.parametrize(("name", "pathway"), some())
def test_gradients_are_those_of_the_rollout(name: str, pathway: str, ran: list[int]) -> None:
    model = hosted(name, pathway, solver=Sequential()).train()
    ids = tokens(2, 11)
    wanted = gradients(model, ids, attention_mask=MASK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no group fell back
        found = gradients(in_one_call(model), ids, attention_mask=MASK)
    assert worst(found, wanted) < SAME
    lag = find_attachment(model).pathway.lag
    first = -(-2 // lag) * lag
    assert ran == list(range(first, 12 - lag, lag)), "the first and an unfinished group run alone"


@pytest.mark.parametrize("solver", ["full", "truncated(2)"])
def test_in_several_passes_through_one_graph(solver: str, ran: list[int]) -> None:
    model = hosted("llama", "t2mlr-middle", solver=Sequential(solver)).train()
    ids = tokens(2, 11)
    found = []
    for each in (model, in_one_call(model)):
        each.zero_grad()
        output = each(input_ids=ids, labels=ids, use_cache=False)
        (of_logits,) = torch.autograd.grad(
            output.logits[:, 4].sum(), each.get_input_embeddings().weight, retain_graph=True
        )
        output.loss.backward(retain_graph=True)
        output.loss.backward()
        gathered = {n: p.grad for n, p in each.named_parameters() if p.grad is not None}
        found.append({**gathered, "of logits": of_logits})
    assert ran and worst(found[1], found[0]) < SAME


def test_what_is_frozen_has_no_gradient(ran: list[int]) -> None:
    model = hosted("llama", "turboconn-3", solver=Sequential()).train()
    model.requires_grad_(False)
    find_attachment(model).requires_grad_(True)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(True)
    ids = tokens(2, 11)
    wanted = gradients(model, ids)
    assert worst(gradients(in_one_call(model), ids), wanted) < SAME
    assert ran and "model.layers.1.self_attn.q_proj.weight" in wanted


def test_in_a_shorter_number_format(ran: list[int]) -> None:
    model = hosted("llama", "t2mlr-middle", solver=Sequential()).train()
    ids = tokens(2, 11)
    found = []
    for each in (model, in_one_call(model)):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(each, ids))
    assert ran and worst(found[1], found[0]) < 2e-2
    assert {each.dtype for each in found[1].values()} == {torch.float32}


def test_weights_are_multiplied_now_and_then(
    ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hosted("llama", "t2mlr-middle", solver=Sequential()).train()
    ids = tokens(2, 11)
    wanted = gradients(model, ids)
    products = []
    multiply = WeightGradients.multiply
    monkeypatch.setattr(WeightGradients, "ROWS", 6)
    monkeypatch.setattr(
        WeightGradients, "multiply", lambda self: (products.append(self.rows), multiply(self))
    )
    assert worst(gradients(in_one_call(model), ids), wanted) < SAME
    assert products == [6, 6, 6, 0]


@pytest.mark.parametrize("what", ["multiply", "add_gradients"])
def test_control_what_is_left_out_shows(
    what: str, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hosted("llama", "t2mlr-middle", solver=Sequential()).train()
    ids = tokens(2, 11)
    wanted = gradients(model, ids)
    place: Any = WeightGradients if what == "multiply" else RolloutLayer
    monkeypatch.setattr(place, what, lambda self, *rest: None)
    found = gradients(in_one_call(model), ids)
    found = {name: found.get(name, torch.zeros_like(each)) for name, each in wanted.items()}
    assert worst(found, wanted) > 100 * SAME


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_group_keeps_all_keys_of_its_own(
    name: str, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of them, one a group, would take memory quadratic in the length."""
    let_go, left = [], []
    settle, pack = KeysOnce.settle, KeysOnce.pack
    copies: list[torch.Tensor] = []

    def packed(self: KeysOnce, tensor: torch.Tensor) -> Any:
        count = len(self.saved)
        kept = pack(self, tensor)
        copies.extend([tensor.detach().clone()] if len(self.saved) > count else [])
        return kept

    def spy(self: KeysOnce) -> None:
        saved = list(self.saved)
        settle(self)
        let_go.append(sum(each.view is not None for each in saved))
        left.append(sum(each.tensor is not None for each in saved))
        for each, before in zip(saved, copies, strict=True):
            assert torch.equal(each.again(), before) and each.again().stride() == before.stride()
        copies.clear()

    monkeypatch.setattr(KeysOnce, "settle", spy)
    monkeypatch.setattr(KeysOnce, "pack", packed)
    gradients(in_one_call(hosted(name, "t2mlr-whole", solver=Sequential()).train()), tokens(2, 11))
    assert len(let_go) == len(ran) > 5
    assert min(let_go[1:]) == max(let_go[1:]) >= 4, "the control: keys and values of two layers"
    assert not any(left[1:])


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> Any:
        raise RuntimeError("no such graph\nand much more")

    model = hosted("llama", "t2mlr-middle", solver=Sequential()).train()
    ids = tokens(2, 11)
    wanted = gradients(model, ids)
    monkeypatch.setattr(compiled_group, "compiled_group", lambda: refuses)
    copied = in_one_call(model)
    with pytest.warns(UserWarning, match="run eagerly: no such graph$"):
        assert worst(gradients(copied, ids), wanted) < SAME
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert worst(gradients(copied, ids), wanted) < SAME


def test_only_a_training_without_checkpoints_runs_them(ran: list[int]) -> None:
    model = in_one_call(hosted("llama", "t2mlr-middle", solver=Sequential()))
    ids = tokens(2, 11)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    model.train().gradient_checkpointing_enable()
    gradients(model, ids)
    assert not ran
    model.gradient_checkpointing_disable()
    gradients(model, ids)
    assert ran
