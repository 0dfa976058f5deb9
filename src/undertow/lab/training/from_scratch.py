"""A model with random weights in the shape that a recipe asks for."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from undertow.errors import ConfigError, UndertowError, nearest
from undertow.lab.runs.loading import check_counts, first_line
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.tasks.tokenizer import ids_of
from undertow.models import LSTMConfig

# What the architectures call a setting that not all of them have.
NAMES = {
    "key_value_heads": ("num_key_value_heads",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "initializer_range": ("initializer_range", "init_std"),
    "head_width": ("head_dim",),
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
    needed = ids_of(tokenizer)
    if section.vocabulary is not None and section.vocabulary < needed:
        raise ConfigError(
            f"model.vocabulary is {section.vocabulary}, but the tokenizer has {needed} tokens; "
            "raise it"
        )
    config_class = CONFIG_MAPPING[section.architecture]
    try:
        settings = {
            "vocab_size": section.vocabulary or needed,
            "hidden_size": section.width,
            "num_hidden_layers": section.layers,
            "num_attention_heads": section.heads,
            "max_position_embeddings": section.positions,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "tie_word_embeddings": section.tied,
            **own_settings(section, config_class),
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


def own_settings(section: ModelSection, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The settings that not every architecture has, under the names that it gives them, and the
    section's further ones, which are by those names already.

    Raises:
        ConfigError: the section sets one that the architecture does not have, or has a key for it.
    """
    example = config_class()
    known = [name for name in example.to_dict() if not name.startswith("_")]
    made_of_others = {n for n, value in inspect.getmembers(config_class) if type(value) is property}
    defaults = {
        "key_value_heads": section.heads,
        "feed_forward": -(-8 * section.width // 24) * 8,
        "initializer_range": section.width**-0.5,
        "head_width": section.width // section.heads,
    }
    found: dict[str, Any] = {}
    for key, names in NAMES.items():
        own = [name for name in names if hasattr(example, name) and name not in made_of_others]
        value = getattr(section, key)
        if value is not None and not own:
            raise ConfigError(
                f"model.{key} is set, but {section.architecture} has no such setting; remove it"
            )
        found |= {name: defaults[key] if value is None else value for name in own}
    keys = {name: key for key, names in NAMES.items() for name in names} | KEYS
    for name, value in section.settings.items():
        if name in keys:
            raise ConfigError(
                f"model.settings holds {name}, which is model.{keys[name]} here; set that"
            )
        check_counts({name: value}, "model.settings")
        if name not in known:
            raise ConfigError(
                f"model.settings holds {name}, but {section.architecture} has no setting "
                f"of that name{nearest(name, known)}"
            )
    return found | section.settings
