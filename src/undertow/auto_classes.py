"""Lets transformers' Auto classes and PEFT load what Undertow saved, and imports neither of them.

After `import undertow`, `AutoModelForCausalLM.from_pretrained(folder)` loads a folder with a
recurrence, and `PeftModel.from_pretrained(base, folder)` an adapter with one. Both begin with a
table of config classes, in which they look up a name that the folder gives. As soon as the module
that holds such a table has been imported, or at once where it has been before, our names are
entered there: each with a `Later`, which imports the module of Undertow that enters the config
class itself, and the classes that go with it, when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Mapping
from typing import Any

AUTO_CONFIGS = "transformers.models.auto.configuration_auto"
PEFT_CONFIGS = "peft.mapping"

# By the name that stands in a folder, the module whose import enters the config class.
MODEL_TYPES = {
    "undertow": "undertow.host",
    "huginn_raven": "undertow.models",
    "lstm": "undertow.models",
    "undertow_pause": "undertow.models",
}
PEFT_TYPES = {"UNDERTOW": "undertow.host.adapters"}


class Later:
    """Stands for a config class in a table until it is used: called, or asked for an attribute."""

    def __init__(self, home: str, name: str, look_up: Callable[[str], Any]) -> None:
        self._home = home
        self._name = name
        self._look_up = look_up

    def _class(self) -> Any:
        importlib.import_module(self._home)
        return self._look_up(self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._class()
        # PEFT's way to make a config, which passes over settings that a later PEFT has added.
        return getattr(found, "from_peft_type", found)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying, pickling and the like ask for
            raise AttributeError(name)
        return getattr(self._class(), name)


def enter_model_types(module: Any) -> None:
    """Enter our model types into transformers' table of configs."""
    configs = module.CONFIG_MAPPING
    for name, home in MODEL_TYPES.items():
        if name not in configs:
            configs.register(name, Later(home, name, configs.__getitem__))


def enter_peft_types(module: Any) -> None:
    """Enter our kind of adapter into PEFT's table of configs."""
    configs = module.PEFT_TYPE_TO_CONFIG_MAPPING
    for name, home in PEFT_TYPES.items():
        configs.setdefault(name, Later(home, name, configs.__getitem__))


TABLES: Mapping[str, Callable[[Any], None]] = {
    AUTO_CONFIGS: enter_model_types,
    PEFT_CONFIGS: enter_peft_types,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules that hold the tables as Python would, and has our names entered when one of
    them has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in TABLES:
            return None
        finders = [each for each in sys.meta_path if each is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_enter(module: Any) -> None:
                execute(module)
                TABLES[name](module)

            spec.loader.exec_module = execute_and_enter  # type: ignore[method-assign]
        return spec


def enter_names() -> None:
    """Enter our names into the tables that are there, and into the others when they come."""
    sys.meta_path.insert(0, AfterImport())
    for name, enter in TABLES.items():
        if name in sys.modules:
            enter(importlib.import_module(name))
