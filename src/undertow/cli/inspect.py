"""undertow inspect"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from undertow.cli.command import Command, recipe_settings, refuse_settings

HELP = """Look into finished runs.
fidelity: each solver's loss and gradient against the exact rollout's.
choices: how many possible answers a model rules out, and the accuracy to expect when sampling.
lengths: accuracy by length of several runs, with the length up to which all is right.
latency: recursions, time of a step and accuracy of several runs, over the Transformer's.
gates: those of T²MLR over training.
positions: loss and state by position.
probes: what each layer knows of the next token, with --baseline beside another run's.
depth: what the iterations of a recurrent-depth model do.
parameters: how many a recipe would train, without loading any."""
PER_RUN = ("gates", "positions", "probes")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["fidelity", "choices", "lengths", "latency", "parameters", "depth", *PER_RUN],
    )
    parser.add_argument(
        "run",
        type=Path,
        nargs="+",
        help=(
            "folder of a run or of one of its seeds; of a study too for choices, lengths, latency; "
            "a recipe for parameters"
        ),
    )
    parser.add_argument(
        "--examples",
        type=int,
        help="held-out examples: 256 of each length for choices and 16 for the others, if left out",
    )
    parser.add_argument(
        "--baseline", type=Path, help="for probes: a run without recurrence to compare with"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for what lengths and latency write (default: the first run's)",
    )


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    print("\n\n".join(texts(options, overrides)))


def texts(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    from undertow.lab.inspections import compare
    from undertow.lab.inspections import run as analysis

    what, output = options.what, options.output or options.run[0]
    examples: Any = {"choices": 256}.get(what, 16) if options.examples is None else options.examples
    if what == "parameters":
        return [analysis.inspect_parameters(path, overrides) for path in options.run]
    refuse_settings(options.command, overrides)
    if what == "lengths":
        return [compare.compare_lengths(options.run, output)]
    if what == "latency":
        return [compare.compare_latency(options.run, output)]
    if what == "choices":
        return [analysis.inspect_choices(options.run, examples)]
    if what == "gates":
        return [analysis.inspect_gates(path) for path in options.run]
    if what == "positions":
        return [analysis.inspect_positions(path, examples) for path in options.run]
    if what == "probes":
        return [analysis.inspect_probes(path, options.baseline, examples) for path in options.run]
    if what == "depth":
        from undertow.lab.inspections.inspect_depth import inspect_depth

        return [inspect_depth(path, examples) for path in options.run]
    return [analysis.inspect_fidelity(path, examples) for path in options.run]


INSPECT = Command("inspect", HELP, arguments, run, recipe_settings, "the same command starts anew")
