"""What a command of the `undertow` program consists of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from undertow.errors import ConfigError

OVERRIDES = (
    "Settings, given as --key=value or --section.key=value; for a recipe they go before what its "
    "file says:\n\n"
)


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: what is typed after `undertow`.
        help: what it does.
        arguments: adds its own options to a parser.
        run: does it and prints what came of it, given the options and the settings beside them. It
            imports what it needs when it runs, so that a command loads nothing for the others.
        settings: gives the configuration class whose fields are its settings; None if it takes
            none.
        interrupted: what Ctrl-C leaves of it, where it does not say so itself.
    """

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], None]
    settings: Callable[[], type] | None = None
    interrupted: str = "nothing was written; the same command starts anew"

    def settings_help(self) -> str | None:
        """What --help says of the settings, from the fields of their configuration class."""
        if self.settings is None:
            return None
        from undertow.describe import describe
        from undertow.plugins import load_installed

        load_installed()
        return OVERRIDES + describe(self.settings())


def refuse_settings(command: str, overrides: list[str]) -> None:
    """Raise a ConfigError if anything was given that the command does not know."""
    if overrides:
        raise ConfigError(
            f"undertow {command} does not know {overrides[0]!r}; see undertow {command} --help"
        )


def recipe_settings() -> type:
    from undertow.lab.runs.recipe import Recipe

    return Recipe
