"""A model that scores sequences, as a reward model does, carries a recurrence as one that writes
text does, and is made from one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from helpers import (
    CHANGED,
    PATHWAYS,
    ROUNDING,
    SAME,
    difference,
    hosted,
    logits,
    randomize,
    tokens,
    unhosted,
)
from peft import LoraConfig, PeftModel, get_peft_model
from small_looped import LOOPS
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import undertow
from undertow import CheckpointError, Sequential, UndertowError

# A head of the library's common class and heads of their own, stacks within a decoder, an encoder
# of images beside it.
CLASSES = {
    "llama": ("LlamaForSequenceClassification", "t2mlr-middle"),
    "qwen3_swa": ("Qwen3ForSequenceClassification", "turboconn-3"),
    "gpt2": ("GPT2ForSequenceClassification", "t2mlr-whole"),
    "opt": ("OPTForSequenceClassification", "turboconn-1"),
    "bloom": ("BloomForSequenceClassification", "t2mlr-middle"),
}
IDS = tokens(2, 9)


def scorer(name: str, labels: int = 1) -> Any:
    """A plain tiny model that scores, of a language model's config."""
    config = copy.deepcopy(unhosted(name).config)
    config.num_labels = labels
    torch.manual_seed(0)
    return getattr(transformers, CLASSES[name][0])(config).eval()


def hosted_scorer(name: str = "llama") -> Any:
    recurrence = PATHWAYS[CLASSES[name][1]]
    return randomize(undertow.attach(scorer(name), recurrence, Sequential()))


@pytest.mark.parametrize("name", CLASSES)
def test_it_starts_as_the_base_model_and_equals_the_rollout(name: str) -> None:
    base = scorer(name)
    plain = logits(base, IDS)
    model: Any = undertow.attach(scorer(name), PATHWAYS[CLASSES[name][1]], Sequential())
    assert torch.allclose(logits(model, IDS), plain, atol=1e-5)
    randomize(model)
    scores = logits(model, IDS)
    assert scores.shape == (2, 1) and difference(scores, plain) > CHANGED
    training = model(input_ids=IDS).logits  # with a graph
    assert difference(training.detach(), scores) < SAME
    training.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".recurrence." in n)


def test_a_padded_row_equals_the_row_alone() -> None:
    model = hosted_scorer()
    padded, mask = IDS.clone(), torch.ones_like(IDS)
    padded[1, 6:], mask[1, 6:] = 0, 0
    together = logits(model, padded, attention_mask=mask)
    assert torch.allclose(together[1:], logits(model, IDS[1:, :6]), atol=1e-5)
    assert not torch.allclose(together[1:], logits(model, IDS[1:]), atol=1e-3), "the control"


def test_its_states_are_those_of_the_language_model() -> None:
    """The same weights and tokens: the head reads what the other head reads."""
    writer = hosted("llama", "t2mlr-middle")
    model = undertow.attach(scorer("llama"), PATHWAYS["t2mlr-middle"])
    model.model.load_state_dict(writer.model.state_dict())
    last = writer(IDS, output_hidden_states=True).hidden_states[-1][:, -1]
    assert torch.allclose(model(IDS).logits, model.score(last), atol=1e-5)


def test_a_recurrent_mask_reaches_the_backbone() -> None:
    model = hosted_scorer()
    none = logits(model, IDS, recurrent_mask=torch.zeros_like(IDS))
    undertow.detach(model)
    assert torch.allclose(none, logits(model, IDS), atol=1e-5)


def test_a_saved_folder_loads_as_it_was_and_is_no_language_model(tmp_path: Path) -> None:
    model = hosted_scorer()
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is type(model) and again.config.num_labels == 1
    assert difference(logits(again, IDS), logits(model, IDS)) < ROUNDING
    with pytest.raises(CheckpointError, match="LlamaForSequenceClassification, which writes no"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="load it with AutoModelForSequenceClassification"):
        type(model).from_pretrained(tmp_path)


def test_a_language_models_folder_gives_all_but_the_head(tmp_path: Path) -> None:
    writer = hosted("llama", "t2mlr-middle")
    writer.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert logits(model, IDS).shape == (2, 1)
    own, other = model.model.state_dict(), writer.model.state_dict()
    assert own.keys() == other.keys() and all(torch.equal(own[key], other[key]) for key in own)
    model.save_pretrained(tmp_path / "scorer")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer")
    assert difference(logits(again, IDS), logits(model, IDS)) < ROUNDING


def test_a_folder_that_lacks_more_than_the_head_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hosted("llama", "t2mlr-middle").save_pretrained(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    del kept["model.layers.2.mlp.up_proj.weight"]
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights, model\.layers\.2"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)


def test_an_adapter_with_head_and_recurrence_loads(tmp_path: Path) -> None:
    base = scorer("llama")
    settings = LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["q_proj"], modules_to_save=["recurrence", "score"]
    )
    model: Any = get_peft_model(
        undertow.attach(copy.deepcopy(base), PATHWAYS["t2mlr-middle"]), settings
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 if "gamma" in name else 0.02)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert difference(logits(again, IDS), logits(model.eval(), IDS)) < ROUNDING
    assert difference(logits(base, IDS), logits(model, IDS)) > CHANGED, "the control"


def test_a_loop_runs_under_the_head_and_soft_tokens_are_refused() -> None:
    model: Any = undertow.attach(scorer("llama"), LOOPS["plain"])
    assert difference(logits(model, IDS, depth=4), logits(model, IDS, depth=1)) > CHANGED
    with pytest.raises(UndertowError, match="no language-model head"):
        undertow.attach(scorer("llama"), undertow.SoftToken(0.2))


def test_what_the_library_cannot_score_with_is_told(tmp_path: Path) -> None:
    name = "nanochat"
    assert name in zoo.ARCHITECTURES
    undertow.attach(unhosted(name), PATHWAYS["t2mlr-middle"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no model of this kind that scores"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
