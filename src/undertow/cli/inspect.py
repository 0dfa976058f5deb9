"""undertow inspect"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command, recipe_settings, refuse_settings


def arguments(parser: argparse.ArgumentParser) -> None:
    from undertow.lab.inspections.inspection import all_inspections

    kinds = parser.add_subparsers(dest="what", required=True, metavar="what")
    for name, inspection in all_inspections().items():
        kind = kinds.add_parser(
            name, help=inspection.help, description=inspection.help, allow_abbrev=False
        )
        folders = "a recipe" if inspection.settings else "folder of a run, of a seed, or of a study"
        kind.add_argument("run", type=Path, nargs="+", help=folders)
        for option, settings in inspection.options:
            kind.add_argument(option, **settings)
        kind.set_defaults(inspection=inspection, taken=[name for name, _ in inspection.options])


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    inspection = options.inspection
    given = {name: getattr(options, name.removeprefix("--")) for name in options.taken}
    given = {name.removeprefix("--"): value for name, value in given.items()}
    if inspection.settings:
        given["overrides"] = overrides
    else:
        refuse_settings(options.command, overrides)
    print(inspection.function(options.run, **given))


INSPECT = Command(
    "inspect",
    "Look into finished runs.",
    arguments,
    run,
    recipe_settings,
    "the same command starts anew",
)
