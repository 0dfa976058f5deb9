"""A hosted model to disk: one folder of safetensors whose `config.json` (`folder_config.py`) only
Undertow can read."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from undertow.errors import ConfigError
from undertow.files import replacing_folder, write_text
from undertow.host.attachment import ATTACHMENT, Attachment, find_attachment
from undertow.host.described import recurrences_of, solvers_of
from undertow.host.folder_config import folder_config
from undertow.host.heads import all_registered, loader


def save_pretrained(
    self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> None:
    """The model's own `save_pretrained`, in Undertow's format; a failure leaves what was there
    before untouched.

    Raises:
        CheckpointError: the folder could not be written.
    """
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


def known_class(name: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The model class that loading finds by its name: the one that is registered for its config, or
    the library's own."""
    own: type[PreTrainedModel] | None = getattr(transformers, name, None)
    return next((each for each in all_registered(config) if each.__name__ == name), own)


def registering(name: str, config: PreTrainedConfig) -> str:
    """How to make a model class known to loading."""
    return f"call {loader([name])}.register({type(config).__name__}, {name}, exist_ok=True)"


def warn_of_unknown_class(model: PreTrainedModel) -> None:
    """Say of a subclass, or of a model whose code is not the library's, that its folders load only
    once it is registered."""
    name = type(model).__name__
    known = known_class(name, model.config)
    if known is None or not isinstance(model, known):
        warnings.warn(
            f"{loader([name])} does not know the class {name}: a folder that this model saves "
            f"will load only after it is registered, so {registering(name, model.config)}",
            stacklevel=3,
        )


def note_solvers(attachment: Attachment) -> None:
    """Tell the PEFT adapter in use, if one holds the recurrence, how it is solved: its config is
    saved on its own."""
    wrapped: Any = attachment.owners.backbone._modules[ATTACHMENT]
    for name, copy in getattr(wrapped, "modules_to_save", {}).items():
        if copy is attachment:
            config: Any = attachment.owners.model.peft_config[name]
            for key, mapping in solvers_of(attachment).items():
                setattr(config, key, mapping)
