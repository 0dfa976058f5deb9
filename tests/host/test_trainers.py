"""A trainer of TRL that would compare a hosted model with its plain base is refused, and one that
trains by RL on states that are not exact is told of it."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import hosted, tokens, unhosted
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import undertow
from undertow import Scan, Sequential
from undertow.errors import ConfigError
from undertow.lab.tasks import character_tokenizer

IDS = tokens(2, 5)


class DPOTrainer:
    """What the check sees of TRL's."""

    accelerator = None

    def __init__(self, ref_model: Any = None) -> None:
        self.ref_model = ref_model

    def step(self, model: Any) -> None:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()


class GRPOTrainer(DPOTrainer):
    reward_funcs = ()


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """TRL is there as far as the check can tell."""
    if "real" not in request.node.name:
        monkeypatch.setitem(sys.modules, "trl", types.ModuleType("trl"))
        for cls in (DPOTrainer, GRPOTrainer):
            monkeypatch.setattr(cls, "__module__", "trl.trainer")
    yield


def test_a_reference_without_the_recurrence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no recurrence.*ref_model=copy\.deepcopy"):
        DPOTrainer(unhosted("llama")).step(hosted("llama", "t2mlr-middle"))


def test_a_reference_with_it_and_none_pass() -> None:
    for reference in (hosted("llama", "t2mlr-middle"), None):
        DPOTrainer(reference).step(hosted("llama", "t2mlr-middle"))


def test_other_callers_and_forwards_without_gradients_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        hosted("llama", "t2mlr-middle")(input_ids=IDS)
    monkeypatch.setattr(DPOTrainer, "__module__", "elsewhere")
    DPOTrainer(unhosted("llama")).step(hosted("llama", "t2mlr-middle"))


def test_rl_on_states_that_are_not_exact_is_told() -> None:
    with pytest.warns(UserWarning, match="scan only approximates"):
        GRPOTrainer().step(hosted("llama", "t2mlr-middle", solver=Scan(2, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GRPOTrainer().step(hosted("llama", "t2mlr-middle", solver=Sequential()))
        DPOTrainer().step(hosted("llama", "t2mlr-middle", solver=Scan(2, 1)))


def test_a_folder_names_no_class_of_the_library(tmp_path: Path) -> None:
    """TRL takes the base model's class by that name, and would lose the recurrence."""
    from transformers import AutoConfig

    hosted("llama", "t2mlr-middle").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["UndertowForCausalLM"] and not config.auto_map
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), LlamaForCausalLM)


@pytest.mark.parametrize("saved", [False, True], ids=["real attached", "real folder"])
def test_dpo_starts_from_equal_models(saved: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    model: Any = unhosted("llama")
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    for folder in ("base", "hosted"):
        if folder == "hosted":
            undertow.attach(model, undertow.T2MLR(1, 2))
            with torch.no_grad():
                for gamma in undertow.host.attachment.find_pathway(model).fast_parameters():
                    gamma.fill_(0.8)
        model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    if saved:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hosted")
    else:
        model.config._name_or_path = str(tmp_path / "base")
    rows = [{"prompt": f"q {i} =", "chosen": f" yes {i}", "rejected": " no"} for i in range(8)]
    settings = trl.DPOConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to="none",
        bf16=False,
        use_cpu=True,
    )
    trainer = trl.DPOTrainer(
        model,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    if not saved:
        with pytest.raises(ConfigError, match="ref_model="):
            trainer.train()
        return
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and len(losses) == 2
