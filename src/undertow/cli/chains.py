"""undertow chains"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, help="folder of a run that was trained with chain_of_thought"
    )
    parser.add_argument(
        "output", type=Path, help="folder for train.jsonl, valid.jsonl and test.jsonl"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, help="longest chain in tokens (default 256)"
    )
    parser.add_argument("--batch", type=int, default=64, help="problems at a time (default 64)")


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.lab.evaluation.chains import write_chains

    print(
        write_chains(
            options.run, options.output, options.temperature, options.max_new_tokens, options.batch
        )
    )


CHAINS = Command(
    "chains",
    "Let a run's model write a chain of thought for every problem of its task, to train others "
    "with.",
    arguments,
    run,
    interrupted="the same command goes on after the last complete row",
)
