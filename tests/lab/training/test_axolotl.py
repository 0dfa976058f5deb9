"""The plugin does what axolotl asks of it, in the order in which axolotl asks; axolotl itself is
played by stand-ins."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import hosted, unhosted
from transformers import Trainer

from undertow.errors import ConfigError
from undertow.host.attachment import find_attachment, has_recurrence

NAME = "undertow.lab.training.axolotl"
T2MLR = {"kind": "t2mlr", "first_layer": 1, "last_layer": 2}


class Config(dict):  # type: ignore[type-arg]
    """Has attributes, None where there is no key, as axolotl's."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Config(value) if isinstance(value, dict) else value


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin as axolotl loads it, by its dotted name."""
    for name in ("", ".integrations", ".core", ".core.trainers"):
        monkeypatch.setitem(sys.modules, f"axolotl{name}", types.ModuleType(f"axolotl{name}"))
    base, trainers = types.ModuleType("base"), types.ModuleType("base")
    base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    trainers.AxolotlTrainer = type("AxolotlTrainer", (Trainer,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    monkeypatch.setitem(sys.modules, "axolotl.core.trainers.base", trainers)
    sys.modules.pop(NAME, None)
    yield importlib.import_module(NAME).UndertowPlugin()
    del sys.modules[NAME]


def test_it_attaches_what_the_config_names(plugin: Any) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    arguments = getattr(importlib.import_module(module), name)
    cfg = Config(arguments(undertow={"recurrence": T2MLR, "solver": "sequential"}).model_dump())
    model = unhosted("llama")
    plugin.post_model_build(cfg, model)
    attachment = find_attachment(model)
    assert attachment.pathway is not None and list(attachment.pathway.block) == [1, 2]
    assert attachment.solver.kind == "sequential"
    assert plugin.get_trainer_cls(cfg) is None


def test_without_a_section_it_leaves_the_model_alone(plugin: Any) -> None:
    model = unhosted("llama")
    plugin.post_model_build(Config(), model)
    assert not has_recurrence(model) and plugin.get_trainer_cls(Config()) is None
    plugin.post_model_build(Config(), hosted("llama", "t2mlr-middle"))  # a hosted base model


def test_gates_learn_faster_in_supervised_training(plugin: Any) -> None:
    section = {"recurrence": T2MLR, "gate_multiplier": 30}
    made = plugin.get_trainer_cls(Config(undertow=section))
    assert [each.__name__ for each in made.__mro__[1:3]] == ["FastGates", "AxolotlTrainer"]
    assert made.gate_multiplier == 30
    for other in ({"rl": "grpo"}, {"reward_model": True}):
        assert plugin.get_trainer_cls(Config(undertow=section, **other)) is None


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"recurence": T2MLR}, "undertow.recurence"),
        ({"solver": "sequential"}, "names no recurrence"),
        ({"recurrence": T2MLR | {"first_layer": "one"}}, r"undertow\.recurrence\.first_layer"),
    ],
)
def test_a_wrong_section_is_told(plugin: Any, section: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plugin.post_model_build(Config(undertow=section), unhosted("llama"))
