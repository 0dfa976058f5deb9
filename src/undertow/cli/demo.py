"""undertow demo"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        help="folder to write to (default runs/demo)",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.lab.evaluation.demo import demo

    print(demo(options.output))


DEMO = Command(
    "demo",
    "Train three small models on Parity and compare them; a few minutes on a CPU.",
    arguments,
    run,
    interrupted="models that are trained are kept, and the same command goes on with the others",
)
