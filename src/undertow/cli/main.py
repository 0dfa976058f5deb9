"""The `undertow` command: which commands there are, and what becomes of a mistake."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence

from undertow import __version__
from undertow.cli.bench import BENCH
from undertow.cli.chains import CHAINS
from undertow.cli.command import Command, refuse_settings
from undertow.cli.convert import CONVERT
from undertow.cli.demo import DEMO
from undertow.cli.evaluate import EVAL
from undertow.cli.generate import GENERATE
from undertow.cli.inspect import INSPECT
from undertow.cli.study import STUDY
from undertow.cli.tokenize import TOKENIZE
from undertow.cli.train import TRAIN
from undertow.errors import Interrupted, UndertowError, nearest
from undertow.lab.signals import hearing, stop
from undertow.reading import is_text

ALL: Sequence[Command] = (
    TRAIN,
    EVAL,
    STUDY,
    TOKENIZE,
    GENERATE,
    CHAINS,
    INSPECT,
    CONVERT,
    BENCH,
    DEMO,
)
COMMANDS = {command.name: command for command in ALL}


def parser(chosen: str | None, wants_help: bool = False) -> argparse.ArgumentParser:
    """The parser, with the options of the command that was chosen. If its help is wanted, that
    costs the import of all settings."""
    main = argparse.ArgumentParser(
        prog="undertow", description="Recurrence for decoder-only language models."
    )
    main.add_argument("--version", action="version", version=f"undertow {__version__}")
    subparsers = main.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for command in COMMANDS.values():
        own = subparsers.add_parser(
            command.name,
            parents=[plugins()],
            help=command.help,
            description=command.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # --task is a setting, and no short form of --tasks
        )
        if command.name == chosen:
            command.arguments(own)
            own.epilog = command.settings_help() if wants_help else None
    return main


def plugins() -> argparse.ArgumentParser:
    """The parser of the one option that all commands have."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE_OR_FILE",
        help="what registers recurrences, solvers, tasks or exit rules of your own; any number",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 after a mistake of the user's, told in one sentence; 130 after Ctrl-C and
    143 after SIGTERM."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for argument in given:
        if not is_text(argument):
            print(
                f"undertow: {argument[:80]!r} is no UTF-8 text; write it otherwise", file=sys.stderr
            )
            return 2
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        mend = nearest(given[0], COMMANDS) or f"; use one of {', '.join(COMMANDS)}"
        parser(None).error(f"there is no command {given[0]!r}{mend}")
    try:
        dispatch(given)
    except (UndertowError, OSError) as error:  # such as a folder that may not be written
        tell(error, sentence(error))
        return 2
    except (MemoryError, RecursionError, OverflowError, UnicodeError, RuntimeError) as error:
        told = last_resort(error)
        if told is None:
            raise
        tell(error, told)
        return 2
    except KeyboardInterrupt as error:
        number, said = (
            (error.number, error.said) if isinstance(error, Interrupted) else (signal.SIGINT, "")
        )
        said = said or COMMANDS[given[0]].interrupted
        tell(error, f"interrupted; {said}")
        return 128 + number
    return 0


def tell(error: BaseException, text: str) -> None:
    """Print what ended the command, once for all processes that train together."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from undertow.lab.processes import speaks

        if not speaks(error):
            return
    print(f"undertow: {text}", file=sys.stderr)


def dispatch(given: list[str]) -> None:
    """Run one command."""
    # argparse would take a setting with a blank in it, such as --model={path: m}, for one more
    # file.
    sections = [argument for argument in given if re.match(r"--[\w.]+=[{[]", argument)]
    rest = [argument for argument in given if argument not in sections]
    if names := plugins().parse_known_args(rest)[0].plugin:
        from undertow.plugins import load_plugins

        load_plugins(names)
    chosen = given[0] if given else None
    wants_help = "-h" in given or "--help" in given
    options, others = parser(chosen, wants_help).parse_known_args(rest)
    overrides = [argument for argument in given if argument in sections or argument in others]
    command = COMMANDS[options.command]
    if command.settings is None:
        refuse_settings(command.name, overrides)
    with hearing(stop, [signal.SIGTERM]):
        command.run(options, overrides)


def sentence(error: Exception) -> str:
    """What an error says, in one line that any terminal can show."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 2000 else f"{text[:2000]}..."
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def last_resort(error: Exception) -> str | None:
    """What to say of an error that whoever read the input should have told, but could not; None for
    a fault of ours."""
    if (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "can't allocate memory" in str(error)
    ):
        return (
            f"memory ran out ({sentence(error)}); make the model, the batch or the lengths smaller"
        )
    if isinstance(error, RecursionError):
        return "something that was given is nested too deep to be read; make it flatter"
    if isinstance(error, OverflowError):
        return f"a number that was given is too large ({sentence(error)}); make it smaller"
    if isinstance(error, UnicodeError):
        return (
            f"a text that was given cannot be read or written ({sentence(error)}); save it as UTF-8"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
