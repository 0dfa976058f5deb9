"""From a recipe to a model: from scratch in the shape that was asked for, or loaded; every failure
is a clear error."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

import undertow
from undertow import Sequential
from undertow.errors import CheckpointError, ConfigError, UnsupportedArchitectureError
from undertow.host.attachment import find_attachment
from undertow.lab.runs.loading import load
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training.build import build
from undertow.lab.training.from_scratch import from_scratch

TOKENIZER = character_tokenizer("01=")
IDS = torch.tensor([[3, 4, 4, 5, 3, 1]])


def saved(folder: Path, recurrence: undertow.pathways.Recurrence | None = None) -> Path:
    """A tiny pretrained model and its tokenizer."""
    torch.manual_seed(1)
    model = from_scratch(ModelSection(width=16, heads=2, positions=64), TOKENIZER)
    if recurrence is not None:
        undertow.attach(model, recurrence)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "checkpoint")


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    output: torch.Tensor = model.eval()(input_ids=IDS).logits
    return output


# From scratch


def test_further_settings_are_the_architectures_own(tmp_path: Path) -> None:
    def moved(settings: dict[str, Any]) -> bool:
        """Whether logits change when all positions are stretched, which a shift alone would not do
        to rotary ones."""
        changes = {"architecture": "smollm3", "settings": settings}
        model, _ = build(tiny.recipe(tmp_path, model=changes), seed=0)
        apart = (
            model(input_ids=IDS, position_ids=3 * torch.arange(IDS.shape[1])[None]).logits
            - model(input_ids=IDS).logits
        )
        return float(apart.detach().abs().max()) > 1e-4

    assert moved({}) and not moved({"no_rope_layers": [0, 0]})
    for settings, expected in (
        (
            {"no_rope_layer": [0, 0]},
            "holds no_rope_layer, but smollm3 has no setting of that name; did you mean "
            "'no_rope_layers'?",
        ),
        ({"hidden_size": 8}, "holds hidden_size, which is model.width here; set that"),
        (
            {"intermediate_size": 8},
            "holds intermediate_size, which is model.feed_forward here; set that",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            moved(settings)
        assert expected in str(error.value)


@pytest.mark.parametrize(
    "recurrence", [tiny.TURBOCONN, tiny.T2MLR, None], ids=["turboconn", "t2mlr", "plain"]
)
@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", LlamaForCausalLM),
        ("qwen3", Qwen3ForCausalLM),
        ("gpt2", GPT2LMHeadModel),
        ("opt", OPTForCausalLM),
        ("falcon", PreTrainedModel),
    ],
)
def test_from_scratch(architecture: str, expected: type, recurrence: Any, tmp_path: Path) -> None:
    recipe = tiny.recipe(
        tmp_path, model={"architecture": architecture, "feed_forward": 24}, recurrence=recurrence
    )
    model, tokenizer = build(recipe, seed=0)
    assert isinstance(model, expected)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 16, 2)
    assert config.vocab_size == len(tokenizer) == len("01=") + 3
    assert (config.pad_token_id, config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    widths = {
        size
        for name, weight in model.named_parameters()
        if "mlp" in name or "fc" in name
        for size in weight.shape
    }
    assert 24 in widths, f"feed_forward was not taken: {widths}"
    hosted = {name for name, _ in model.named_parameters() if ".recurrence." in name}
    assert bool(hosted) == (recurrence is not None)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_every_shape_setting_reaches_the_model() -> None:
    section = ModelSection(
        layers=3,
        width=24,
        heads=4,
        key_value_heads=2,
        feed_forward=40,
        positions=128,
        initializer_range=0.5,
    )
    config = from_scratch(section, TOKENIZER).config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (3, 24, 4)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (2, 6, 40)
    assert (config.max_position_embeddings, config.initializer_range) == (128, 0.5)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, recurrence=tiny.TURBOCONN)
    first, again, other = (build(recipe, seed)[0].state_dict() for seed in (3, 3, 4))
    assert tiny.equal(first, again)
    assert not tiny.equal(first, other)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            {"architecture": "lama"},
            "'lama' is no causal language model that transformers knows; did you mean 'llama'?",
        ),
        ({"architecture": "t5"}, "'t5' is no causal language model"),
        ({"architecture": "undertow"}, "'undertow' is no causal language model"),
        (
            {"architecture": "bloom", "feed_forward": 24},
            "model.feed_forward is set, but bloom has no such setting; remove it",
        ),
        (
            {"architecture": "gpt2", "key_value_heads": 1},
            "model.key_value_heads is set, but gpt2 has no such setting",
        ),
        (
            {"width": 20, "heads": 4},
            "model.architecture 'llama' cannot be built from scratch in this shape: ",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(
    model: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tiny.recipe(tmp_path, model=model), seed=0)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 250, "a sentence, and not a list of all architectures"


def test_free_text_needs_a_pretrained_tokenizer(tmp_path: Path) -> None:
    recipe = tiny.recipe(
        tmp_path, task={"kind": "gsm8k", "train": "a.jsonl"}, evaluation={"lengths": []}
    )
    with pytest.raises(
        ConfigError,
        match=r"gsm8k is free text, which needs a pretrained model's tokenizer; set model\.path",
    ):
        build(recipe, seed=0)


def test_recurrence_must_fit(tmp_path: Path) -> None:
    outside = {"kind": "t2mlr", "first_layer": 0, "last_layer": 2}
    with pytest.raises(ConfigError, match="2"):
        build(tiny.recipe(tmp_path, recurrence=outside), seed=0)
    with pytest.raises(UnsupportedArchitectureError, match="rwkv"):
        build(
            tiny.recipe(tmp_path, model={"architecture": "rwkv"}, recurrence=tiny.TURBOCONN), seed=0
        )


# Loading


def test_load_gives_the_saved_model_in_fp32_and_a_tokenizer_that_pads_left(
    checkpoint: Path,
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    model, tokenizer = load(str(checkpoint))
    assert tiny.equal(model.state_dict(), tiny.weights(checkpoint))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert tokenizer.padding_side == "left"
    assert tokenizer("1=").input_ids == TOKENIZER("1=").input_ids


def test_load_pads_with_the_end_token_where_there_is_no_padding_token(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    tokenizer = character_tokenizer("01=")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    _, loaded = load(str(folder))
    assert loaded.pad_token_id == loaded.eos_token_id is not None


def test_a_pretrained_model_starts_as_itself(checkpoint: Path, tmp_path: Path) -> None:
    plain, _ = load(str(checkpoint))
    model, _ = build(
        tiny.recipe(tmp_path, model={"path": str(checkpoint)}, recurrence=tiny.TURBOCONN), seed=0
    )
    torch.testing.assert_close(logits(model), logits(plain))


def test_a_saved_recurrence_comes_with_its_model_and_takes_the_solver(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hosted", undertow.T2MLR(0, 1))
    solver = {"kind": "sequential", "gradient": "truncated(2)"}
    model, _ = build(tiny.recipe(tmp_path, model={"path": str(folder)}, solver=solver), seed=0)
    assert find_attachment(model).settings == undertow.T2MLR(0, 1)
    assert find_attachment(model).solver == Sequential("truncated(2)")
    again = tiny.recipe(tmp_path, model={"path": str(folder)}, recurrence=tiny.TURBOCONN)
    with pytest.raises(ConfigError, match="already has a recurrence"):
        build(again, seed=0)


def test_load_refuses_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is no checkpoint: it has no config\.json; give a folder"
    ):
        load(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        load(str(tmp_path / "file"))


@pytest.mark.parametrize(
    "name", ["nowhere", "no/where", "no/where/at/all", "./nowhere", "/no/where"]
)
def test_load_refuses_a_missing_path(name: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"there is no folder {name} and no model of that name: ."
    ):
        load(name)


def test_load_refuses_damaged_weights(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="no model could be loaded from"):
            load(str(checkpoint))
    path.write_bytes(whole)
    load(str(checkpoint))


def test_load_refuses_damaged_weights_of_a_hosted_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hosted", undertow.T2MLR(0, 1))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        load(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_load_refuses_a_folder_with_a_spoilt_or_missing_file(name: str, checkpoint: Path) -> None:
    (checkpoint / name).write_text('{"half": ')
    with pytest.raises(CheckpointError, match=name.partition(".")[0]):
        load(str(checkpoint))
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError):
        load(str(checkpoint))


def test_load_never_fills_in_missing_weights(checkpoint: Path) -> None:
    weights = tiny.weights(checkpoint)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"lacks 1 weights of its model, model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        load(str(checkpoint))


def test_load_refuses_weights_of_another_shape(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    config.intermediate_size += 8
    config.save_pretrained(checkpoint)
    with pytest.raises(CheckpointError, match="no model could be loaded from"):
        load(str(checkpoint))
