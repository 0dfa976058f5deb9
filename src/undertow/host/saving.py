"""A hosted model on disk: one folder of safetensors whose `config.json` (`folder_config.py`) only
Undertow can read.

After `import undertow`, `AutoModelForCausalLM.from_pretrained` loads it, with every keyword that it
takes for the base model; without, it fails by name, so that a recurrence is never dropped in
silence.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from undertow.config import from_mapping, to_mapping
from undertow.depth.looped import Looped
from undertow.errors import CheckpointError, ConfigError, nearest
from undertow.files import replacing_folder, write_text
from undertow.host.folder_config import UndertowConfig, folder_config, not_described
from undertow.host.offloading import place
from undertow.host.support import find_stack
from undertow.manifest import check_model
from undertow.pathways import RECURRENCES, T2MLR, Recurrence
from undertow.pathways.t2mlr import GAMMAS
from undertow.solvers import SOLVERS, Solver

if TYPE_CHECKING:
    from undertow.host.attach import Attachment


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

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """Load a hosted model; arguments as for any `from_pretrained`.

        Raises:
            CheckpointError: the folder holds no hosted model, lacks some of its weights, holds
                damaged ones, or is not what its manifest lists.
        """
        from undertow.host.attach import find_attachment, find_pathway
        from undertow.host.learning import learn

        check_model(Path(folder) / kwargs.get("subfolder", ""))
        if not isinstance(config, UndertowConfig):
            return AutoModelForCausalLM.from_pretrained(folder, *args, **kwargs)
        base_class, recurrences = read_config(config)
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
                if MISMATCH not in str(error) or not any(
                    isinstance(each, T2MLR) for each in recurrences
                ):
                    raise
                # The weights may be from when the γ of T²MLR were scalars.
                older = loading_class(base_class, recurrences, device_map, scalar_gammas=True)
                model, info = older.from_pretrained(folder, *args, **settings)
                find_pathway(model).reshape_gammas(1)  # type: ignore[operator]
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
        check_loaded(folder, info)
        model.__class__ = base_class
        attachment = find_attachment(model)
        set_saved_solvers(attachment, config.solvers)
        if not any(parameter.is_meta for parameter in model.parameters()):
            learn(attachment)
        return (model, info) if wants_info else model

    @classmethod
    def _from_config(cls, config: UndertowConfig, **kwargs: Any) -> Any:
        """A hosted model with fresh weights (`AutoModelForCausalLM.from_config`)."""
        from undertow.host.attach import attach, find_attachment

        base_class, recurrences = read_config(config)
        model = base_class._from_config(config.base, **kwargs)
        for recurrence in recurrences:
            attach(model, recurrence)
        set_saved_solvers(find_attachment(model), config.solvers)
        return model


def check_loaded(folder: str | os.PathLike[str], info: dict[str, Any]) -> None:
    """Refuse a model that lacks weights, which the library would make up.

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
    except (KeyError, AttributeError, TypeError, IndexError, ValueError) as error:
        raise not_described(error) from error
    return base_class, recurrences


def solvers_of(attachment: Attachment) -> dict[str, dict[str, Any]]:
    """How the attached recurrence in time is solved, as plain data."""
    if attachment.settings is None:
        return {}
    return {
        "solver": solver_to_mapping(attachment.solver),
        "prefill": solver_to_mapping(attachment.prefill),
    }


def note_solvers(attachment: Attachment) -> None:
    """Tell the PEFT adapter in use, if one holds the recurrence, how it is solved: its config is
    saved on its own."""
    wrapped: Any = attachment.owners.backbone._modules["recurrence"]
    for name, copy in getattr(wrapped, "modules_to_save", {}).items():
        if copy is attachment:
            config: Any = attachment.owners.model.peft_config[name]
            for key, mapping in solvers_of(attachment).items():
                setattr(config, key, mapping)


def solver_to_mapping(solver: Solver) -> dict[str, Any]:
    """A solver as plain data; of one that could not be read back from it, only the name of its
    class."""
    try:
        mapping = to_mapping(solver)
        if read_solver(mapping) == solver:
            return mapping
    except (ConfigError, TypeError, ValueError):
        pass
    return {"kind": type(solver).__name__}


def read_solver(mapping: dict[str, Any], where: str = "solver") -> Solver:
    """Read a solver from plain data with a `kind`.

    Raises:
        ConfigError: it describes none that is known.
    """
    settings = dict(mapping)
    kind = settings.pop("kind", None)
    if kind not in SOLVERS:
        raise ConfigError(
            f"{where} kind {kind!r} is unknown{nearest(kind, SOLVERS)}; use {', '.join(SOLVERS)}"
        )
    return from_mapping(SOLVERS[kind], settings, where=where)


def set_saved_solvers(attachment: Attachment, saved: dict[str, dict[str, Any]]) -> None:
    """Give a loaded model the solvers that `solvers_of` described; one that is not known here stays
    the default, with a warning, as exact generation does not depend on it."""
    for name, mapping in saved.items():
        if not mapping:
            continue
        try:
            setattr(attachment, name, read_solver(mapping, name))
        except (ConfigError, TypeError, ValueError) as error:
            warnings.warn(
                f"the model was saved with a {name} that is not known here ({error}), so it has "
                "the default one; choose with undertow.set_solver, or put a class of your own "
                "into undertow.solvers.SOLVERS before loading",
                stacklevel=5,
            )


def known_class(name: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The model class that loading finds by its name: the one that is registered for its config, or
    the library's own."""
    registered = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classes = registered if isinstance(registered, tuple) else (registered,)
    own: type[PreTrainedModel] | None = getattr(transformers, name, None)
    return next((each for each in classes if each is not None and each.__name__ == name), own)


def registering(name: str, config: PreTrainedConfig) -> str:
    """How to make a model class known to loading."""
    return f"call AutoModelForCausalLM.register({type(config).__name__}, {name}, exist_ok=True)"


def warn_of_unknown_class(model: PreTrainedModel) -> None:
    """Say of a subclass, or of a model whose code is not the library's, that its folders load only
    once it is registered."""
    name = type(model).__name__
    known = known_class(name, model.config)
    if known is None or not isinstance(model, known):
        warnings.warn(
            f"{name} is no class that AutoModelForCausalLM knows: a folder that this model saves "
            f"will load only after it is registered, so {registering(name, model.config)}",
            stacklevel=3,
        )


def recurrence_from_mapping(mapping: dict[str, Any]) -> Recurrence:
    """Read a recurrence from plain data with a `kind`."""
    settings = dict(mapping)
    kind = settings.pop("kind", None)
    if kind not in RECURRENCES:
        raise ConfigError(
            f"recurrence kind {kind!r} is unknown{nearest(kind, RECURRENCES)}; use "
            f"{', '.join(RECURRENCES)}"
        )
    return from_mapping(RECURRENCES[kind], settings, where="recurrence")


def recurrences_of(attachment: Attachment) -> dict[str, dict[str, Any]]:
    """What is attached, as plain data: a `recurrence` in time, a `looped` one in depth, or both."""
    held = {"recurrence": attachment.settings, "looped": attachment.looped}
    return {name: to_mapping(settings) for name, settings in held.items() if settings is not None}


def recurrences_from_mappings(
    recurrence: dict[str, Any], looped: dict[str, Any]
) -> list[Recurrence | Looped]:
    """The settings that `recurrences_of` describes, in the order to attach them in.

    Raises:
        ConfigError: they describe none.
    """
    found: list[Recurrence | Looped] = []
    if looped:
        found.append(from_mapping(Looped, looped, where="looped"))
    if recurrence or not found:
        found.append(recurrence_from_mapping(recurrence))
    return found


def loading_class(
    base_class: Any,
    recurrences: list[Recurrence | Looped],
    device_map: Any,
    scalar_gammas: bool = False,
) -> Any:
    """A subclass of the base model's class that has the recurrence from the start: its weights load
    with the rest.

    A device map that is a dict gets a place for it.
    """
    from undertow.host.attach import ATTACHMENT, attach, find_pathway

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base_class.__init__(self, config, *args, **kwargs)
        for recurrence in recurrences:
            attach(self, recurrence)
        if isinstance(device_map, dict):
            stack = find_stack(self)
            place(device_map, stack, f"{stack.rpartition('.')[0]}.{ATTACHMENT}".lstrip("."))
        if scalar_gammas:
            find_pathway(self).reshape_gammas()  # type: ignore[operator]

    kept = set(getattr(base_class, "_keep_in_fp32_modules_strict", None) or ())
    members = {
        "__init__": __init__,
        # or transformers takes it for custom code and skips its key conversions
        "__module__": base_class.__module__,
        "_keep_in_fp32_modules_strict": kept.union(GAMMAS),
    }
    return type(base_class.__name__, (base_class,), members)


def save_pretrained(
    self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> None:
    """The model's own `save_pretrained`, in Undertow's format; a failure leaves what was there
    before untouched.

    Raises:
        CheckpointError: the folder could not be written.
    """
    from undertow.host.attach import find_attachment

    if kwargs.pop("push_to_hub", False):
        raise ConfigError(
            "save_pretrained cannot push at the same time; call push_to_hub on the model instead"
        )
    if not kwargs.get("is_main_process", True):
        return
    self = vars(self).get(
        "_orig_mod", self
    )  # what accelerate's `compile_regions` made it of has the names to save under
    attachment = find_attachment(self)
    attached = recurrences_of(attachment) | solvers_of(attachment)
    with replacing_folder(Path(save_directory)) as folder:
        type(self).save_pretrained(self, folder, *args, **kwargs)
        path = folder / "config.json"
        config = folder_config(json.loads(path.read_text(encoding="utf-8")), attached)
        write_text(path, json.dumps(config, indent=2) + "\n")


AutoConfig.register(UndertowConfig.model_type, UndertowConfig)
AutoModelForCausalLM.register(UndertowConfig, UndertowForCausalLM)
AutoModelForImageTextToText.register(UndertowConfig, UndertowForCausalLM)
