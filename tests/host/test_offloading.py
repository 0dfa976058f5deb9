"""Weights that accelerate keeps in main memory or on disk change no number."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from helpers import (
    CHANGED,
    PATHWAYS,
    ROUNDING,
    difference,
    generate,
    hosted,
    logits,
    recurrent_parameters,
    tokens,
    unhosted,
)
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import undertow
from undertow.host.attachment import find_attachment
from undertow.host.offloading import place

IDS = tokens(2, 9)
KINDS: dict[str, Any] = {
    "turboconn": PATHWAYS["turboconn-3"],
    "t2mlr": PATHWAYS["t2mlr-middle"],
    "soft-token": undertow.SoftToken(0.3),
    "loop": undertow.Looped((0,), (1, 2), (3,), depth=3),
}
LAYERS = {f"model.layers.{layer}": "cpu" for layer in range(4)}
PARTS = {
    "model.embed_tokens": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
DEVICE_MAPS: dict[str, dict[str, Any]] = {
    "all": {"": "disk"},
    "model": {"model": "disk", "lm_head": "cpu"},
    "embeddings": PARTS | LAYERS | {"model.embed_tokens": "disk", "lm_head": "disk"},
    "first layer": PARTS | LAYERS | {"model.layers.0": "disk"},
    "last layer": PARTS | LAYERS | {"model.layers.3": "disk"},
}


# Each map with one kind, each kind with one map or two.
TURNS = [(list(KINDS)[index % len(KINDS)], name) for index, name in enumerate(DEVICE_MAPS)]


def of(kind: str) -> Any:
    model = hosted("llama", KINDS[kind])
    if kind == "loop":
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in find_attachment(model).parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def offloaded(model: Any, way: str, folder: Path) -> Any:
    model = copy.deepcopy(model)
    if way == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, folder, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    return model


@pytest.mark.parametrize("way", ["cpu", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_offloaded_model_computes_the_same(kind: str, way: str, tmp_path: Path) -> None:
    model = of(kind)
    got = offloaded(model, way, tmp_path)
    assert difference(logits(got, IDS), logits(model, IDS)) < ROUNDING
    assert torch.equal(generate(got, IDS), generate(model, IDS))
    assert difference(logits(model, IDS), logits(unhosted("llama"), IDS)) > CHANGED, (
        "the recurrence did nothing"
    )


@pytest.mark.parametrize("kind", ["t2mlr", "soft-token"])
def test_without_help_it_would_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: with the weights that the recurrence uses left where accelerate put them."""
    model = of(kind)
    want = logits(model, IDS)
    monkeypatch.setattr(
        importlib.import_module("undertow.host.intercept"), "bring_in", lambda recurrence: None
    )
    monkeypatch.setattr("undertow.host.offloading.offloading_hooks", lambda module: [])
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError, undertow.DivergedError)):
        assert difference(logits(offloaded(model, "cpu", tmp_path), IDS), want) < ROUNDING


@pytest.mark.parametrize(("kind", "name"), TURNS)
def test_a_folder_loads_with_the_base_models_device_map(
    kind: str, name: str, tmp_path: Path
) -> None:
    model, given = of(kind), dict(DEVICE_MAPS[name])
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=given, offload_folder=tmp_path / "kept"
    )
    assert given == DEVICE_MAPS[name]
    assert any(p.is_meta for p in loaded.parameters())
    assert difference(logits(loaded, IDS), logits(model, IDS)) < ROUNDING
    assert torch.equal(generate(loaded, IDS), generate(model, IDS))
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert difference(logits(again, IDS), logits(model, IDS)) < ROUNDING


@pytest.mark.parametrize(("kind", "name"), TURNS)
def test_attaching_to_an_offloaded_model(kind: str, name: str, tmp_path: Path) -> None:
    unhosted("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", device_map=DEVICE_MAPS[name], offload_folder=tmp_path / "kept"
    )
    undertow.attach(base, KINDS[kind])
    own, model = find_attachment(base), of(kind)
    assert not any(p.is_meta for p in own.parameters())
    own.load_state_dict(find_attachment(model).state_dict())
    assert difference(logits(base, IDS), logits(model, IDS)) < ROUNDING
    assert torch.equal(generate(base, IDS), generate(model, IDS))


def test_an_adapter_on_an_offloaded_model(tmp_path: Path) -> None:
    config = LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["recurrence"], task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(hosted("llama", "t2mlr-middle"), config).eval()
    want = logits(model, IDS)
    model.save_pretrained(tmp_path)
    loaded: Any = PeftModel.from_pretrained(unhosted("llama"), tmp_path).eval()
    cpu_offload(loaded, execution_device=torch.device("cpu"))
    assert difference(logits(loaded, IDS), want) < ROUNDING


def test_an_outline_has_no_weights() -> None:
    with torch.device("meta"):
        model = undertow.attach(unhosted("llama").to("meta"), KINDS["t2mlr"])
    assert all(p.is_meta for p in recurrent_parameters(model).values())


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({"": 0}, {}),
        ({"model": 0, "lm_head": 1}, {}),
        ({"model.layers": 1, "model.norm": 0}, {"model.recurrence": 1}),
        ({"model.layers.0": "disk", "model.layers.1": 0}, {"model.recurrence": "disk"}),
        ({"model.layers.0.mlp": 3, "model.layers.0.self_attn": 4}, {"model.recurrence": 3}),
        ({"model.recurrence": 5, "model.layers": 1}, {}),
        ({"elsewhere": 0}, {}),
    ],
)
def test_the_place_of_a_recurrence(given: dict[str, Any], added: dict[str, Any]) -> None:
    placed = dict(given)
    place(placed, "model.layers", "model.recurrence")
    assert placed == given | added
