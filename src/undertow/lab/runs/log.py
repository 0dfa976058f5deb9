"""What a run tells while it trains: a JSON-lines log on disk and a progress bar on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from undertow.errors import CheckpointError, shown
from undertow.paths import takes_paths
from undertow.reading import MalformedError, parse_json, read_lines

# What others compute with, of the entries that have it.
NUMBERS = (
    "step",
    "loss",
    "eval_loss",
    "seconds_per_step",
    "tokens",
    "groups",
    "gate_recurrent",
    "gate_current",
)


@takes_paths
def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a run's log, oldest first; a last line that was cut short is left out. None
    where there is no log.

    Raises:
        CheckpointError: another line is no entry, or holds text where a number belongs.
    """
    entries: list[dict[str, Any]] = []
    if not path.exists():
        return entries
    for number, line in read_lines(path, CheckpointError):
        try:
            entry = parse_json(line)
            placed = isinstance(entry, dict) and ("step" in entry or "event" in entry)
            fits = placed and all(is_number(entry[key]) for key in NUMBERS if key in entry)
            if not fits or not is_step(entry.get("step", 0)):
                raise MalformedError(f"expected an entry of a log, found {shown(line)}")
        except MalformedError as error:
            if line.startswith("{") and not line.endswith("\n"):  # cut short by a kill
                break
            raise CheckpointError(f"{path}, line {number}: {error}; remove the line") from error
        entries.append(entry)
    return entries


def is_number(value: object) -> bool:
    """Whether it is a number that a float can hold; a loss that is no number is one here."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000
    )


def is_step(value: float) -> bool:
    return value >= 0 and value == value // 1  # neither NaN nor infinite
