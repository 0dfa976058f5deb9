"""A run's log: what is read of a damaged one, and what a run that goes on keeps."""

from pathlib import Path

import pytest

from undertow.errors import CheckpointError
from undertow.lab.runs.log import read_log
from undertow.lab.runs.run import Run
from undertow.lab.training.log import NoLog, RunLog

START = b'{"event": "start"}\n'


def test_a_log_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"event": "start"}\n{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 3, "lo'
    )
    assert [entry.get("step") for entry in read_log(path)] == [None, 1, 2]
    log = RunLog(path, resume_step=1)
    log.write(step=2, loss=5)
    assert [entry.get("loss") for entry in read_log(path)] == [None, 2, 5]
    assert not log.lacks_start
    assert read_log(tmp_path / "absent") == []


@pytest.mark.parametrize(
    "content",
    [
        START + b"null\n",
        b"\0\0\0\0",
        START + b'{"step": 1, "lo\n' + START,
        b"\xff\xfe{}\n",
        b"[]",
        b'{"step": "1"}\n',
        b"[" * 9999,
        b'{"step": NaN}\n',
        b'{"step": Infinity}\n',
        b'{"step": 1.5}\n',
        b'{"step": -1}\n',
        b'{"step": 1, "eval_loss": 1' + 400 * b"0" + b"}\n",
    ],
    ids=[
        *("no mapping", "zeros", "cut in the middle", "no text", "a list", "no step", "deep"),
        *("step that is no number", "endless step", "half a step", "step before the first", "huge"),
    ],
)
def test_a_damaged_log_is_refused_with_its_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"log\.jsonl.*(remove the line|UTF-16|UTF-8|NUL)"):
        read_log(path)
    path.write_bytes(START)
    assert read_log(path) == [{"event": "start"}], "the control"


def test_divergences_stay_in_the_log_of_a_run_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"event": "start"}\n{"step": 1, "loss": 2}\n{"event": "diverged", "step": 2}\n'
    )
    run = Run(tmp_path)
    assert run.diverged() and run.has_diverged()
    log = RunLog(path, resume_step=1)
    log.write(event="start")
    assert [entry.get("event") for entry in read_log(path)] == ["start", None, "diverged", "start"]
    assert not run.diverged() and run.has_diverged()
    RunLog(path)
    assert read_log(path) == [{"event": "diverged", "step": 2}], (
        "what is trained anew keeps no losses"
    )


def test_a_log_that_was_lost_is_noticed(tmp_path: Path) -> None:
    assert RunLog(tmp_path / "log.jsonl", resume_step=4).lacks_start
    assert not RunLog(tmp_path / "other.jsonl").lacks_start


def test_another_process_writes_down_that_it_diverged_unless_the_first_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undertow.lab.training.log.GRACE", 0.0)
    path = tmp_path / "log.jsonl"
    log, other = RunLog(path), NoLog(path)
    other.write(event="start")
    other.tell("nothing")
    assert read_log(path) == []
    other.write(event="diverged", step=3)
    assert [entry["event"] for entry in read_log(path)] == ["diverged"]
    log.write(event="start")
    log.write(event="diverged", step=4)
    other.write(event="diverged", step=4)
    assert [entry["event"] for entry in read_log(path)] == ["diverged", "start", "diverged"]
