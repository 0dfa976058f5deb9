"""undertow eval"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from undertow.cli.command import Command, recipe_settings
from undertow.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        help="folder of a run, or of one of its seeds; for --tasks also of a model",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help=(
            "test on all of this file: short for --task.test=FILE, no lengths and as many examples "
            "as there are"
        ),
    )
    parser.add_argument(
        "--depth", type=int, help="iterations of a recurrent-depth model (default as trained)"
    )
    parser.add_argument(
        "--tasks", help="zero-shot tasks of lm-eval instead, such as arc_easy,hellaswag"
    )
    parser.add_argument(
        "--tasks-folder", type=Path, help="folder with YAML tasks of your own, for --tasks"
    )
    parser.add_argument("--limit", type=int, help="examples of each of --tasks (default all)")
    parser.add_argument("--batch", type=int, help="sequences at a time for --tasks (default 8)")
    parser.add_argument(
        "--prefill", choices=["exact", "jacobi"], help="states in --tasks (default exact)"
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    if options.tasks is not None:
        from undertow.lab.evaluation.zero_shot import zero_shot

        if overrides:
            raise ConfigError(
                f"{overrides[0]} is a setting of a recipe, which --tasks have none of; leave it out"
            )
        if options.data is not None:
            raise ConfigError(
                "--data is a file for the run's own task, and --tasks name others; give one of them"
            )
        names = [name for name in options.tasks.split(",") if name]
        batch, prefill = 8 if options.batch is None else options.batch, options.prefill or "exact"
        print(
            zero_shot(
                options.run,
                names,
                options.tasks_folder,
                options.limit,
                batch,
                prefill,
                options.depth,
            )
        )
        return
    for name in ("tasks_folder", "limit", "batch", "prefill"):
        if getattr(options, name) is not None:
            option, instead = (
                name.replace("_", "-"),
                {"limit": "examples", "batch": "batch"}.get(name),
            )
            mend = (
                f"use --evaluation.{instead}, or give --tasks"
                if instead
                else "give --tasks, or leave it out"
            )
            raise ConfigError(f"--{option} is an option of --tasks alone; {mend}")
    for override in overrides:
        if not override.startswith(("--task.", "--task=", "--evaluation.", "--evaluation=")):
            raise ConfigError(
                f"{override} says how a model is made, and this one is made already; leave it out"
            )
    from undertow.lab.evaluation.run import evaluate

    data = []
    if options.data is not None:
        whole = ["--evaluation.lengths=[]", f"--evaluation.examples={sys.maxsize}"]
        data = [f"--task.test={json.dumps(str(options.data))}", *whole]
    print(evaluate(options.run, [*data, *overrides], options.depth))


EVAL = Command(
    "eval",
    "Measure the accuracy of a run's models by length; a table, JSON and a figure.",
    arguments,
    run,
    recipe_settings,
    "the results of seeds that were done are written; the same command makes all of them anew",
)
