"""Count what was tried and kept, and say it in lines that `all.py` reads: ``N of M promise (S
s)``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from forked import warm_up


class Tally:
    """The trials of one promise. Those that broke it are printed as they come, the count by
    `tell`."""

    since = time.monotonic()  # when the last trial of this process ended, of whichever promise

    def __init__(self, promise: str) -> None:
        self.promise, self.tried, self.kept, self.seconds = promise, 0, 0, 0.0

    def add(self, trial: str, fault: str) -> None:
        """Count a trial; `fault` says what was wrong, "" if nothing was."""
        self.tried += 1
        self.kept += not fault
        now = time.monotonic()
        self.seconds += now - Tally.since
        Tally.since = now
        if fault:
            print(f"broken: {self.promise}: {trial}: {fault}", flush=True)

    def tell(self) -> bool:
        """Print the count; whether every trial kept the promise. One that was never tried is not
        kept."""
        print(f"{self.kept} of {self.tried} {self.promise} ({self.seconds:.0f} s)", flush=True)
        return self.kept == self.tried > 0


def skip(promise: str, why: str) -> None:
    """Say that a promise could not be tried here."""
    print(f"skipped: {promise}: {why}", flush=True)


def first(*faults: str) -> str:
    """The first fault that is one."""
    return next(filter(None, faults), "")


def main(trials: Callable[[Path, int], list[Tally]], about: str | None) -> None:
    """Run a script's trials in a folder of their own, and exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is random in the trials")
    options = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory(prefix="undertow-chaos-") as folder:
        Path(folder).chmod(0o755)  # for trials as another user
        tallies = trials(Path(folder), options.seed)
        sys.exit(0 if all([tally.tell() for tally in tallies]) else 1)
