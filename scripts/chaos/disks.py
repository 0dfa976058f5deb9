"""Train on disks that are full, with files that may not grow, and in folders that may not be
written.

    python scripts/chaos/disks.py [--seed 0]

Where there is no room the run has to end with a sentence; when there is room again, the same
command has to give the weights of a run that always had it, with nothing left behind. The disks are
small file systems in memory, which root alone may mount: without that, or as another user, these
trials are skipped.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked import run
from small_runs import RUN, SEED, equal, names, short, weights, write
from tally import Tally, first, main, skip

SIZES = (
    4,
    8,
    16,
    32,
    64,
    100,
    140,
    180,
    260,
    340,
    420,
    500,
    560,
    600,
    640,
    700,
)  # KiB; a whole run takes some 1,000
ROOM = "50m"
FILE_SIZES = (1_000, 20_000, 60_000)  # bytes that a file may have
NOBODY = 65_534
FULL = "full disks: one sentence; with room again the same weights"
READ_ONLY = "folders that may not be written: one sentence, nothing changed"


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def why_not(folder: Path) -> str:
    """Why nothing can be mounted here, "" if it can."""
    try:
        with small_disk(folder, 4):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"mounting is not possible here ({error})"


def left_behind(folder: Path) -> str:
    """Which half-written files are in a folder, "" if none."""
    hidden = [str(path.relative_to(folder)) for path in folder.rglob(".*")]
    return f"{hidden} is left behind" if hidden else ""


def full_disks(work: Path, expected: Path) -> Tally | None:
    disk = work / "disk"
    if why := why_not(disk):
        skip(FULL, why)
        return None
    tally = Tally(FULL)
    for size in SIZES:
        case = work / f"case {size}"
        with small_disk(disk, size):
            command = write(case, short(output=str(disk / "runs")))
            before = run(command, case)
            mount("-o", f"remount,size={ROOM}", str(disk))
            after = run(command, case)
            tally.add(
                f"{size} KiB",
                first(
                    "" if before.kind in ("refused", "ok") else str(before),
                    "" if after.kind == "ok" else f"with more room: {after}",
                    ""
                    if equal(weights(disk / SEED / "model"), weights(expected))
                    else "its weights differ",
                    left_behind(disk / RUN),
                ),
            )
    return tally


def small_files(work: Path, expected: Path, tally: Tally) -> None:
    for limit in FILE_SIZES:
        case = work / f"file {limit}"
        command = write(case, short())
        bound = lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
        before = run(command, case, before=bound)
        after = run(command, case)
        tally.add(
            f"files of {limit:,} bytes at most",
            first(
                "" if before.kind == "refused" else str(before),
                "" if after.kind == "ok" else f"without the limit: {after}",
                ""
                if equal(weights(case / SEED / "model"), weights(expected))
                else "its weights differ",
                left_behind(case / RUN),
            ),
        )


def read_only(work: Path, finished: Path) -> Tally | None:
    """As another user, who may read and not write."""
    if os.geteuid() != 0:
        skip(READ_ONLY, "this takes root, who can become another user")
        return None
    tally = Tally(READ_ONLY)
    uses = {
        "a new run": (False, ["train", "recipe.yaml"]),
        "a finished run, trained again": (True, ["train", "recipe.yaml"]),
        "a finished run, evaluated": (True, ["eval", str(RUN)]),
        "a finished run that generates": (True, ["generate", str(RUN), "101="]),
    }
    for name, (done, command) in uses.items():
        case = work / name
        if done:
            shutil.copytree(finished, case)
        else:
            write(case, short())
            (case / RUN).mkdir(parents=True)
        for path in [case / "runs", *(case / "runs").rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = everything(case / "runs")
        outcome = run(command, case, before=become_nobody)
        tally.add(
            name,
            first(
                "" if outcome.kind in ("refused", "ok") else str(outcome),
                "" if everything(case / "runs") == before else f"it holds {names(case / SEED)} now",
            ),
        )
    return tally


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trials(work: Path, seed: int) -> list[Tally]:
    finished = work / "finished"
    outcome = run(write(finished, short()), finished)
    if outcome.kind != "ok":
        raise SystemExit(
            f"the training that the others are compared with failed: {outcome}\n{outcome.text}"
        )
    expected = finished / SEED / "model"
    full = full_disks(work, expected)
    files = full or Tally("files that may not grow: one sentence; then the same weights")
    small_files(work, expected, files)
    return [tally for tally in (files, read_only(work, finished)) if tally is not None]


if __name__ == "__main__":
    main(trials, __doc__)
