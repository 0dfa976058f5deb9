"""The mistakes a user can make, as exceptions that each say in one sentence what to mend."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class UndertowError(ValueError):
    """A mistake in what the user gave. The command line prints it as one sentence and exits with
    2."""


class ConfigError(UndertowError):
    """A setting is unknown, missing, of the wrong type or at odds with another setting.

    `key` is the dotted key of the setting, or of the section that it is in, where that is known.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class DataError(UndertowError):
    """A data set is missing, malformed or empty, or does not fit the task."""


class UnsupportedArchitectureError(UndertowError):
    """The model's architecture lacks something that the chosen recurrence needs."""


class DivergedError(UndertowError):
    """Training went where no number follows. `step` is the one that could not be taken, where it is
    known."""

    step: int | None = None


class CheckpointError(UndertowError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class InUseError(UndertowError):
    """Another process works in the folder."""


class ProcessLostError(UndertowError):
    """Another process that trains the same model ended, or cannot be reached."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM ended what went on; `said`, if it is known, is what is kept of it and how
    to go on."""

    def __init__(self, number: int = signal.SIGINT, said: str = "") -> None:
        super().__init__(number, said)
        self.number, self.said = number, said


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to ``name``, or ``""`` if none is
    close."""
    matches = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def shown(value: object, most: int = 80) -> str:
    """A value in a message: a class by its name, anything else as Python writes it, on one line and
    cut short."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        text = value.strip("\r\n")
        return repr(text if len(text) <= most else f"{text[:most]}...")
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def join(section: str, name: object) -> str:
    """A dotted key that a message can bear: of one line, and not too long."""
    text = str(name) if str(name).isprintable() else repr(name)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{section}.{text}" if section else text
