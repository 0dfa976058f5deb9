"""Low-rank adapters by PEFT, beside a whole recurrence."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from undertow.errors import ConfigError, nearest
from undertow.host.attachment import has_recurrence
from undertow.lab.runs.recipe import LoRASection


def with_adapters(model: Any, section: LoRASection) -> Any:
    """The model with LoRA adapters, trained beside a whole recurrence.

    Raises:
        ConfigError: PEFT is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(
            'lora needs the package peft; install it with: pip install "undertow[train]"'
        ) from error
    head = model.get_output_embeddings()
    linear: dict[str, bool] = {}  # by name: whether any is not the head
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and ".recurrence." not in f".{name}":
            last = name.rpartition(".")[2]
            linear[last] = linear.get(last, False) or module is not head
    for target in section.targets or ():
        if target not in linear:
            raise ConfigError(
                f"lora.targets names {target!r}, but the linear layers of the base model are "
                f"{', '.join(sorted(linear))}{nearest(target, linear)}"
            )
    recurrence = has_recurrence(model)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha or section.rank,
        lora_dropout=section.dropout,
        target_modules=list(section.targets or [name for name, inner in linear.items() if inner]),
        exclude_modules=r"(.*\.)?recurrence\..*" if recurrence else None,
        modules_to_save=["recurrence"] if recurrence else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
