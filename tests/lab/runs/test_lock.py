"""A run's folder is one process's at a time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from undertow.cli.main import main
from undertow.errors import CheckpointError, InUseError
from undertow.lab.runs import lock as lock_module
from undertow.lab.runs.lock import LOCK, locked
from undertow.lab.runs.run import Run
from undertow.lab.training import train

HOLDS = """
import sys, time
from pathlib import Path
from undertow.lab.runs.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny.recipe(tmp_path)
    folder = Run.of(recipe, 0).folder
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, env=tiny.environment()
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        with pytest.raises(
            InUseError,
            match=rf"seed-0 is in use by process {first.pid} on .* since \d{{4}}-.*; wait until",
        ):
            train(recipe, seed=0)
        assert main(["train", str(tiny.recipe_file(tmp_path))]) == 2
        assert f"is in use by process {first.pid}" in capfd.readouterr().err
        assert [path.name for path in folder.iterdir()] == [LOCK], "something was written into it"
        with pytest.raises(InUseError), locked(folder, wait=0.15):
            pass
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert (folder / LOCK).exists(), "it was killed, which leaves the file"
    assert train(recipe, seed=0) == folder
    assert not (folder / LOCK).exists()


def test_without_the_lock_both_would_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path):
        with pytest.raises(InUseError), locked(tmp_path):
            pass
        monkeypatch.setattr(lock_module, "lock", lambda number: True)
        with locked(tmp_path):  # the control
            pass


def test_another_one_is_waited_for(tmp_path: Path) -> None:
    holds = [sys.executable, "-c", HOLDS.replace("60", "0.3"), str(tmp_path)]
    first = subprocess.Popen(holds, stdout=subprocess.PIPE, env=tiny.environment())
    assert first.stdout is not None and first.stdout.readline() == b"held\n"
    started = time.monotonic()
    with locked(tmp_path, wait=30):
        assert time.monotonic() - started > 0.1
    first.wait()


def test_a_folder_in_which_nothing_was_done_is_removed_again(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "name" / "seed-0"
    with locked(folder):
        assert (folder / LOCK).is_file()
    assert not list(tmp_path.iterdir())
    with locked(folder):
        (folder / "recipe.yaml").touch()
    assert [path.name for path in folder.iterdir()] == ["recipe.yaml"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match=r"cannot work in .*file"),
        locked(tmp_path / "file" / "seed-0"),
    ):
        pass


@pytest.mark.parametrize("text", ["", "{}", "null", '{"since": 3}'])
def test_a_lock_that_does_not_say_whose_it_is(text: str, tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / LOCK).write_text(text)
        with (
            pytest.raises(InUseError, match="is in use by another process; wait"),
            locked(tmp_path),
        ):
            pass


def test_a_folder_that_can_never_be_made_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "nowhere" / "lock")
    with (
        pytest.raises(CheckpointError, match=r"cannot work in .*: .*No such file"),
        locked(tmp_path),
    ):
        pass
    (tmp_path / LOCK).unlink()
    open_file, tries = os.open, []

    def flaky(path: Path, flags: int, mode: int) -> int:
        tries.append(path)
        if len(tries) < 3:  # as if another process had removed the empty folder
            raise FileNotFoundError
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", flaky)
    with locked(tmp_path):
        assert len(tries) == 3, "the control: it is tried again"
