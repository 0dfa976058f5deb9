"""undertow train"""

from __future__ import annotations

import argparse
from pathlib import Path

from undertow.cli.command import Command, recipe_settings
from undertow.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: check the recipe and tell what it would cost",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="with --dry-run: tell what it would cost on N GPUs, one a process",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    from undertow.lab.evaluation.run import carry_out
    from undertow.lab.runs.recipe import load_recipe
    from undertow.lab.training.dry_run import dry_run

    if options.devices != 1 and not options.dry_run:
        raise ConfigError(
            f"--devices is {options.devices}, which --dry-run alone uses; several devices train by "
            f"torchrun --nproc-per-node {options.devices} -m undertow train ..."
        )
    recipe = load_recipe(options.recipe, overrides, options.plugin)
    for text in [dry_run(recipe, options.devices)] if options.dry_run else carry_out(recipe):
        print(text)


TRAIN = Command(
    "train",
    "Train a recipe, once for each of its seeds, and evaluate what it trained.",
    arguments,
    run,
    recipe_settings,
    "what was trained is kept, and the same command goes on from there",
)
