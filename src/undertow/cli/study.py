"""undertow study"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="YAML file")


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.lab.study.settings import Study
    from undertow.lab.study.study import study
    from undertow.mapping import load_config

    settings = load_config(Study, options.study, overrides)
    print(study(settings.with_plugins(options.plugin)))


def settings() -> type:
    from undertow.lab.study.settings import Study

    return Study


STUDY = Command(
    "study",
    "Train and evaluate every combination of some choices with every seed: a table and a figure.",
    arguments,
    run,
    settings,
)
