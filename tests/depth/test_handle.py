"""The handle of a model with recurrence in depth, whichever kind it is."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import randomize, unhosted
from peft import LoraConfig, get_peft_model
from small_huginn import ids, small
from small_looped import looped, run

import undertow
from undertow.depth import at_depth, depth_handle, depths_of, get_depth, set_depth
from undertow.depth.handle import recurs_in_depth
from undertow.errors import ConfigError


def wrapped() -> Any:
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["recurrence"]}
    return get_peft_model(looped("llama"), LoraConfig(r=2, task_type="CAUSAL_LM", **settings))


MODELS: dict[str, Any] = {
    "huginn": lambda: copy.deepcopy(small()),
    "looped": lambda: looped("llama"),
    "peft": wrapped,
    "both axes": lambda: randomize(undertow.attach(looped("llama"), undertow.T2MLR(1, 2))),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_answers_alike(name: str) -> None:
    model, text = MODELS[name](), ids(2, 5)
    handle = depth_handle(model)
    assert recurs_in_depth(model) and handle.layers == 4
    assert handle.settings.core == (1, 2) and handle.settings.injection == "adapter"
    before = get_depth(model)
    with torch.no_grad():
        with at_depth(model, 2):
            output = model(input_ids=text)
            assert depths_of(model, output).tolist() == [[2] * 5] * 2
            shallow = model(input_ids=text, depth=2).logits
            assert torch.equal(output.logits, shallow)
        assert get_depth(model) == before
        assert not torch.allclose(model(input_ids=text).logits, shallow, atol=1e-3)
    set_depth(model, 3)
    assert depth_handle(model).settings.depth == 3


@pytest.mark.parametrize("name", ["huginn", "looped", "peft"])
def test_what_runs_at_each_iteration(name: str) -> None:
    model = MODELS[name]()
    looped_modules = {each for part in depth_handle(model).looped for each in part.modules()}
    calls: Counter[bool] = Counter()

    def count(module: torch.nn.Module, *_: Any) -> None:
        calls[module in looped_modules] += 1

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
    found = {}
    for depth in (1, 3):
        calls.clear()
        run(model, ids(1, 3), depth=depth, use_cache=False)
        found[depth] = dict(calls)
    assert found[3][True] == 3 * found[1][True] and found[3][False] == found[1][False]


def test_exit_gates() -> None:
    model = looped("llama", "whole")
    handle = depth_handle(model)
    assert handle.settings.gate
    width = model.config.hidden_size
    state = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
    normed = model.model.norm(state)
    loop = model.model.recurrence.loop
    assert torch.equal(handle.gate(state), loop.exit_probability(normed))
    for other in (small(), looped("llama")):
        assert not depth_handle(other).settings.gate
        with pytest.raises(ConfigError, match="exit gate"):
            depth_handle(other).gate(state)


def test_models_without_one_are_refused() -> None:
    for model in (unhosted("llama"), undertow.attach(unhosted("llama"), undertow.T2MLR(1, 2))):
        assert not recurs_in_depth(model)
        with pytest.raises(ConfigError, match=r"no recurrence in depth; attach undertow\.Looped"):
            get_depth(model)
