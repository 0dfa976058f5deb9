"""The LSTM and pause tokens: padding changes nothing, they save and load, and recipes train
them."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import zoo
from transformers import AutoModelForCausalLM

import undertow
from undertow.errors import ConfigError
from undertow.lab.training import train
from undertow.lab.training.build import build
from undertow.models import LSTMConfig, LSTMForCausalLM, PauseForCausalLM, with_pauses

IDS = torch.randint(2, 30, (2, 9), generator=torch.Generator().manual_seed(1))


def lstm() -> Any:
    torch.manual_seed(0)
    config = LSTMConfig(
        vocab_size=zoo.VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        pad_token_id=0,
        initializer_range=1.0,
    )
    return LSTMForCausalLM(config).eval()


def paused(pauses: int = 1, tied: bool = False) -> Any:
    torch.manual_seed(0)
    base = zoo.build("llama")
    if tied:
        config = base.config
        config.tie_word_embeddings = True
        base = AutoModelForCausalLM.from_config(config)
    return with_pauses(base, pauses).eval()


MODELS = {"lstm": lstm, "paused": paused, "three pauses": lambda: paused(3)}


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, **inputs).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_same_alone_and_padded_on_either_side(name: str) -> None:
    model = MODELS[name]()
    alone = logits(model, IDS)
    assert alone.shape == (2, 9, zoo.VOCAB)
    junk = torch.full((2, 3), 7)
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 9)], dim=1).long()
    left = logits(model, torch.cat([junk, IDS], dim=1), attention_mask=mask)[:, 3:]
    right = logits(model, torch.cat([IDS, junk], dim=1), attention_mask=mask.flip(1))[:, :9]
    assert torch.allclose(left, alone, atol=1e-4) and torch.allclose(right, alone, atol=1e-4)
    unmasked = logits(model, torch.cat([junk, IDS], dim=1))[:, 3:]
    assert not torch.allclose(unmasked, alone, atol=1e-3), "the control: what is not masked counts"


@pytest.mark.parametrize("name", MODELS)
def test_a_token_sees_none_that_follow(name: str) -> None:
    model, changed = MODELS[name](), IDS.clone()
    changed[:, 5] = (changed[:, 5] + 3) % 20
    before, after = logits(model, IDS), logits(model, changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-5)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).min() > 1e-6, "later tokens see it"


@pytest.mark.parametrize("name", MODELS)
def test_generated_text_is_that_of_whole_forwards(name: str) -> None:
    model = MODELS[name]()
    ids = IDS[:1, :4]
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, use_cache=True
    )
    for end in range(4, text.shape[1]):
        assert text[0, end] == logits(model, text[:, :end])[0, -1].argmax()


@pytest.mark.parametrize(
    "make", [*MODELS.values(), lambda: paused(tied=True)], ids=[*MODELS, "tied"]
)
def test_saved_and_loaded_it_is_the_same(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors"))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.allclose(logits(loaded.eval(), IDS), logits(model, IDS), atol=1e-6)


def test_the_loss_is_the_shifted_cross_entropy() -> None:
    for make in MODELS.values():
        model = make()
        found = model(input_ids=IDS, labels=IDS).loss
        expected = torch.nn.functional.cross_entropy(
            logits(model, IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
        )
        assert float(found.detach()) == pytest.approx(float(expected), abs=1e-5)


def test_a_pause_is_a_token_of_the_base_model() -> None:
    """Against the base model on a sequence whose pauses are written out as the last token of its
    vocabulary."""
    model = paused()
    with torch.no_grad():
        model.base.get_input_embeddings().weight[zoo.VOCAB - 1] = model.pause
    written = torch.stack([IDS, torch.full_like(IDS, zoo.VOCAB - 1)], dim=2).flatten(1)
    assert torch.allclose(logits(model, IDS), logits(model.base, written)[:, 1::2], atol=1e-5)
    assert model.num_parameters() == model.base.num_parameters() + 32


@pytest.mark.parametrize(
    "changes", [{"architecture": "lstm"}, {"pauses": 1}], ids=["lstm", "pauses"]
)
def test_recipes_train_them(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, model=changes)
    folder = train(recipe, seed=0)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    start, _ = build(recipe, seed=0)
    assert isinstance(loaded, LSTMForCausalLM | PauseForCausalLM) and type(loaded) is type(start)
    ids = torch.tensor([[3, 4, 4, 5]])
    assert not torch.allclose(logits(loaded, ids), logits(start.eval(), ids), atol=1e-3), (
        "nothing was learnt"
    )


def test_neither_takes_a_recurrence(tmp_path: Path) -> None:
    with pytest.raises(undertow.UnsupportedArchitectureError, match="no lists of decoder layers"):
        undertow.attach(lstm(), undertow.T2MLR(0, 1))
    with pytest.raises(ConfigError, match="remove one of them"):
        tiny.recipe(tmp_path, model={"pauses": 1}, recurrence=tiny.T2MLR)
    with pytest.raises(ConfigError, match="pauses is -1"):
        tiny.recipe(tmp_path, model={"pauses": -1})
    with pytest.raises(ConfigError, match="takes no logits_to_keep"):
        with_pauses(lstm(), 1)
