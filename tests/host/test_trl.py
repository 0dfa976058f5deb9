"""Two steps of each trainer of TRL that people use, with LoRA and without, on a hosted model: the
recurrence learns, and what is saved loads as it is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PrinterCallback,
)

import undertow
from undertow import Scan, Sequential
from undertow.host.attachment import find_pathway
from undertow.lab.tasks import character_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))))
PAIRS = [{"prompt": f"q {i} =", "chosen": f" yes {i}", "rejected": " no"} for i in range(8)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "SFT": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS],
    "DPO": PAIRS,
    "GRPO": [{"prompt": row["prompt"] + "z" * (i % 3)} for i, row in enumerate(PAIRS)],
    "Reward": PAIRS,
}


def base(scores: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
        num_labels=1,
    )
    return (LlamaForSequenceClassification if scores else LlamaForCausalLM)(config)


def hosted(scores: bool = False, solver: Any = None) -> Any:
    """A model whose recurrence has begun to carry something."""
    model = undertow.attach(base(scores), undertow.T2MLR(1, 2), solver or Sequential())
    with torch.no_grad():
        for gamma in find_pathway(model).fast_parameters():
            gamma.fill_(0.5)
    return model


def many_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(letter > "O" for letter in text)) for text in completions]


def trainer_of(
    kind: str,
    model: Any,
    lora: bool,
    folder: Path,
    rewards: Mapping[str, Any] = MappingProxyType({"reward_funcs": many_letters}),
    **settings: Any,
) -> Any:
    """TRL's trainer of this kind, as its users make it."""
    more: dict[str, Any] = {"GRPO": {"num_generations": 4, "max_completion_length": 5}}.get(
        kind, {}
    )
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        **more,
        **settings,
    )
    given: dict[str, Any] = dict(rewards) if kind == "GRPO" else {}
    if kind == "DPO" and not lora:
        given["ref_model"] = copy.deepcopy(model)
    if lora:
        head = ["score"] if kind == "Reward" else []
        given["peft_config"] = LoraConfig(
            r=2,
            task_type="SEQ_CLS" if kind == "Reward" else "CAUSAL_LM",
            target_modules="all-linear",
            exclude_modules=r".*(recurrence|score).*",
            modules_to_save=["recurrence", *head],
        )
    trainer = getattr(trl, f"{kind}Trainer")(
        model,
        args=config,
        train_dataset=datasets.Dataset.from_list(ROWS[kind]),
        processing_class=TOKENIZER,
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def recurrent(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if ".recurrence." in name and parameter.requires_grad
    }


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ROWS)
def test_two_steps(kind: str, lora: bool, tmp_path: Path) -> None:
    scores = kind == "Reward"
    trainer = trainer_of(kind, hosted(scores), lora, tmp_path)
    before = recurrent(trainer.model)
    trainer.train()
    after = recurrent(trainer.model)
    assert len(before) >= 4 and not [n for n in before if torch.equal(before[n], after[n])]
    losses = logged(trainer, "loss")
    assert len(losses) == 2 and all(map(torch.isfinite, map(torch.tensor, losses)))
    if kind == "DPO":
        assert losses[0] == pytest.approx(0.6931, abs=1e-3), "the reference is the model itself"

    trainer.save_model(str(tmp_path / "saved"))
    if lora:
        again: Any = PeftModel.from_pretrained(base(scores), tmp_path / "saved")
    elif scores:
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    else:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        trained = trainer.model.eval()(ids).logits
        assert torch.allclose(again.eval()(ids).logits, trained, atol=1e-5)
        assert not torch.allclose(hosted(scores).eval()(ids).logits, trained, atol=1e-3)


def test_a_reward_model_rewards(tmp_path: Path) -> None:
    scorer = hosted(scores=True)
    given = {"reward_funcs": scorer, "reward_processing_classes": TOKENIZER}
    trainer = trainer_of("GRPO", hosted(), False, tmp_path, given)
    trainer.train()
    assert logged(trainer, "reward")[0] != 0 and logged(trainer, "reward_std")[0] > 0
    assert all(parameter.grad is None for parameter in scorer.parameters())


@pytest.mark.parametrize("solver", [Sequential(), Scan(2, 1)], ids=["exact", "scan"])
def test_only_exact_states_show_grpo_no_change_where_there_is_none(
    solver: Any, tmp_path: Path
) -> None:
    """At the first step the model still is its reference, which is evaluated by the rollout."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*only approximates")
        trainer = trainer_of("GRPO", hosted(solver=solver), True, tmp_path, beta=0.1)
        trainer.train()
    divergence = logged(trainer, "kl")[0]
    assert divergence < 1e-9 if solver.exact else divergence > 1e-7


def test_grpo_warns_of_states_that_are_not_exact_and_not_of_exact_ones(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="GRPOTrainer trains on states that scan only"):
        trainer_of("GRPO", hosted(solver=Scan(2, 1)), False, tmp_path).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*only approximates")
        trainer_of("GRPO", hosted(), False, tmp_path).train()
