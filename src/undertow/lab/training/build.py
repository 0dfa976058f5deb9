"""From a recipe to a model and its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from undertow.errors import CheckpointError, ConfigError, UndertowError, nearest
from undertow.host import attach, set_solver
from undertow.host.attach import has_recurrence, recurs_in_time
from undertow.lab.tasks import character_tokenizer
from undertow.lab.tasks.tokenizer import ids_of
from undertow.lab.training.depth import native_model
from undertow.lab.training.recipe import MOST_LAYERS, LoRASection, ModelSection, Recipe
from undertow.manifest import check_model
from undertow.models import HuginnForCausalLM, LSTMConfig, with_pauses
from undertow.paths import takes_paths
from undertow.reading import check_file, is_special, read_json, shown

ADAPTER = "adapter_config.json"
# What the architectures call a setting that not all of them have.
NAMES = {
    "key_value_heads": ("num_key_value_heads",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "initializer_range": ("initializer_range", "init_std"),
}
# What all of them have, and the keys of a recipe's model for it.
KEYS = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "positions",
    "tie_word_embeddings": "tied",
}


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
    elif recipe.depth is not None and not loops(model):
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


def load(path: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """A pretrained model in fp32 and its tokenizer, from a folder or a hub name; adapters are
    merged into their base model.

    Raises:
        CheckpointError: there is no model there, or it cannot be loaded.
    """
    check_model(Path(path))
    if (Path(path) / ADAPTER).is_file():
        return load_adapter(Path(path))
    exists = Path(path).exists()
    if exists:
        check_model_folder(Path(path))
    kind = "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        kind = "model"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
        model, info = loaded
    except UndertowError:
        raise
    except Exception as error:  # transformers, safetensors and tokenizers raise any kind
        what = f"no {kind} could be loaded from {path}" if exists else no_such(path)
        raise CheckpointError(f"{what}: {first_line(error)}") from error
    if info["missing_keys"]:  # transformers would fill them with random numbers
        missing_keys = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{path} lacks {len(missing_keys)} weights of its model, {missing_keys[0]} among them"
        )
    check_tokens(model, tokenizer, path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return model, tokenizer


def check_model_folder(folder: Path) -> None:
    """Look at a model's folder before transformers does, which would wait for a pipe and build any
    number of layers.

    Raises:
        CheckpointError: there is no model config, it is malformed, or something in the folder is no
            file.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no config.json; give a folder that save_pretrained "
            "wrote"
        )
    check_files(folder)


def check_files(folder: Path) -> None:
    """Refuse a folder that holds a pipe or a device, at which whoever reads it would wait, or a
    damaged config.

    Raises:
        CheckpointError: it does; damage is told with its line.
    """
    mend = "the file is damaged; take it from where the folder is from"
    for held in sorted(folder.iterdir()) if folder.is_dir() else []:
        if is_special(held):
            check_file(held, CheckpointError)
        if held.name.endswith("config.json") and held.is_file():
            config = read_json(held, CheckpointError, mend)
            if not isinstance(config, dict):
                raise CheckpointError(f"{held} holds {shown(config)} and no config: {mend}")
            check_counts(config, str(held))


def check_counts(config: Mapping[str, Any], where: str) -> None:
    """Refuse numbers of layers or experts, each of which a module is built for, that no model
    has."""
    for key, value in config.items():
        if isinstance(value, dict):
            check_counts(value, where)
        is_count = key.startswith(("n_", "num_")) and ("layer" in key or "expert" in key)
        if is_count and isinstance(value, int) and value > MOST_LAYERS:
            raise CheckpointError(f"{where}: {key} is {value}, more than any model has; correct it")


def check_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Make sure that the model has an embedding for each id that its tokenizer may give.

    Raises:
        CheckpointError: it has not.
    """
    embeddings = model.get_input_embeddings()
    rows = getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0]
    needed = ids_of(tokenizer)
    if needed > rows:
        raise CheckpointError(
            f"{path} has embeddings for {rows} tokens, but its tokenizer gives ids up to "
            f"{needed - 1}; give the tokenizer that the model was trained with, or call "
            f"model.resize_token_embeddings({needed}) and save it again"
        )


@takes_paths
def load_adapter(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """The base model of an adapter with the adapter merged into it, its recurrence attached, and
    the base's tokenizer.

    Raises:
        CheckpointError: the base model is not there or another one, or the adapter lacks weights.
    """
    try:
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
        from peft.utils.save_and_load import load_peft_weights
    except ImportError as error:
        raise ConfigError(
            f'{folder} needs the package peft; install it with: pip install "undertow[train]"'
        ) from error
    check_files(folder)
    try:
        base_path = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
        weights = load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # json, peft and safetensors raise any kind
        raise CheckpointError(
            f"the adapter in {folder} cannot be read: {first_line(error)}"
        ) from error
    if not base_path:
        raise CheckpointError(
            f"{folder}/{ADAPTER} does not name its base model; set base_model_name_or_path there"
        )
    try:
        base, tokenizer = load(base_path)
    except CheckpointError as error:
        raise CheckpointError(
            f"the base model of the adapter in {folder} is missing: {error}"
        ) from error
    try:
        model = PeftModel.from_pretrained(base, str(folder))
    except UndertowError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except KeyError as error:  # what PEFT says of a missing weight of the recurrence
        raise CheckpointError(
            f"the adapter in {folder} lacks weights, {error.args[0]} among them"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"the adapter in {folder} does not fit {base_path}: {first_line(error)}"
        ) from error
    missing = sorted(set(get_peft_model_state_dict(model)) - set(weights))
    if missing:  # PEFT leaves others as they start
        raise CheckpointError(f"the adapter in {folder} lacks weights, {missing[0]} among them")
    return model.merge_and_unload(), tokenizer


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """A pretrained tokenizer, from a folder or a hub name.

    Raises:
        CheckpointError: there is none.
    """
    check_files(Path(path))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers and tokenizers raise any kind
        raise CheckpointError(
            f"no tokenizer could be loaded from {path}: {first_line(error)}"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


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


def from_scratch(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A model with random weights in the shape that the section asks for.

    Raises:
        ConfigError: transformers has no such architecture, or it cannot have this shape.
    """
    known = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, LSTMConfig.model_type)
    if section.architecture not in known:
        raise ConfigError(
            f"model.architecture {section.architecture!r} is no causal language model that "
            f"transformers knows{nearest(section.architecture, known)}"
        )
    config_class = CONFIG_MAPPING[section.architecture]
    try:
        settings = {
            "vocab_size": vocabulary(section, tokenizer),
            "hidden_size": section.width,
            "num_hidden_layers": section.layers,
            "num_attention_heads": section.heads,
            "max_position_embeddings": section.positions,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "tie_word_embeddings": section.tied,
            **differently_named(section, config_class),
            **further(section, config_class),
        }
        model = AutoModelForCausalLM.from_config(config_class(**settings))
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=section.embedding_range)
        if torch.get_default_device().type != "meta":  # some architectures look at values
            model.eval()
            with torch.no_grad():
                model(torch.zeros(1, 2, dtype=torch.long))
            model.train()
    except UndertowError:
        raise
    except Exception as error:  # what shapes an architecture can have, only its own code knows
        raise ConfigError(
            f"model.architecture {section.architecture!r} cannot be built from scratch in this "
            f"shape: {first_line(error)}"
        ) from error
    return model


def vocabulary(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> int:
    needed = ids_of(tokenizer)
    if section.vocabulary is not None and section.vocabulary < needed:
        raise ConfigError(
            f"model.vocabulary is {section.vocabulary}, but the tokenizer has {needed} tokens; "
            "raise it"
        )
    return section.vocabulary or needed


def differently_named(
    section: ModelSection, config_class: type[PreTrainedConfig]
) -> dict[str, Any]:
    """The settings that not every architecture has, under the names that it gives them.

    Raises:
        ConfigError: the section sets one that the architecture has not.
    """
    defaults = {
        "key_value_heads": section.heads,
        "feed_forward": -(-8 * section.width // 24) * 8,
        "initializer_range": section.width**-0.5,
    }
    example = config_class()
    found: dict[str, Any] = {}
    for key, names in NAMES.items():
        known = [name for name in names if hasattr(example, name)]
        value = getattr(section, key)
        if value is not None and not known:
            raise ConfigError(
                f"model.{key} is set, but {section.architecture} has no such setting; remove it"
            )
        found |= {name: defaults[key] if value is None else value for name in known}
    if hasattr(example, "head_dim") and not isinstance(
        getattr(config_class, "head_dim", None), property
    ):
        found["head_dim"] = section.head_width or section.width // section.heads
    elif section.head_width is not None:
        raise ConfigError(
            f"model.head_width is set, but {section.architecture} has no such setting; remove it"
        )
    return found


def further(section: ModelSection, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The section's settings by the architecture's own names.

    Raises:
        ConfigError: the architecture has no such setting, or the section has a key for it.
    """
    keys = {name: key for key, names in NAMES.items() for name in names} | {
        "head_dim": "head_width",
        **KEYS,
    }
    known = [name for name in config_class().to_dict() if not name.startswith("_")]
    for name in section.settings:
        if name in keys:
            raise ConfigError(
                f"model.settings holds {name}, which is model.{keys[name]} here; set that"
            )
        check_counts({name: section.settings[name]}, "model.settings")
        if name not in known:
            raise ConfigError(
                f"model.settings holds {name}, which {section.architecture} has "
                f"not{nearest(name, known)}"
            )
    return section.settings


def loops(model: Any) -> bool:
    """Whether the model has a recurrence in depth."""
    return isinstance(model, HuginnForCausalLM) or any(
        ".recurrence.loop" in name for name, _ in model.named_modules()
    )


def context_of(model: Any) -> int | None:
    """The most tokens that a model is made to read; None if its config does not say."""
    config = getattr(model, "config", None)
    found = (
        None
        if config is None
        else getattr(config.get_text_config(), "max_position_embeddings", None)
    )
    return found if isinstance(found, int) and found > 0 else None


def no_such(path: str) -> str:
    return f"there is no folder {path} and no model of that name"


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


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


def quiet_libraries() -> None:
    """Keep the libraries' notes out of our own output; their errors still come through as
    exceptions."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
