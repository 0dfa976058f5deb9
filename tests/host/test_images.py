"""Models that also read images: exact where their tokens see earlier ones alone, refused by name
where they do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import (
    CACHE,
    CHANGED,
    PATHWAYS,
    ROUNDING,
    difference,
    hosted,
    logits,
    randomize,
    tokens,
    unhosted,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import undertow
from undertow import UnsupportedArchitectureError
from undertow.host import forward, stack
from undertow.host.attachment import find_attachment

IMAGE = 150
TEXT: dict[str, Any] = dict(
    vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
) | dict(
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, image_size=28
)
PIXELS = {"pixel_values": torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))}
Made = tuple[PreTrainedModel, dict[str, Any]]


def prompt() -> torch.Tensor:
    ids = torch.randint(2, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    ids[0, 3:7] = IMAGE
    return ids


def llava() -> Made:
    vision = transformers.CLIPVisionConfig(**VISION, patch_size=14, projection_dim=32)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=vision,
        image_token_id=IMAGE,
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config), PIXELS


def gemma3() -> Made:
    text = transformers.Gemma3TextConfig(
        **TEXT,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    vision = transformers.SiglipVisionConfig(**VISION, patch_size=14)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config), {
        "token_type_ids": (prompt() == IMAGE).long(),
        **PIXELS,
    }


def qwen(version: str) -> Made:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
    }
    vision = dict(
        depth=3,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        patch_size=14,
        spatial_merge_size=2,
    )
    vision |= dict(temporal_patch_size=2, out_hidden_size=32)
    vision |= (
        dict(num_position_embeddings=16, deepstack_visual_indexes=[0, 1])
        if version == "3"
        else dict(window_size=28)
    )
    kind = "Qwen3VL" if version == "3" else "Qwen2_5_VL"
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | {"rope_parameters": rope, "head_dim": 8},
        vision_config=vision,
        image_token_id=IMAGE,
    )
    inputs = {
        "pixel_values": torch.randn(
            16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(1)
        ),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (prompt() == IMAGE).int(),
    }
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), inputs


EXACT: dict[str, Callable[[], Made]] = {"llava": llava, "qwen2.5-vl": lambda: qwen("2.5")}
REFUSED: dict[str, Callable[[], Made]] = {"gemma3": gemma3, "qwen3-vl": lambda: qwen("3")}


def made(make: Callable[[], Made]) -> Made:
    torch.manual_seed(0)
    model, inputs = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    return model.eval(), inputs


@pytest.mark.parametrize("kind", ["turboconn-3", "t2mlr-middle"])
@pytest.mark.parametrize("name", EXACT)
def test_an_untrained_recurrence_changes_nothing(name: str, kind: str) -> None:
    model, inputs = made(EXACT[name])
    want = logits(model, prompt(), **inputs)
    undertow.attach(model, PATHWAYS[kind])
    assert len(find_attachment(model).layouts) == 4
    assert difference(logits(model, prompt(), **inputs), want) < ROUNDING
    randomize(model)
    assert difference(logits(model, prompt(), **inputs), want) > CHANGED, (
        "the recurrence does nothing"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_would_it_is_refused_by_name(name: str) -> None:
    model, inputs = made(REFUSED[name])
    want, text = logits(model, prompt(), **inputs), logits(model, tokens(2, 9))
    undertow.attach(model, PATHWAYS["t2mlr-middle"])
    assert difference(logits(model, tokens(2, 9)), text) < ROUNDING
    for run in (logits, lambda m, ids, **given: m.generate(ids, max_new_tokens=2, **given)):
        with pytest.raises(
            UnsupportedArchitectureError, match="give it text, or take the recurrence off"
        ):
            run(model, prompt(), **inputs)
    assert difference(logits(model, tokens(2, 9)), text) < ROUNDING, (
        "the refused call left something behind"
    )
    assert torch.equal(logits(undertow.detach(model), prompt(), **inputs), want)


def test_without_the_check_it_would_pass_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made(gemma3)
    want = logits(model, prompt(), **inputs)
    undertow.attach(model, PATHWAYS["t2mlr-middle"])
    monkeypatch.setattr(forward, "check_masks", lambda *args: None)
    assert difference(logits(model, prompt(), **inputs), want) > CHANGED


def test_a_loop_alone_runs_images_too() -> None:
    model, inputs = made(gemma3)
    want = logits(model, prompt(), **inputs)
    undertow.attach(model, undertow.Looped((0,), (1, 2), (3,), depth=1))
    assert difference(logits(model, prompt(), **inputs), want) < ROUNDING


def test_a_folder_of_one_loads(tmp_path: Path) -> None:
    model, inputs = made(llava)
    randomize(undertow.attach(model, PATHWAYS["t2mlr-middle"])).save_pretrained(tmp_path)
    for loader in (AutoModelForCausalLM, AutoModelForImageTextToText):
        loaded = loader.from_pretrained(tmp_path, attn_implementation="eager")
        assert (
            loaded.config._attn_implementation
            == loaded.config.get_text_config()._attn_implementation
            == "eager"
        )
        assert (
            difference(logits(loaded, prompt(), **inputs), logits(model, prompt(), **inputs)) < 1e-4
        )


# --- text


def test_a_mask_of_the_users_must_be_causal() -> None:
    model, ids = hosted("llama", "t2mlr-middle"), tokens(2, 9)
    causal = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    assert difference(logits(model, ids, attention_mask=causal), logits(model, ids)) < 1e-4
    prefix = causal.clone()
    prefix[:, :, :4, :4] = True
    for mask in (
        prefix,
        torch.zeros(2, 1, 9, 9).masked_fill(~prefix, torch.finfo(torch.float32).min),
    ):
        with pytest.raises(UnsupportedArchitectureError, match="lets tokens attend to later ones"):
            logits(model, ids, attention_mask=mask)
    cache = model(input_ids=ids[:, :5], use_cache=True)[CACHE]
    with pytest.raises(UnsupportedArchitectureError, match="lets tokens attend to later ones"):
        model(
            input_ids=ids[:, 5:],
            attention_mask=torch.ones(2, 1, 4, 9, dtype=torch.bool),
            **{CACHE: cache},
        )


def test_a_mask_whose_true_means_hidden_is_read_so() -> None:
    model, ids, mask = (
        hosted("mpt", "t2mlr-middle"),
        tokens(2, 9),
        torch.ones(2, 9, dtype=torch.long),
    )
    mask[0, :3] = 0
    layout = find_attachment(model).layouts[0]
    assert layout.inverted and layout.inverted <= layout.masks
    assert not find_attachment(hosted("llama", "t2mlr-middle")).layouts[0].inverted
    alone = logits(model, ids[:1, 3:])
    assert difference(logits(model, ids, attention_mask=mask)[:1, 3:], alone) < 5e-4


def test_a_bidirectional_model_is_refused() -> None:
    model = unhosted("llama")
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UnsupportedArchitectureError, match="its attention is bidirectional"):
        undertow.attach(model, PATHWAYS["t2mlr-middle"])


class Adding(nn.Module):
    """A layer list's owner that changes the residual stream between its layers, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def run(self, layers: Any, hidden: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            hidden = layer(hidden)
            hidden = hidden.add_(1) if self.in_place else hidden + 1
        return hidden


class Plain:
    """A hosted forward that runs the layers as they are."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.stack, self.arity, self.ran = layers, 0, False

    def stand_ins(self, layers: list[nn.Module]) -> list[Any]:
        return list(stack.recorders(self, layers))

    def run(self, recording: Any) -> torch.Tensor:
        return recording.hidden


@pytest.mark.parametrize("in_place", [True, False])
def test_a_stream_that_is_changed_between_layers_is_noticed(in_place: bool) -> None:
    layers = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Identity()])
    layers.__class__ = stack.Stack
    token = stack.current_forward.set(Plain(layers))
    try:
        with pytest.raises(UnsupportedArchitectureError, match=r"gave was changed before layer"):
            Adding(in_place).run(layers, torch.zeros(1, 2, 4))
        hidden = torch.zeros(1, 2, 4)
        for layer in layers:
            hidden = layer(hidden)
    finally:
        stack.current_forward.reset(token)
