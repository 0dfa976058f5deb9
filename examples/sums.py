"""What the examples of this folder train, made on the spot so that they run offline in seconds: a
small model of characters, and sums to learn. In its place goes any model and data of yours."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from undertow.lab.tasks import character_tokenizer

tokenizer = character_tokenizer("0123456789+= ")


def base_model() -> LlamaForCausalLM:
    """Stands for `AutoModelForCausalLM.from_pretrained(...)`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def sums(count: int = 256) -> Dataset:
    """Prompts such as `3+4=`, the right answer, `7`, and a wrong one."""
    generator = random.Random(0)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        a, b = generator.randrange(5), generator.randrange(5)
        wrong = generator.choice([digit for digit in range(10) if digit != a + b])
        rows.append({"prompt": f"{a}+{b}=", "right": str(a + b), "wrong": str(wrong)})
    return Dataset.from_list(rows)


def settings(steps: int, rate: float = 3e-3, batch: int = 16) -> dict[str, Any]:
    """What all trainers are given here."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": rate,
        "logging_steps": 5,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,  # the defaults are for a GPU
        "use_cpu": True,
    }
