"""undertow generate"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, help="folder of a run, of one of its seeds, or of a model"
    )
    parser.add_argument("prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, help="longest answer in tokens (default 64)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--depth", type=int, help="iterations of a recurrent-depth model (default as trained)"
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.lab.evaluation.run import continue_prompt

    print(
        continue_prompt(
            options.run, options.prompt, options.max_new_tokens, options.temperature, options.depth
        )
    )


GENERATE = Command(
    "generate",
    "Continue a prompt with a run's model, or with any saved model.",
    arguments,
    run,
    interrupted="the same command starts anew",
)
