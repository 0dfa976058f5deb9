"""The heads that a hosted model may have: one that writes text, or one that scores a sequence, as a
reward model's does."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

CLASSIFIER = "ForSequenceClassification"  # how the library ends the names of models that score


def writes_text(model: PreTrainedModel) -> bool:
    """Whether a model has a language-model head, and so `generate`."""
    return hasattr(type(model), "prepare_inputs_for_generation")


def scores(model: PreTrainedModel) -> bool:
    """Whether a model scores sequences."""
    return isinstance(model, registered(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, model.config))


def registered(mapping: Any, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    """The classes that an Auto class's mapping has for a config."""
    found = mapping.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def all_registered(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    """The classes with any head that a hosted model may have."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    return tuple(each for mapping in mappings for each in registered(mapping, config))


def loader(architectures: list[str] | None) -> str:
    """The Auto class that loads a model of these classes."""
    classifier = any(name.endswith(CLASSIFIER) for name in architectures or ())
    return f"AutoModel{CLASSIFIER if classifier else 'ForCausalLM'}"


def without_pooling(model: PreTrainedModel) -> Any:
    """The model, or the part of it that has an output for every token: a score is one token's, and
    which one is told by a padding token that a config may lack."""
    return model if writes_text(model) else model.base_model


def per_token(output: Any) -> Any:
    """What it says of every token ``[B, T, ...]``: logits, or the last hidden states."""
    return output.logits if "logits" in output else output.last_hidden_state
