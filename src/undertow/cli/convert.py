"""undertow convert"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command
from undertow.errors import ConfigError

# What each way to convert leaves no room for.
NO_ROOM = {
    "huginn": ("whole", "preset", "prelude", "core", "coda", "depth", "no_injection"),
    "whole": ("preset", "prelude", "core", "coda", "no_injection"),
    "preset": ("prelude", "core", "coda"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="folder or hub name of a model; with --huginn, a file or folder of weights"
    )
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--preset", help="layer picks of the retrofit paper, such as llama-3.2-1b")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="loop the whole stack with an exit gate, as LoopLM does",
    )
    for name in ("prelude", "core", "coda"):
        parser.add_argument(
            f"--{name}", help=f"layers of the {name}, 0-based, such as 0-3 or 0,2,5-7"
        )
    parser.add_argument(
        "--depth", type=int, help="iterations where nothing else is said (default 4)"
    )
    parser.add_argument(
        "--no-injection", action="store_true", help="let the state alone enter the core"
    )
    parser.add_argument(
        "--huginn", action="store_true", help="import weights as Huginn's training wrote them"
    )
    parser.add_argument(
        "--config", type=Path, help="with --huginn: config.json, if it is not beside the weights"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="with --huginn: its tokenizer, which `undertow generate` and eval need",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.lab.training.convert import import_checkpoint, loop_checkpoint, looping

    check(options)
    if options.huginn:
        print(import_checkpoint(options.source, options.output, options.config, options.tokenizer))
        return
    looped = looping(
        options.source,
        options.preset,
        options.whole,
        (options.prelude, options.core, options.coda),
        4 if options.depth is None else options.depth,
        "none" if options.no_injection else "adapter",
    )
    print(loop_checkpoint(options.source, options.output, looped))


def check(options: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    given = {
        name: value
        for name, value in vars(options).items()
        if value is not None and value is not False
    }
    for way, names in NO_ROOM.items():
        for name in names:
            if way in given and name in given:
                raise ConfigError(
                    f"--{name.replace('_', '-')} does nothing beside --{way}; leave out one of them"
                )
    for name in ("config", "tokenizer"):
        if name in given and "huginn" not in given:
            raise ConfigError(
                f"--{name} is an option of --huginn alone; give --huginn, or leave it out"
            )


CONVERT = Command(
    "convert",
    "Loop the layers of a pretrained model, or import Huginn's training weights, as a folder to "
    "load.",
    arguments,
    run,
    interrupted="what was there before is untouched; the same command starts anew",
)
