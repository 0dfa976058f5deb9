"""Run the real command line in a forked child, within limits, and tell what became of it.

Forking saves the seconds that importing torch takes: the parent imports what the command needs,
once, and each child starts from there as a process of its own, with its own signals, limits and
end.
"""

from __future__ import annotations

import codecs
import itertools
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Before torch and transformers are imported: one thread, no GPU, no network, and nothing written
# beside the sources.
os.environ.update(
    OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
)
sys.dont_write_bytecode = True

codecs.lookup("utf-8-sig")  # a child that is another user may not read where Python's own files are

RAISED = 99  # the exit code of a child that ended with an exception
MEMORY = 4 << 30
NUMBERS = itertools.count()  # of the files that children print into

Call = Callable[[], int | None]


@dataclass(frozen=True)
class Outcome:
    """What became of a command.

    Attributes:
        kind: ok; refused: exit code 2 with a sentence and no traceback; traceback; hang: out of
            processor time, or not done in time; killed: by a signal; interrupted: exit code 130 or
            143 and no traceback; or exit N.
        code: its exit code, negative for a signal, None if it had to be ended.
        text: what it printed, both streams.
        seconds: how long it took.
    """

    kind: str
    code: int | None
    text: str
    seconds: float

    @property
    def said(self) -> str:
        """The sentences of the command line, which begin with its name."""
        return "\n".join(line for line in self.text.splitlines() if line.startswith("undertow: "))

    def __str__(self) -> str:
        """In one line, for a list of broken promises."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        last = (self.said.splitlines() or lines[-1:] or ["nothing"])[-1]
        return f"{self.kind} (exit code {self.code}), said {last[:300]!r}"


def kind_of(code: int | None, text: str) -> str:
    """What an exit code and the text printed amount to; see `Outcome`."""
    if code is None or code == -signal.SIGXCPU:
        return "hang"
    if code == RAISED or "Traceback (most recent call last)" in text:
        return "traceback"
    if code < 0:
        return "killed"
    if code == 2:
        return (
            "refused"
            if re.search(r"^(undertow: |undertow \w+: error: )\S", text, re.MULTILINE)
            else "exit 2"
        )
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return "interrupted"
    return "ok" if code == 0 else f"exit {code}"


class Child:
    """A command under way. Use `wait` to the end, or `kill` and then `wait`."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid, self.output, self.started = pid, output, time.monotonic()
        self.code: int | None = None

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self.ended():  # not waited for yet, so that the number is still this child's
            os.kill(self.pid, number)

    def wait_for(self, condition: Callable[[], bool], limit: float, pause: float = 0.0005) -> bool:
        """Wait until something is so, the child has ended or the seconds are over; whether it came
        to be so."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            if condition():
                return True
            if self.ended():
                return False
            time.sleep(pause)
        return False

    def wait(self, limit: float = 120.0) -> Outcome:
        """Wait for the end, `limit` seconds from now at most."""
        self.wait_for(lambda: False, limit, pause=0.003)
        in_time = self.ended()
        if not in_time:
            self.kill()
            os.waitpid(self.pid, 0)
        text = (
            self.output.read_text(encoding="utf-8", errors="replace")
            if self.output.exists()
            else ""
        )
        code = self.code if in_time else None
        return Outcome(kind_of(code, text), code, text, time.monotonic() - self.started)


def start(
    command: Sequence[str] | Call,
    folder: Path,
    processor: int = 60,
    memory: int = MEMORY,
    before: Callable[[], object] | None = None,
) -> Child:
    """Start a command of `undertow`, or a function in its place, in a child whose working folder
    this is.

    Args:
        command: the words after `undertow`, or a function that returns an exit code.
        folder: made if need be. What the child prints is in a file beside it.
        processor: seconds of processor time.
        memory: bytes of address space beyond what the parent has.
        before: called in the child first, such as to break something there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = folder.parent / f"{folder.name}.{next(NUMBERS)}.out"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, output)
    code = RAISED
    try:
        os.chdir(folder)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (
            os.fdopen(each, "w", buffering=1, encoding="utf-8", closefd=False) for each in (1, 2)
        )
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # which a shell's background jobs ignore
        space = address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        resource.setrlimit(resource.RLIMIT_CPU, (processor, processor + 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if before is not None:
            before()
        code = in_child(command)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run(
    command: Sequence[str] | Call, folder: Path, limit: float = 120.0, **settings: object
) -> Outcome:
    """`start`, and wait for the end."""
    return start(command, folder, **settings).wait(limit)  # type: ignore[arg-type]


def in_child(command: Sequence[str] | Call) -> int:
    if callable(command):
        return command() or 0
    from undertow.cli.main import main

    sys.argv = ["undertow", *command]
    return main(list(command))


def address_space() -> int:
    """Bytes of address space that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def warm_up() -> None:
    """Import what training and evaluation need, so that no child has to."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import matplotlib.ticker
    import torch

    import undertow.cli.main
    import undertow.lab.evaluation.figures
    import undertow.lab.evaluation.run
    import undertow.lab.study.study
    import undertow.lab.training.run  # noqa: F401

    torch.set_num_threads(1)
