"""undertow convert"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder or hub name of a model; with --huginn, a file or folder of weights")
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--preset", help="layer picks of the retrofit paper, such as llama-3.2-1b")
    for name in ("prelude", "core", "coda"):
        parser.add_argument(f"--{name}", help=f"layers of the {name}, 0-based, such as 0-3 or 0,2,5-7")
    parser.add_argument("--depth", type=int, default=4, help="iterations where nothing else is said (default 4)")
    parser.add_argument("--no-injection", action="store_true", help="let the state alone enter the core")
    parser.add_argument("--huginn", action="store_true", help="import weights as Huginn's training wrote them")
    parser.add_argument("--config", type=Path, help="with --huginn: config.json, if it is not beside the weights")


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.depth.looped import Looped
    from undertow.training.convert import import_checkpoint, loop_checkpoint, picks

    if options.huginn:
        print(import_checkpoint(options.source, options.output, options.config))
        return
    settings = {"depth": options.depth, "injection": "none" if options.no_injection else "adapter"}
    if options.preset is not None:
        looped = Looped.preset(options.preset, **settings)
    else:
        looped = Looped(picks(options.prelude), picks(options.core), picks(options.coda), **settings)
    print(loop_checkpoint(options.source, options.output, looped))


CONVERT = Command(
    "convert",
    "Loop the layers of a pretrained model, or import Huginn's training weights, as a folder to load.",
    arguments,
    run,
)
