"""What an inspection is: one way to look into runs, as `undertow inspect NAME RUN...` calls it.
Each registers itself in a module of its own in this folder."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from undertow.paths import takes_paths

Option = tuple[str, Mapping[str, Any]]
"""The name of an option and what argparse's `add_argument` is told of it."""
BASELINE: Option = (
    "--baseline",
    {"type": Path, "metavar": "RUN", "help": "a run without recurrence to compare with"},
)
OUTPUT: Option = (
    "--output",
    {"type": Path, "metavar": "FOLDER", "help": "folder to write to (default: the first run's)"},
)


def examples(default: int) -> Option:
    """The option for a number of held-out examples."""
    text = f"held-out examples to look at (default {default})"
    return "--examples", {"type": int, "default": default, "help": text}


@dataclass(frozen=True)
class Inspection:
    """One inspection.

    Attributes:
        name: what is typed after `undertow inspect`.
        help: what it shows, in a line.
        function: given the paths, and the options by name, returns the text to print.
        options: what it takes besides the paths.
        settings: whether it looks at recipes, with settings `--section.key=value`, which it is
            given as `overrides`.
    """

    name: str
    help: str
    function: Callable[..., str]
    options: tuple[Option, ...] = ()
    settings: bool = False


INSPECTIONS: dict[str, Inspection] = {}


def all_inspections() -> dict[str, Inspection]:
    """Every inspection by name, when each module in this folder has registered its own."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return dict(sorted(INSPECTIONS.items()))


def inspection(
    name: str, help: str, *options: Option, together: bool = False, settings: bool = False
) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Register a function as an inspection, and return it, taking paths as text too.

    Args:
        name, help, options, settings: see `Inspection`.
        together: whether the function takes all paths at once; else one path, and what it says of
            each is put one below the other.
    """

    def register(function: Callable[..., str]) -> Callable[..., str]:
        function = takes_paths(function)

        def of_each(paths: list[Path], **given: Any) -> str:
            return "\n\n".join(function(path, **given) for path in paths)

        called = function if together else of_each
        INSPECTIONS[name] = Inspection(name, help, called, options, settings)
        return function

    return register
