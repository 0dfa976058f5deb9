"""A recurrence in a PEFT adapter: LoRA on the base model and the recurrence trained with it, in one folder.

    base = AutoModelForCausalLM.from_pretrained(...)
    model = PeftModel.from_pretrained(base, "adapter")      # attaches the recurrence that the adapter was trained with

PEFT saves the recurrence with an adapter whose config says ``modules_to_save=["recurrence"]``, but not what it was. Here
such a config becomes a `RecurrentLoraConfig` when its adapter is made, which also records the recurrence and the shape of
the base model. Its `adapter_config.json` has ``peft_type: "UNDERTOW"``: without Undertow, PEFT refuses the folder by that
name instead of dropping the recurrence in silence. In memory it is a LoRA adapter like any other: it merges, and stands
beside others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from peft import LoraConfig, LoraModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

from undertow.config import to_mapping
from undertow.depth.looped import Looped
from undertow.errors import CheckpointError, ConfigError
from undertow.host.attach import Attachment, attach, find_attachment, find_backbone
from undertow.host.owners import ATTACHMENT
from undertow.host.saving import recurrences_from_mappings, recurrences_of

PEFT_TYPE = "UNDERTOW"


@dataclass
class RecurrentLoraConfig(LoraConfig):
    """A LoRA config that knows the recurrence its adapter was trained with."""

    recurrence: dict[str, Any] = field(default_factory=dict, metadata={"help": "The recurrence in time, as plain data."})
    looped: dict[str, Any] = field(default_factory=dict, metadata={"help": "The one in depth, as plain data."})
    base_shape: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Model type, number of layers and width of the base model."}
    )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"peft_type": PEFT_TYPE}


class RecurrentLoraModel(LoraModel):
    """PEFT's LoRA model, which attaches an adapter's recurrence before it injects the adapter."""

    def inject_adapter(self, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config: Any = self.peft_config[adapter_name]
        if has_recurrence(model):
            own = find_backbone(model)._modules[ATTACHMENT]
            if isinstance(own, Attachment):  # not an adapter's, or no longer, after merging
                own.only_in_adapters = False
        if isinstance(config, RecurrentLoraConfig):
            fit(model, config)
        elif ATTACHMENT in (config.modules_to_save or ()) and has_recurrence(model):
            self.peft_config[adapter_name] = recording(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)


def recording(model: Any, config: LoraConfig) -> RecurrentLoraConfig:
    """The same config, with the recurrence of the model and the model's shape."""
    settings = {each.name: getattr(config, each.name) for each in fields(config)} | recurrences_of(find_attachment(model))
    return RecurrentLoraConfig(**settings, base_shape=shape_of(model))


def fit(model: Any, config: RecurrentLoraConfig) -> None:
    """Give the model the recurrence of an adapter, or check that it has the same.

    The recurrence is the adapter's: while the adapter is not in use, the model runs as the base model does.

    Raises:
        CheckpointError: the adapter is of another base model, or the model has another recurrence.
    """
    shape = shape_of(model)
    if shape != config.base_shape:
        raise CheckpointError(
            f"the adapter belongs to {described(config.base_shape)}, but this model is {described(shape)}; "
            f"load it on its own base model{f', {named}' if (named := config.base_model_name_or_path) else ''}"
        )
    try:
        recurrences = recurrences_from_mappings(config.recurrence, config.looped)
    except ConfigError as error:
        raise CheckpointError(f"the adapter's adapter_config.json describes no recurrence: {error}") from error
    if not has_recurrence(model):
        for recurrence in recurrences:
            attach(model, recurrence)
        find_attachment(model).only_in_adapters = True
        return
    wanted = {"looped" if isinstance(one, Looped) else "recurrence": to_mapping(one) for one in recurrences}
    found = recurrences_of(find_attachment(model))
    for name in wanted | found:
        own, other = found.get(name, {}), wanted.get(name, {})
        for key in other | own:
            if other.get(key) != own.get(key):
                raise CheckpointError(
                    f"the adapter was trained with a recurrence whose {key} is {other.get(key)}, but this model's is "
                    f"{own.get(key)}; load it on a base model without a recurrence, or with the same"
                )


def shape_of(model: Any) -> dict[str, Any]:
    config = model.config.get_text_config()
    return {"model_type": config.model_type, "layers": config.num_hidden_layers, "width": config.hidden_size}


def described(shape: dict[str, Any]) -> str:
    return f"a {shape.get('model_type')} model of {shape.get('layers')} layers of width {shape.get('width')}"


def has_recurrence(model: Any) -> bool:
    try:
        find_attachment(model)
    except ConfigError:
        return False
    return True


PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = RecurrentLoraConfig  # type: ignore[index]  # a name that PEFT's own enum lacks
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = RecurrentLoraModel
