"""One run folder, one process: a lock of the system's on a file in the folder, which ends with its
process."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from undertow.errors import CheckpointError, InUseError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
# Where the byte lies that Windows locks: beyond the text, which others shall read.
FAR = 1 << 30
# How often a folder that is gone when it was just made is made again.
TRIES = 20


@contextmanager
def locked(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold a folder for this process; it is made if need be, and removed again if it stays empty.

    Args:
        folder: of a run, or of a study.
        wait: seconds to wait for another process that holds it.

    Raises:
        InUseError: another process holds it.
        CheckpointError: nothing can be written there.
    """
    path, until = folder / LOCK, time.monotonic() + wait
    made = [folder, *(parent for parent in folder.parents if not parent.exists())]
    while (number := acquire(path)) is None:
        if time.monotonic() >= until:
            raise InUseError(
                f"{folder} is in use by {holder(path)}; wait until it ends, or stop it"
            )
        time.sleep(0.1)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # still locked, so that nobody locks the file that goes
        os.close(number)
        with suppress(OSError):
            for empty in made:  # nothing was done there
                empty.rmdir()


def acquire(path: Path) -> int | None:
    """Lock a file and write down who holds it: its descriptor, or None if another process does.

    Raises:
        CheckpointError: it cannot be written, or its file system has no locks.
    """
    tries = 0
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            # Another process may have just removed the empty folder; not again and again, unless
            # none can be made.
            if isinstance(error, FileNotFoundError) and (tries := tries + 1) < TRIES:
                continue
            raise CheckpointError(f"cannot work in {path.parent}: {error}") from error
        try:
            if not lock(number):
                os.close(number)
                return None
            if path.exists() and os.path.samestat(os.fstat(number), path.stat()):
                since = datetime.now().astimezone().isoformat()
                about = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
                with suppress(OSError):  # a full disk: the lock holds all the same
                    os.ftruncate(number, 0)
                    os.write(number, json.dumps(about).encode())
                return number
        except OSError as error:
            os.close(number)
            raise CheckpointError(
                f"cannot lock {path}: {error}; put the run's folder on a file system that has locks"
            ) from error
        os.close(number)  # its holder removed it in the meantime


def lock(number: int) -> bool:
    """Lock an open file for as long as this process has it open; whether that was possible."""
    try:
        if sys.platform == "win32":
            os.lseek(number, FAR, os.SEEK_SET)
            msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
            os.lseek(number, 0, os.SEEK_SET)
        else:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def holder(path: Path) -> str:
    """Who holds a lock, as far as its file says."""
    try:
        about = json.loads(path.read_bytes())
        since = datetime.fromisoformat(about["since"])
        return f"process {about['pid']} on {about['host']} since {since:%Y-%m-%d %H:%M:%S}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
