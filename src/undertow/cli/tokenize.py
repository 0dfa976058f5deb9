"""undertow tokenize"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command
from undertow.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        help=".jsonl, .json, .parquet or .txt, whose documents end at an empty line",
    )
    parser.add_argument("--hub", help="a data set in place of files, as path or path:configuration")
    parser.add_argument("--column", default="text", help="what rows call their text")
    parser.add_argument("--tokenizer", required=True, help="folder or hub name of a tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--processes", type=int, default=1, help="that tokenize (default 1)")
    parser.add_argument(
        "--shard", type=int, default=64, help="million characters of a shard (default 64)"
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.lab.runs.loading import load_tokenizer
    from undertow.lab.runs.lock import locked
    from undertow.lab.tables import table
    from undertow.lab.tasks.documents import Sources, stamped
    from undertow.lab.tasks.tokenizing import tokenize
    from undertow.reading import expanded

    if bool(options.files) == (options.hub is not None):
        raise ConfigError("undertow tokenize takes either files or --hub; give one of them")
    for name in ("processes", "shard"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}; use 1 or more")
    files = tuple(stamped(expanded(path)) for path in options.files)
    sources = Sources(files, options.hub, options.column)
    tokenizer = load_tokenizer(options.tokenizer)
    with locked(options.output):
        index = tokenize(
            sources, tokenizer, options.output, options.processes, options.shard * 1_000_000
        )
    rows = [
        [split, *(f"{of[name]:,}" for name in ("documents", "characters", "tokens", "empty"))]
        for split, of in index["totals"].items()
    ]
    print(table(["split", "documents", "characters", "tokens", "left out, empty"], rows))


TOKENIZE = Command(
    "tokenize",
    "Make text larger than memory into shards of tokens, which a recipe's task `shards` trains on.",
    arguments,
    run,
    interrupted="finished shards are kept, and the same command goes on from there",
)
