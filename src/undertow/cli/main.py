"""The `undertow` command: which commands there are, and what becomes of a mistake."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from undertow.cli.bench import BENCH
from undertow.cli.chains import CHAINS
from undertow.cli.command import Command, refuse_settings
from undertow.cli.convert import CONVERT
from undertow.cli.demo import DEMO
from undertow.cli.evaluate import EVAL
from undertow.cli.generate import GENERATE
from undertow.cli.inspect import INSPECT
from undertow.cli.study import STUDY
from undertow.cli.train import TRAIN
from undertow.errors import UndertowError

ALL: Sequence[Command] = (TRAIN, EVAL, STUDY, GENERATE, CHAINS, INSPECT, CONVERT, BENCH, DEMO)
COMMANDS = {command.name: command for command in ALL}


def parser(help_for: str | None = None) -> argparse.ArgumentParser:
    """The parser. `help_for` names the command whose help is wanted, which costs the import of all settings."""
    main = argparse.ArgumentParser(prog="undertow", description="Recurrence for decoder-only language models.")
    subparsers = main.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for command in COMMANDS.values():
        command.arguments(
            subparsers.add_parser(
                command.name,
                help=command.help,
                description=command.help,
                epilog=command.settings_help() if command.name == help_for else None,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,  # --task is a setting, and no short form of --tasks
            )
        )
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 after a mistake of the user's, told in one sentence."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    wants_help = bool(given) and ("-h" in given or "--help" in given)
    # argparse would take a setting with a blank in it, such as --model={path: m}, for one more file.
    sections = [argument for argument in given if re.match(r"--[\w.]+=[{[]", argument)]
    rest = [argument for argument in given if argument not in sections]
    options, others = parser(given[0] if wants_help else None).parse_known_args(rest)
    overrides = [argument for argument in given if argument in sections or argument in others]
    command = COMMANDS[options.command]
    try:
        if command.settings is None:
            refuse_settings(command.name, overrides)
        command.run(options, overrides)
    except (UndertowError, OSError) as error:  # such as a folder that may not be written
        print(f"undertow: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("undertow: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
