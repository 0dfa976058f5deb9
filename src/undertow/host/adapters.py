"""A recurrence in a PEFT adapter: LoRA on the base model and the recurrence trained with it, in one
folder.

    base = AutoModelForCausalLM.from_pretrained(...)
    model = PeftModel.from_pretrained(base, "adapter")      # attaches the recurrence that the
    adapter was trained with

PEFT saves the recurrence with an adapter whose config says ``modules_to_save=["recurrence"]``, but
not what it was. Here the config of any LoRA adapter of a hosted model becomes a
`RecurrentLoraConfig` when the adapter is made, which also records the recurrence, its solvers and
the shape of the base model. Its `adapter_config.json` has ``peft_type: "UNDERTOW"``: without
Undertow, PEFT refuses the folder by that name instead of dropping the recurrence in silence. In
memory it is a LoRA adapter like any other: it merges, and stands beside others.

A recurrence without parameters is always part of the adapter. One with parameters that the config
does not name stays the model's own: the adapter loads only on a model that has the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from peft import LoraConfig, LoraModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

from undertow.depth.looped import Looped
from undertow.errors import CheckpointError, ConfigError
from undertow.host.attach import attach, detach
from undertow.host.attachment import (
    ATTACHMENT,
    Attachment,
    find_attachment,
    find_backbone,
    has_recurrence,
)
from undertow.host.described import (
    plain,
    recurrences_from_mappings,
    recurrences_of,
    set_saved_solvers,
    solvers_of,
)

PEFT_TYPE = "UNDERTOW"


@dataclass
class RecurrentLoraConfig(LoraConfig):
    """A LoRA config that knows the recurrence its adapter was trained with."""

    recurrence: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "The recurrence in time, as plain data."}
    )
    looped: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "The one in depth, as plain data."}
    )
    solver: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "How states are found in training."}
    )
    prefill: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "How they are found without gradients."}
    )
    base_shape: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Model type, number of layers and width of the base model."},
    )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"peft_type": PEFT_TYPE}

    @property
    def holds_recurrence(self) -> bool:
        """Whether the adapter has a recurrence of its own, rather than the model."""
        return ATTACHMENT in (self.modules_to_save or ())


class RecurrentLoraModel(LoraModel):
    """PEFT's LoRA model, which attaches an adapter's recurrence before it injects the adapter."""

    def inject_adapter(self, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config: Any = self.peft_config[adapter_name]
        if isinstance(config, RecurrentLoraConfig):
            fit(model, config)
        elif has_recurrence(model):
            config = self.peft_config[adapter_name] = recording(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        if isinstance(config, RecurrentLoraConfig) and config.holds_recurrence and rests(model):
            copied: Any = attachment_of(model).modules_to_save[adapter_name]
            set_saved_solvers(copied, {"solver": config.solver, "prefill": config.prefill})

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        wrapped: Any = attachment_of(self.model)
        if not hasattr(wrapped, "modules_to_save"):
            return super()._unload_and_optionally_merge(merge, *args, **kwargs)
        names = wrapped.active_adapters if (given := kwargs.get("adapter_names")) is None else given
        held = [name for name in names if merge and name in wrapped.modules_to_save]
        if len(held) > 1:
            raise ConfigError(
                f"{' and '.join(held)} each have a recurrence, and a model has one; merge one of "
                "them"
            )
        backbone = find_backbone(self.model)
        with recurrence_of(wrapped, held[0] if held else None):
            model: Any = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        own: Any = backbone._modules[ATTACHMENT]
        if own.only_in_adapters:
            own.only_in_adapters = False  # from here on it is the model's
            if not held:
                detach(model)
        return model

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        names = kwargs.get("adapter_names")
        wrapped: Any = None if names is None else attachment_of(self.model)
        if names is None or not hasattr(
            wrapped, "modules_to_save"
        ):  # the model's own recurrence is that of every row
            with super()._enable_peft_forward_hooks(*args, **kwargs):
                yield
            return
        owners = {name if name in wrapped.modules_to_save else None for name in names}
        if len(owners) > 1:
            raise ConfigError(
                f"adapter_names mixes rows of {', '.join(sorted(set(names)))}, whose recurrences "
                "differ, and a batch runs one recurrence; run each adapter's rows as a batch of "
                "their own"
            )
        with (
            recurrence_of(wrapped, owners.pop()),
            super()._enable_peft_forward_hooks(*args, **kwargs),
        ):
            yield


@contextmanager
def recurrence_of(wrapped: Any, adapter: str | None) -> Iterator[None]:
    """Use the recurrence of one adapter, or of the base model, whichever adapter is active."""
    before = wrapped._active_adapter
    wrapped._active_adapter = [] if adapter is None else adapter
    try:
        yield
    finally:
        wrapped._active_adapter = before


def rests(model: Any) -> bool:
    """Whether a hosted model's recurrence came with its adapters, and rests while none of these is
    in use."""
    wrapped: Any = attachment_of(model)
    own: Attachment = getattr(wrapped, "original_module", wrapped)
    return own.only_in_adapters


def recording(model: Any, config: LoraConfig) -> LoraConfig:
    """The same config, with the recurrence of the model, its solvers and the model's shape.

    An adapter beside others that brought a recurrence has nothing to do with it, unless it says so.

    Raises:
        ConfigError: it would save a part of the recurrence.
    """
    attachment, backbone = find_attachment(model), find_backbone(model)
    prefix = next(name for name, module in model.named_modules() if module is backbone)
    path = f"{prefix}.{ATTACHMENT}".lstrip(".")
    inside = [name for name, _ in attachment.named_modules(prefix=path) if name != path]
    saved = []
    for target in config.modules_to_save or ():
        if any(name.endswith(target) for name in inside):
            raise ConfigError(
                f'modules_to_save names {target!r}, a part of the recurrence; use "{ATTACHMENT}", '
                "all of it"
            )
        saved.append(ATTACHMENT if path.endswith(target) else target)
    if ATTACHMENT not in saved:
        if rests(model):
            return config
        if next(attachment.parameters(), None) is None:
            saved.append(ATTACHMENT)
        elif not config.inference_mode:
            warnings.warn(
                "this adapter neither trains nor holds the model's recurrence, and will load only "
                "on a model that has it; "
                f'add modules_to_save=["{ATTACHMENT}"] for one that does',
                stacklevel=2,
            )
    settings = {each.name: getattr(config, each.name) for each in fields(config)} | recurrences_of(
        attachment
    )
    settings |= solvers_of(attachment) | {"modules_to_save": saved or None}
    return RecurrentLoraConfig(**settings, base_shape=shape_of(model))


def fit(model: Any, config: RecurrentLoraConfig) -> None:
    """Give the model the recurrence of an adapter, or check that it has the same.

    The recurrence is the adapter's: while the adapter is not in use, the model runs as the base
    model does.

    Raises:
        CheckpointError: the adapter is of another base model, or the model has another recurrence,
            or none where the adapter does not hold it.
    """
    shape = shape_of(model)
    named = f", {config.base_model_name_or_path}" if config.base_model_name_or_path else ""
    if shape != config.base_shape:
        raise CheckpointError(
            f"the adapter belongs to {described(config.base_shape)}, but this model is "
            f"{described(shape)}; load it on its own base model{named}"
        )
    try:
        recurrences = recurrences_from_mappings(config.recurrence, config.looped)
    except ConfigError as error:
        raise CheckpointError(
            f"the adapter's adapter_config.json describes no recurrence: {error}"
        ) from error
    if not has_recurrence(model):
        if not config.holds_recurrence:
            raise CheckpointError(
                "the adapter was trained on a model with a recurrence, whose weights it does not "
                f"hold, and this model has none; load it on the model that it was trained on{named}"
            )
        for recurrence in recurrences:
            attach(model, recurrence)
        find_attachment(model).only_in_adapters = True
        return
    wanted = {
        "looped" if isinstance(one, Looped) else "recurrence": plain(one) for one in recurrences
    }
    found = recurrences_of(find_attachment(model))
    for name in wanted | found:
        own, other = found.get(name, {}), wanted.get(name, {})
        for key in other | own:
            if other.get(key) != own.get(key):
                raise CheckpointError(
                    f"the adapter was trained with a recurrence whose {key} is {other.get(key)}, "
                    f"but this model's is {own.get(key)}; load it on a base model without a "
                    "recurrence, or with the same"
                )


def attachment_of(model: Any) -> Any:
    """The module called `recurrence` of a hosted model, or PEFT's wrapper around it; None where
    there is none."""
    return find_backbone(model)._modules[ATTACHMENT] if has_recurrence(model) else None


def shape_of(model: Any) -> dict[str, Any]:
    config = model.config.get_text_config()
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
    }


def described(shape: dict[str, Any]) -> str:
    return (
        f"a {shape.get('model_type')} model of {shape.get('layers')} layers of width "
        f"{shape.get('width')}"
    )


PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = RecurrentLoraConfig  # type: ignore[index]  # a name that PEFT's own enum lacks
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = RecurrentLoraModel
