"""A pretrained model and its tokenizer, from a folder or a hub name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from undertow.depth.handle import recurs_in_depth, set_depth
from undertow.depth.loop import check_depth
from undertow.errors import CheckpointError, ConfigError, UndertowError, shown
from undertow.lab.runs.recipe import MOST_LAYERS
from undertow.lab.tasks.tokenizer import ids_of
from undertow.manifest import check_model
from undertow.paths import takes_paths
from undertow.reading import check_file, is_special, read_json

ADAPTER = "adapter_config.json"


def load(path: str, depth: int | None = None) -> tuple[Any, PreTrainedTokenizerBase]:
    """A pretrained model in fp32 and its tokenizer, from a folder or a hub name; adapters are
    merged into their base model.

    Args:
        depth: how many iterations the model then runs; as many as it was trained with if None.

    Raises:
        CheckpointError: there is no model there, or it cannot be loaded.
        ConfigError: the depth is below 1, or the model has no recurrence in depth.
    """
    if depth is not None:
        check_depth("depth", depth)  # before a large model is loaded
        model, tokenizer = load(path)
        if not recurs_in_depth(model):
            raise ConfigError(
                f"depth is {depth}, but {path} has no recurrence in depth; leave depth out"
            )
        set_depth(model, depth)
        return model, tokenizer
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


def is_model(path: Path) -> bool:
    """Whether a path names a model itself, and no run: a folder with a config, or a hub name."""
    return any((path / name).is_file() for name in ("config.json", ADAPTER)) or not path.is_dir()


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
        CheckpointError: the vocabulary is larger than the embeddings.
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


def quiet_libraries() -> None:
    """Keep the libraries' notes out of our own output; their errors still come through as
    exceptions."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
