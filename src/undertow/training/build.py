"""From a recipe to a model and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from undertow.errors import CheckpointError, ConfigError, UndertowError
from undertow.host import attach
from undertow.tasks import character_tokenizer
from undertow.training.recipe import LoRASection, ModelSection, Recipe


def build(recipe: Recipe, seed: int) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model of a recipe, recurrence attached, and its tokenizer.

    Raises:
        ConfigError, CheckpointError, UnsupportedArchitectureError: the model cannot be made or loaded, or the recurrence
            does not fit it.
    """
    torch.manual_seed(seed)
    if recipe.model.path is not None:
        model, tokenizer = load(recipe.model.path)
    else:
        tokenizer = tokenizer_for(recipe)
        model = from_scratch(recipe.model, tokenizer)
    if recipe.recurrence is not None:
        attach(model, recipe.recurrence, recipe.solver)
    return (model if recipe.lora is None else with_adapters(model, recipe.lora, recipe.recurrence is not None)), tokenizer


def load(path: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """A pretrained model in fp32 and its tokenizer, from a folder or a hub name.

    Raises:
        CheckpointError: there is no model there, or it cannot be loaded.
    """
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has no config.json; give a folder that save_pretrained wrote")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except UndertowError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"no model could be loaded from {path}: {reason}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return model, tokenizer


def tokenizer_for(recipe: Recipe) -> PreTrainedTokenizerBase:
    characters = recipe.task.characters()
    if characters is None:
        raise ConfigError(
            f"task {recipe.task.kind} is free text, which needs a pretrained model's tokenizer; set model.path"
        )
    return character_tokenizer(characters)


def from_scratch(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A model with random weights in the shape that the section asks for."""
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": section.width,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.key_value_heads or section.heads,
        "head_dim": section.width // section.heads,
        "intermediate_size": section.feed_forward or -(-8 * section.width // 24) * 8,
        "max_position_embeddings": section.positions,
        "initializer_range": section.initializer_range or section.width**-0.5,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    try:
        config = AutoConfig.for_model(section.architecture, **settings)
        model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.architecture {section.architecture!r} cannot be built from scratch: {reason}") from error
    return model


def with_adapters(model: Any, section: LoRASection, recurrence: bool) -> Any:
    """The model with LoRA adapters, trained beside a whole recurrence."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError('lora needs the package peft; install it with: pip install "undertow[train]"') from error
    head = model.get_output_embeddings()
    targets = list(section.targets or ()) or sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head and ".recurrence." not in f".{name}"
        }
    )
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha or section.rank,
        lora_dropout=section.dropout,
        target_modules=targets,
        exclude_modules=[".*recurrence.*"] if recurrence else None,
        modules_to_save=["recurrence"] if recurrence else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def quiet_libraries() -> None:
    """Keep the libraries' notes out of our own output; their errors still come through as exceptions."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
