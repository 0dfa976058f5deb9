"""A hosted model from disk.

After `import undertow`, `AutoModelForCausalLM.from_pretrained` loads what `saving.py` wrote, with
every keyword that it takes for the base model; without, it fails by name, so that a recurrence is
never dropped in silence.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from undertow.depth.looped import Looped
from undertow.errors import CheckpointError, ConfigError
from undertow.host.attach import attach
from undertow.host.attachment import ATTACHMENT, find_attachment
from undertow.host.described import recurrences_from_mappings, set_saved_solvers
from undertow.host.folder_config import UndertowConfig, not_described
from undertow.host.heads import CLASSIFIER, registered
from undertow.host.learning import learn
from undertow.host.offloading import place
from undertow.host.saving import known_class, registering
from undertow.host.support import find_stack
from undertow.manifest import check_model
from undertow.pathways import Recurrence

# What the library says of weights whose shapes are others.
MISMATCH = "ignore_mismatched_sizes"


class NoWeightsError(CheckpointError, OSError):
    """Weights that are not there, which the library's loading calls an OSError."""


class ShapesError(CheckpointError, RuntimeError):
    """Weights of other shapes, which the library's loading calls a RuntimeError."""


class UndertowForCausalLM:
    """What `AutoModelForCausalLM` finds for an `UndertowConfig`. It makes models of the base
    model's own class."""

    config_class = UndertowConfig
    auto: ClassVar[Any] = AutoModelForCausalLM

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """Load a hosted model; arguments as for any `from_pretrained`.

        Raises:
            CheckpointError: the folder holds no hosted model, lacks some of its weights, holds
                damaged ones, or is not what its manifest lists.
        """
        check_model(Path(folder) / kwargs.get("subfolder", ""))
        if not isinstance(config, UndertowConfig):
            return cls.auto.from_pretrained(folder, *args, **kwargs)
        base_class, recurrences = cls.read(config)
        wants_info = kwargs.pop("output_loading_info", False)
        settings = {"config": config.base, "output_loading_info": True, **kwargs}
        if isinstance(device_map := kwargs.get("device_map"), dict):
            settings["device_map"] = device_map = dict(device_map)
        try:
            try:
                model, info = loading_class(base_class, recurrences, device_map).from_pretrained(
                    folder, *args, **settings
                )
            except RuntimeError as error:
                if MISMATCH not in str(error):
                    raise
                # The weights may be from when the pathway's had other shapes.
                older = loading_class(base_class, recurrences, device_map, older=True)
                model, info = older.from_pretrained(folder, *args, **settings)
                if (pathway := find_attachment(model).pathway) is not None:
                    pathway.reshape(older=False)
        except SafetensorError as error:
            raise CheckpointError(
                f"the weights in {folder} are damaged: {error}; load an earlier checkpoint"
            ) from error
        except OSError as error:
            raise NoWeightsError(f"{folder} holds no weights that can be read: {error}") from error
        except ConfigError as error:
            raise CheckpointError(
                f"the recurrence in {folder}'s config.json does not fit the model: {error}"
            ) from error
        except RuntimeError as error:
            if MISMATCH not in str(error):
                raise
            raise ShapesError(
                f"{folder}'s weights do not have the shapes that its config.json describes"
            ) from error
        check_loaded(folder, info, base_class, config)
        model.__class__ = base_class
        attachment = find_attachment(model)
        set_saved_solvers(attachment, config.solvers)
        if not any(parameter.is_meta for parameter in model.parameters()):
            learn(attachment)
        return (model, info) if wants_info else model

    @classmethod
    def _from_config(cls, config: UndertowConfig, **kwargs: Any) -> Any:
        """A hosted model with fresh weights (`AutoModelForCausalLM.from_config`)."""
        base_class, recurrences = cls.read(config)
        model = base_class._from_config(config.base, **kwargs)
        for recurrence in recurrences:
            attach(model, recurrence)
        set_saved_solvers(find_attachment(model), config.solvers)
        return model

    @classmethod
    def read(cls, config: UndertowConfig) -> tuple[type[PreTrainedModel], list[Any]]:
        """The class to make, and the recurrences.

        Raises:
            CheckpointError: the config names none, or one that does not write text.
        """
        base_class, recurrences = read_config(config)
        if base_class.__name__.endswith(CLASSIFIER):
            raise CheckpointError(
                f"the folder holds a {base_class.__name__}, which writes no text; load it with "
                f"AutoModel{CLASSIFIER}"
            )
        return base_class, recurrences


class UndertowForSequenceClassification(UndertowForCausalLM):
    """What `AutoModelForSequenceClassification` finds: a model that scores a sequence, from its own
    folder, or from a language model's, of which it takes all but the head."""

    auto: ClassVar[Any] = AutoModelForSequenceClassification

    @classmethod
    def read(cls, config: UndertowConfig) -> tuple[type[PreTrainedModel], list[Any]]:
        """See `UndertowForCausalLM.read`.

        Raises:
            CheckpointError: the config names no class, or the library has none of its kind that
                scores.
        """
        base_class, recurrences = read_config(config)
        if base_class.__name__.endswith(CLASSIFIER):
            return base_class, recurrences
        if not (classes := registered(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, config.base)):
            raise CheckpointError(
                f"the folder holds a {base_class.__name__}, and the library has no model of this "
                "kind that scores sequences; load it with AutoModelForCausalLM"
            )
        return classes[0], recurrences


def check_loaded(
    folder: str | os.PathLike[str],
    info: dict[str, Any],
    base_class: type[PreTrainedModel],
    config: UndertowConfig,
) -> None:
    """Refuse a model that lacks weights, which the library would make up: all but the head's, where
    the folder is of a model with another head.

    Raises:
        CheckpointError: it does; those of other shapes are none where the library was told to
            ignore them, but the recurrence's.
    """
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    if changed := sorted(key for key in mismatched if ".recurrence." in f".{key}"):
        raise ShapesError(
            f"{folder}'s weights of the recurrence, {changed[0]} among them, have other shapes"
        )
    missing = sorted(set(info["missing_keys"]) - mismatched)
    if base_class.__name__ != config.base.architectures[0]:
        missing = [key for key in missing if key.startswith(f"{base_class.base_model_prefix}.")]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights, {missing[0]} among them: "
            "it was saved in part, or without the recurrence"
        )


def read_config(config: UndertowConfig) -> tuple[type[PreTrainedModel], list[Recurrence | Looped]]:
    """The base model's class, and the recurrences, that a hosted model's config names."""
    try:
        name = config.base.architectures[0]
        base_class = known_class(name, config.base)
        if base_class is None:
            raise ConfigError(
                f"its class {name} is not known; {registering(name, config.base)} before loading"
            )
        recurrences = recurrences_from_mappings(config.recurrence, config.looped)
    except CheckpointError:
        raise
    except (KeyError, AttributeError, TypeError, IndexError, ValueError) as error:
        raise not_described(error) from error
    return base_class, recurrences


def loading_class(
    base_class: Any, recurrences: list[Recurrence | Looped], device_map: Any, older: bool = False
) -> Any:
    """A subclass of the base model's class that has the recurrence from the start: its weights load
    with the rest.

    A device map that is a dict gets a place for it. With `older` its parameters have the shapes of
    folders written before.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base_class.__init__(self, config, *args, **kwargs)
        for recurrence in recurrences:
            attach(self, recurrence)
        if isinstance(device_map, dict):
            stack = find_stack(self)
            place(device_map, stack, f"{stack.rpartition('.')[0]}.{ATTACHMENT}".lstrip("."))
        if (pathway := find_attachment(self).pathway) is not None:
            kept = {f"{ATTACHMENT}.pathway.{name}" for name in pathway.fp32_parameters}
            self._keep_in_fp32_modules_strict = {*self._keep_in_fp32_modules_strict, *kept}
            if older:
                pathway.reshape(older=True)

    # Without the base class's module transformers takes it for custom code and skips its key
    # conversions.
    members = {"__init__": __init__, "__module__": base_class.__module__}
    return type(base_class.__name__, (base_class,), members)


AutoConfig.register(UndertowConfig.model_type, UndertowConfig)
AutoModelForCausalLM.register(UndertowConfig, UndertowForCausalLM)
AutoModelForImageTextToText.register(UndertowConfig, UndertowForCausalLM)
AutoModelForSequenceClassification.register(UndertowConfig, UndertowForSequenceClassification)
