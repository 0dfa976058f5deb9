"""The `undertow` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undertow.errors import ConfigError, UndertowError

OVERRIDES = "Settings, given as --key=value or --section.key=value; for a recipe they go before what its file says:\n\n"
PER_RUN = ("gates", "positions", "probes")
WITH_SETTINGS = ("train", "eval", "study", "inspect", "bench")
INSPECT = """Look into finished runs.
fidelity: each solver's loss and gradient against the exact rollout's.
choices: how many possible answers a model rules out, and the accuracy to expect when sampling.
lengths: accuracy by length of several runs, with the length up to which all is right.
latency: recursions, time of a step and accuracy of several runs, over the Transformer's.
gates: those of T²MLR over training.
positions: loss and state by position.
probes: what each layer knows of the next token, with --baseline beside another run's.
depth: what the iterations of a recurrent-depth model do.
parameters: how many a recipe would train, without loading any."""


def parser(help_for: str | None = None) -> argparse.ArgumentParser:
    """The parser. `help_for` names the command whose help is wanted, which costs the import of all settings."""
    main = argparse.ArgumentParser(prog="undertow", description="Recurrence for decoder-only language models.")
    commands = main.add_subparsers(
        dest="command",
        required=True,
        metavar="train | eval | study | generate | chains | inspect | convert | bench | demo",
    )

    def add(name: str, text: str) -> argparse.ArgumentParser:
        epilog = OVERRIDES + settings_help(name) if name == help_for and name in WITH_SETTINGS else None
        return commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # --task is a setting, and no short form of --tasks
        )

    command = add("train", "Train a recipe, once for each of its seeds, and evaluate what it trained.")
    command.add_argument("recipe", type=Path, help="YAML file")
    command.add_argument(
        "--dry-run", action="store_true", help="train nothing: check the recipe and tell what it would cost"
    )

    command = add("eval", "Measure the accuracy of a run's models by length; a table, JSON and a figure.")
    command.add_argument("run", type=Path, help="folder of a run, or of one of its seeds; for --tasks also of a model")
    command.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="test on all of this file: short for --task.test=FILE, no lengths and as many examples as there are",
    )
    command.add_argument("--tasks", help="zero-shot tasks of lm-eval instead, such as arc_easy,hellaswag")
    command.add_argument("--tasks-folder", type=Path, help="folder with YAML tasks of your own, for --tasks")
    command.add_argument("--limit", type=int, help="examples of each of --tasks (default all)")
    command.add_argument("--batch", type=int, default=8, help="sequences at a time for --tasks (default 8)")
    command.add_argument("--prefill", choices=["exact", "jacobi"], default="exact", help="states in --tasks (default exact)")

    command = add("study", "Train and evaluate every combination of some choices with every seed: a table and a figure.")
    command.add_argument("study", type=Path, help="YAML file")

    command = add("generate", "Continue a prompt with a run's model, or with any saved model.")
    command.add_argument("run", type=Path, help="folder of a run, of one of its seeds, or of a model")
    command.add_argument("prompt")
    command.add_argument("--max-new-tokens", type=int, default=64, help="longest answer in tokens (default 64)")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")

    command = add(
        "chains", "Let a run's model write a chain of thought for every problem of its task, to train others with."
    )
    command.add_argument("run", type=Path, help="folder of a run that was trained with chain_of_thought")
    command.add_argument("output", type=Path, help="folder for train.jsonl, valid.jsonl and test.jsonl")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    command.add_argument("--max-new-tokens", type=int, default=256, help="longest chain in tokens (default 256)")
    command.add_argument("--batch", type=int, default=64, help="problems at a time (default 64)")

    command = add("inspect", INSPECT)
    command.add_argument("what", choices=["fidelity", "choices", "lengths", "latency", "parameters", "depth", *PER_RUN])
    command.add_argument(
        "run", type=Path, nargs="+", help="folder of a run, or of one of its seeds; for parameters, a recipe"
    )
    command.add_argument(
        "--examples",
        type=int,
        help="held-out examples: 256 of each length for choices and 16 for the others, if left out",
    )
    command.add_argument("--baseline", type=Path, help="for probes: a run without recurrence to compare with")
    command.add_argument("--output", type=Path, help="folder for what lengths and latency write (default: the first run's)")

    command = add(
        "convert",
        "Loop the layers of a pretrained model, or import Huginn's training weights, as a folder to load.",
    )
    command.add_argument("source", help="folder or hub name of a model; with --huginn, a file or folder of weights")
    command.add_argument("output", type=Path, help="folder to write to")
    command.add_argument("--preset", help="layer picks of the retrofit paper, such as llama-3.2-1b")
    for name in ("prelude", "core", "coda"):
        command.add_argument(f"--{name}", help=f"layers of the {name}, 0-based, such as 0-3 or 0,2,5-7")
    command.add_argument("--depth", type=int, default=4, help="iterations where nothing else is said (default 4)")
    command.add_argument("--no-injection", action="store_true", help="let the state alone enter the core")
    command.add_argument("--huginn", action="store_true", help="import weights as Huginn's training wrote them")
    command.add_argument("--config", type=Path, help="with --huginn: config.json, if it is not beside the weights")

    command = add("bench", "Time a recurrence against a Transformer in one run: a table, and JSON.")
    command.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder to write to (default runs/bench)")

    command = add("demo", "Train three small models on Parity and compare them; a few minutes on a CPU.")
    command.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder to write to (default runs/demo)")
    return main


def settings_help(command: str) -> str:
    from undertow.config import describe

    if command == "bench":
        from undertow.benchmark import Bench

        return describe(Bench)
    if command == "study":
        from undertow.evaluation.study import Study

        return describe(Study)
    from undertow.training.recipe import Recipe

    return describe(Recipe)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 after a mistake of the user's, told in one sentence."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    wants_help = bool(given) and ("-h" in given or "--help" in given)
    options, overrides = parser(given[0] if wants_help else None).parse_known_args(given)
    try:
        if options.command not in WITH_SETTINGS:
            refuse_settings(options, overrides)
        run(options, overrides)
    except (UndertowError, OSError) as error:  # such as a folder that may not be written
        print(f"undertow: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("undertow: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def inspect(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    from undertow.analysis import compare
    from undertow.analysis import run as analysis

    what, output = options.what, options.output or options.run[0]
    examples: Any = {"choices": 256}.get(what, 16) if options.examples is None else options.examples
    if what == "parameters":
        return [analysis.inspect_parameters(path, overrides) for path in options.run]
    refuse_settings(options, overrides)
    if what == "lengths":
        return [compare.compare_lengths(options.run, output)]
    if what == "latency":
        return [compare.compare_latency(options.run, output)]
    if what == "choices":
        return [analysis.inspect_choices(path, examples) for path in options.run]
    if what == "gates":
        return [analysis.inspect_gates(path) for path in options.run]
    if what == "positions":
        return [analysis.inspect_positions(path, examples) for path in options.run]
    if what == "probes":
        return [analysis.inspect_probes(path, options.baseline, examples) for path in options.run]
    if what == "depth":
        from undertow.analysis.inspect_depth import inspect_depth

        return [inspect_depth(path, examples) for path in options.run]
    return [analysis.inspect_fidelity(path, examples) for path in options.run]


def refuse_settings(options: argparse.Namespace, overrides: list[str]) -> None:
    if overrides:
        from undertow.errors import ConfigError

        raise ConfigError(
            f"undertow {options.command} does not know {overrides[0]!r}; see undertow {options.command} --help"
        )


def convert(options: argparse.Namespace) -> None:
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


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    # Imported here, so that a command loads only what it needs.
    if options.command == "train":
        from undertow.evaluation.run import evaluate
        from undertow.training.run import load_recipe, run_folder, train

        recipe = load_recipe(options.recipe, overrides)
        if options.dry_run:
            from undertow.training.dry_run import dry_run

            print(dry_run(recipe))
            return
        for seed in recipe.seeds:
            print(train(recipe, seed))
        print(evaluate(run_folder(recipe, recipe.seeds[0]).parent, []))
    elif options.command == "eval" and options.tasks is not None:
        from undertow.evaluation.zero_shot import zero_shot

        if overrides:
            raise ConfigError(f"{overrides[0]} is a setting of a recipe, which --tasks have none of; leave it out")
        names = [name for name in options.tasks.split(",") if name]
        print(zero_shot(options.run, names, options.tasks_folder, options.limit, options.batch, options.prefill))
    elif options.command == "eval":
        from undertow.evaluation.run import evaluate

        data = []
        if options.data is not None:
            whole = ["--evaluation.lengths=[]", f"--evaluation.examples={sys.maxsize}"]
            data = [f"--task.test={json.dumps(str(options.data))}", *whole]
        print(evaluate(options.run, [*data, *overrides]))
    elif options.command == "study":
        from undertow.config import apply_overrides, from_mapping, load_yaml
        from undertow.evaluation.study import Study, study

        print(study(from_mapping(Study, apply_overrides(load_yaml(options.study), overrides))))
    elif options.command == "generate":
        from undertow.evaluation.run import continue_prompt

        print(continue_prompt(options.run, options.prompt, options.max_new_tokens, options.temperature))
    elif options.command == "chains":
        from undertow.evaluation.chains import write_chains

        print(write_chains(options.run, options.output, options.temperature, options.max_new_tokens, options.batch))
    elif options.command == "inspect":
        print("\n\n".join(inspect(options, overrides)))
    elif options.command == "convert":
        convert(options)
    elif options.command == "bench":
        from undertow.benchmark import Bench, bench
        from undertow.config import apply_overrides, from_mapping

        print(bench(from_mapping(Bench, apply_overrides({}, overrides)), options.output))
    else:
        from undertow.evaluation.demo import demo

        print(demo(options.output))


if __name__ == "__main__":
    sys.exit(main())
