"""undertow bench"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/bench"),
        help="folder to write to (default runs/bench)",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.lab.benchmark import Bench, bench
    from undertow.mapping import apply_overrides, from_mapping

    print(bench(from_mapping(Bench, apply_overrides({}, overrides)), options.output))


def settings() -> type:
    from undertow.lab.benchmark import Bench

    return Bench


BENCH = Command(
    "bench",
    "Time a recurrence against a Transformer in one run: a table, and JSON.",
    arguments,
    run,
    settings,
)
