"""The config of a hosted model's folder: the base model's own, with what was attached beside it.

In memory an `UndertowConfig` stands for the base model's config: whatever that has is read there
and set there, so that every override of a loading reaches the model. On disk, `config.json` has
``model_type: "undertow"``, the base model's config under `base`, the recurrence's under
`recurrence` (in time) and `looped` (in depth), and the solvers under `solver` and `prefill`, which
folders saved before these were kept lack.

The base model's own class, such as `LlamaForCausalLM`, would find its config under `base` and leave
the recurrence's weights unused. So the `dtype` there, which the outer one repeats, is a sentence
that says how to load the folder: every config class reads a dtype by its name and fails with that
sentence. Folders saved before this have the dtype in both places, and load.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, PreTrainedConfig

from undertow.errors import CheckpointError
from undertow.host.heads import loader

NOT_ALONE = "no dtype, as this folder holds a recurrence: load it with {} after import undertow"

# None of the classes of the library, so that whoever looks for one by an architecture, as TRL
# does for a reference model, comes to AutoModelForCausalLM in place of the base model's.
NO_CLASS = "UndertowForCausalLM"


class UndertowConfig(PreTrainedConfig):
    """The config of a hosted model.

    Attributes:
        base: the base model's config.
        recurrence, looped, solver, prefill: what is attached and how it is solved, as plain data;
            empty where there is none.
    """

    model_type = "undertow"
    has_no_defaults_at_init = True
    attached: ClassVar[tuple[str, ...]] = ("recurrence", "looped", "solver", "prefill")

    def __init__(
        self, base: PreTrainedConfig | dict[str, Any] | None = None, **settings: Any
    ) -> None:
        """Raises CheckpointError: `base` describes no config that the library knows."""
        held = {name: settings.pop(name, None) or {} for name in self.attached}
        if not isinstance(base, PreTrainedConfig):
            base, _ = read_base({"base": base, **settings})
        self.__dict__.update(held, base=base, architectures=[NO_CLASS], auto_map={})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read `config.json`'s contents; `kwargs` are overrides of the base model's config, as
        anywhere in the library."""
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        base, unused = read_base(config_dict, **kwargs)
        config = cls(base, **{name: config_dict.get(name) for name in cls.attached})
        return (config, unused) if wants_unused else config

    @property
    def solvers(self) -> dict[str, dict[str, Any]]:
        return {"solver": self.solver, "prefill": self.prefill}

    def to_dict(self) -> dict[str, Any]:
        return folder_config(
            self.base.to_dict(), {name: getattr(self, name) for name in self.attached}
        )

    def to_diff_dict(self) -> dict[str, Any]:
        return folder_config(
            self.base.to_diff_dict(), {name: getattr(self, name) for name in self.attached}
        )

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        return self.base.get_text_config(*args, **kwargs)

    def validate(self) -> None:
        self.base.validate()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__
        base = None if name.startswith("__") else found("__dict__").get("base")
        if base is None or name in found("__dict__") or not holds(base, name):
            return found(name)
        return getattr(base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "base" or name in self.attached:
            self.__dict__[name] = value
        else:
            setattr(self.base, name, value)


def holds(config: PreTrainedConfig, name: str) -> bool:
    """Whether a config has a value of this name that is the base model's, and no method."""
    if name in ("model_type", "solvers"):
        return False
    return (
        name in vars(config)
        or name in config.attribute_map
        or isinstance(getattr(type(config), name, None), property)
    )


def read_base(mapping: dict[str, Any], **overrides: Any) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The base model's config in a folder's, with overrides, and those of the overrides that it has
    no place for.

    Raises:
        CheckpointError: there is none that the library knows.
    """
    try:
        base = mapping["base"] | {"dtype": mapping.get("dtype")}
        base["architectures"] = mapping.get("architectures") or base["architectures"]
        config_class = CONFIG_MAPPING[base["model_type"]]
        config_class.from_dict(
            copy.deepcopy(base)
        )  # what is wrong in the folder shall not be told of the overrides
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise not_described(error) from error
    config, unused = config_class.from_dict(base, return_unused_kwargs=True, **overrides)
    return config, unused


def not_described(error: Exception) -> CheckpointError:
    """What to raise for a `config.json` that cannot be read."""
    return CheckpointError(
        f"the checkpoint's config.json does not describe a hosted model: {error}"
    )


def folder_config(base: dict[str, Any], attached: dict[str, Any]) -> dict[str, Any]:
    """The contents of a folder's `config.json`: the base model's config as plain data, and what is
    attached to it."""
    return {
        "model_type": UndertowConfig.model_type,
        "architectures": base.get("architectures"),
        "dtype": base.get("dtype"),
        "base": base | {"dtype": NOT_ALONE.format(loader(base.get("architectures")))},
        **{name: value for name, value in attached.items() if value},
    }
