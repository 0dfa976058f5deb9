"""The trials of `make chaos` call a fault a fault: what became of a child is told apart, kind by
kind."""

import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHAOS = Path(__file__).parents[2] / "scripts" / "chaos"


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Any:
    return imported("forked", monkeypatch)


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the scripts, whose imports change nothing of this process."""
    monkeypatch.syspath_prepend(CHAOS)
    for variable in (
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "HF_HUB_OFFLINE",
        "TOKENIZERS_PARALLELISM",
    ):
        monkeypatch.setenv(
            variable, os.environ.get(variable, "")
        )  # so that what the import sets is taken back
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return __import__(name)


def say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def spin() -> int:
    while True:
        pass


def allocate() -> int:
    return len(bytearray(1 << 30))


ENDS: dict[str, tuple[Any, str]] = {
    "done": (lambda: 0, "ok"),
    "a sentence": (lambda: say("undertow: steps is 0; use 1 or more", 2), "refused"),
    "a wrong option": (lambda: say("undertow train: error: unrecognized arguments", 2), "refused"),
    "no sentence": (lambda: say("something else", 2), "exit 2"),
    "an empty sentence": (lambda: say("undertow: ", 2), "exit 2"),
    "a sentence after a traceback": (
        lambda: say("Traceback (most recent call last):\nundertow: no", 2),
        "traceback",
    ),
    "a traceback of a part, and done": (
        lambda: say("Traceback (most recent call last):", 0),
        "traceback",
    ),
    "an exception": (lambda: 1 // 0, "traceback"),
    "out of memory": (allocate, "traceback"),
    "out of processor time": (spin, "hang"),
    "asleep": (lambda: time.sleep(60), "hang"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed"),
    "ended by a signal": (lambda: os.kill(os.getpid(), signal.SIGTERM), "killed"),
    "interrupted": (lambda: 130, "interrupted"),
    "terminated": (lambda: sys.exit(143), "interrupted"),
    "another code": (lambda: sys.exit(3), "exit 3"),
}


@pytest.mark.parametrize("name", ENDS)
def test_kinds(name: str, forked: Any, tmp_path: Path) -> None:
    call, kind = ENDS[name]
    limit = 0.3 if name == "asleep" else 60
    outcome = forked.run(call, tmp_path / "work", limit=limit, processor=1, memory=1 << 29)
    assert outcome.kind == kind, outcome.text
    assert (outcome.code is None) == (name == "asleep") and outcome.seconds < 30


def test_the_command_line_itself(forked: Any, tmp_path: Path) -> None:
    refused = forked.run(["train", "missing.yaml"], tmp_path / "work")
    assert (
        refused.kind == "refused"
        and "missing.yaml" in refused.said
        and (tmp_path / "work").is_dir()
    )


def test_limits_and_signals_are_the_childs_alone(forked: Any, tmp_path: Path) -> None:
    before = (os.getcwd(), signal.getsignal(signal.SIGINT))
    child = forked.start(lambda: time.sleep(60), tmp_path / "work")
    assert not child.ended() and not child.wait_for(lambda: False, limit=0.05)
    child.kill(signal.SIGINT)
    outcome = child.wait()
    assert (
        outcome.kind == "traceback" and "KeyboardInterrupt" in outcome.text
    )  # of a function that hears no signals
    child.kill()  # long gone: nothing is killed
    assert (os.getcwd(), signal.getsignal(signal.SIGINT)) == before


def test_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tally, every = imported("tally", monkeypatch), imported("all", monkeypatch)
    kept, broken = tally.Tally("kept"), tally.Tally("not kept")
    kept.add("one", tally.first("", ""))
    broken.add("one", "")
    broken.add("two", tally.first("", "weights differ", "log"))
    assert kept.tell() and not broken.tell() and not tally.Tally("never tried").tell()
    report = every.read("some", capsys.readouterr().out, seconds=9)
    assert [(row.promise, row.tried, row.kept) for row in report.rows] == [
        ("kept", 1, 1),
        ("not kept", 2, 1),
        ("never tried", 0, 0),
    ]
    assert report.broken == ["broken: not kept: two: weights differ"]
    assert every.read("malformed", "589 of 589 clean\n", seconds=9).broken == []
    assert every.read("malformed", "588 of 589 clean\n", seconds=9).broken
