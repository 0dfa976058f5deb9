"""From a recipe to a model and its tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from undertow.depth.handle import recurs_in_depth
from undertow.errors import CheckpointError, ConfigError, UndertowError
from undertow.host import attach, set_solver
from undertow.host.attachment import has_recurrence, recurs_in_time
from undertow.lab.runs.loading import check_model_folder, first_line, load, load_tokenizer, no_such
from undertow.lab.runs.recipe import Recipe
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training.adapters import with_adapters
from undertow.lab.training.depth import native_model
from undertow.lab.training.from_scratch import from_scratch
from undertow.models import with_pauses


def build(recipe: Recipe, seed: int) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model of a recipe, recurrence attached, and its tokenizer.

    Raises:
        ConfigError, CheckpointError, UnsupportedArchitectureError: the model cannot be made or
            loaded, or the recurrence does not fit it.
    """
    torch.manual_seed(seed)
    if recipe.model.path is not None:
        model, tokenizer = load(recipe.model.path)
    else:
        tokenizer = tokenizer_for(recipe)
        model = new_model(recipe, tokenizer)
    return equip(model, recipe), tokenizer


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The recipe's model with random weights: a native recurrent-depth one, or one of transformers'
    architectures."""
    if recipe.depth is not None and recipe.depth.shape is not None:
        return native_model(recipe.depth, recipe.model, tokenizer)
    model = from_scratch(recipe.model, tokenizer)
    return with_pauses(model, recipe.model.pauses) if recipe.model.pauses else model


def outline(recipe: Recipe) -> Any:
    """The model of a recipe as `build` makes it, on the meta device: shapes and names, no weights,
    whatever its size.

    Raises:
        ConfigError, CheckpointError, UnsupportedArchitectureError: as `build`, but that only
            `config.json` is read of a pretrained model.
    """
    with torch.device("meta"):
        if recipe.model.path is None:
            model = new_model(recipe, tokenizer_for(recipe))
        else:
            try:
                if Path(recipe.model.path).exists():
                    check_model_folder(Path(recipe.model.path))
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(recipe.model.path)
                )
            except UndertowError:
                raise
            except Exception as error:  # transformers raises any kind
                path = recipe.model.path
                what = f"{path} has no model config" if Path(path).exists() else no_such(path)
                raise CheckpointError(f"{what}: {first_line(error)}") from error
        return equip(model, recipe)


def equip(model: Any, recipe: Recipe) -> Any:
    """The model with the recipe's recurrence and its adapters."""
    if recipe.depth is not None and recipe.depth.looped is not None:
        attach(model, dataclasses.replace(recipe.depth.looped, depth=recipe.depth.mean))
    elif recipe.depth is not None and not recurs_in_depth(model):
        raise ConfigError(
            "depth says nothing of what to loop, and the model does not loop; set depth.looped or "
            "depth.shape"
        )
    if recipe.recurrence is not None:
        attach(model, recipe.recurrence, recipe.solver)
    elif has_recurrence(model):
        set_solver(model, recipe.solver)
    if recipe.depth is not None and recipe.depth.objective != "last" and recurs_in_time(model):
        raise ConfigError(
            f"depth.objective {recipe.depth.objective} weighs the loss of every iteration, which a "
            "recurrence in time runs again and again; use objective last, or leave out the "
            "recurrence"
        )
    return model if recipe.lora is None else with_adapters(model, recipe.lora)


def count_parameters(model: Any) -> dict[str, int]:
    """The parameters of a recipe's model: all, those that are trained, and of these the adapters'
    and the recurrence's."""
    named = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    # PEFT trains a copy of the recurrence and keeps the one that it copied, which does nothing.
    idle = sum(
        p.numel() for name, p in model.named_parameters() if ".recurrence.original_module." in name
    )
    return {
        "parameters": sum(p.numel() for p in model.parameters()) - idle,
        "trainable": sum(named.values()),
        "adapters": sum(count for name, count in named.items() if ".lora_" in name),
        "recurrence": sum(count for name, count in named.items() if ".recurrence." in name),
    }


def tokenizer_for(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of a model built from scratch."""
    if recipe.model.tokenizer is not None:
        return load_tokenizer(recipe.model.tokenizer)
    characters = recipe.task.characters()
    if characters is None:
        raise ConfigError(
            f"task {recipe.task.kind} is free text, which needs a pretrained model's tokenizer; "
            "set model.path or model.tokenizer"
        )
    return character_tokenizer(characters)
