"""A plugin of axolotl that attaches a recurrence to the model which it trains. In axolotl's YAML::

    plugins: [undertow.lab.training.axolotl.UndertowPlugin]
    undertow:
      recurrence: {kind: t2mlr, first_layer: 12, last_layer: 17}
      solver: auto
      gate_multiplier: 30
    lora_modules_to_save: [recurrence]  # beside an adapter

Without the section it only lets axolotl load a folder that holds a recurrence, as its base model.

It follows the interface that axolotl's plugins have (`BasePlugin`, read in its source); tests call
it as axolotl does, with stand-ins for axolotl, which is no dependency.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, PositiveFloat

from undertow.depth.looped import Looped
from undertow.errors import ConfigError
from undertow.host import attach
from undertow.lab.training.gates import FastGates
from undertow.mapping import from_mapping
from undertow.pathways import Recurrence
from undertow.settings import settings
from undertow.solvers import Auto, Solver


@settings
class UndertowSection:
    """What stands under `undertow`."""

    recurrence: Recurrence | None = None
    """The recurrence in time, by its kind, as in a recipe."""
    looped: Looped | None = None
    """The layers to loop."""
    solver: Solver = field(default_factory=Auto)
    """How states are found in training."""
    gate_multiplier: PositiveFloat = 1.0
    """How much faster T²MLR's gates learn than the rest; in supervised training only."""

    def __post_init__(self) -> None:
        if self.recurrence is None and self.looped is None:
            raise ConfigError(
                "undertow names no recurrence; give undertow.recurrence or undertow.looped, or "
                "leave the section out"
            )


class UndertowArgs(BaseModel):
    """What the plugin adds to axolotl's config."""

    undertow: dict[str, Any] | None = None


class UndertowPlugin(BasePlugin):
    """Attaches after the model is loaded, before any adapter wraps it."""

    def get_input_args(self) -> str:
        """Where axolotl finds the keys that the plugin adds."""
        return f"{UndertowArgs.__module__}.{UndertowArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Attach what the config asks for.

        Raises:
            ConfigError, UnsupportedArchitectureError: the section is wrong, or does not fit the
                model.
        """
        if (section := section_of(cfg)) is None:
            return
        for recurrence in (section.recurrence, section.looped):
            if recurrence is not None:
                attach(model, recurrence, section.solver)

    def get_trainer_cls(self, cfg: Any) -> Any:
        """Axolotl's supervised trainer, with gates of a rate of their own; None leaves the choice
        to axolotl."""
        section = section_of(cfg)
        if section is None or section.gate_multiplier == 1 or cfg.rl or cfg.reward_model:
            return None
        from axolotl.core.trainers.base import AxolotlTrainer

        members = {"gate_multiplier": section.gate_multiplier}
        return type("GatedAxolotlTrainer", (FastGates, AxolotlTrainer), members)


def section_of(cfg: Any) -> UndertowSection | None:
    """The section of a config, which axolotl holds as dictionaries with attributes.

    Raises:
        ConfigError: it is malformed.
    """
    return None if cfg.undertow is None else from_mapping(UndertowSection, cfg.undertow, "undertow")
