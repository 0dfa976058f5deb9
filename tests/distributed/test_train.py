"""`undertow train` by several processes: one process's curve, killed and resumed by any number of
them, and every mistake told once, on one line, with nothing lost."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from two import Commands, free_port

from undertow.lab.runs.run import Run
from undertow.lab.tasks import character_tokenizer
from undertow.lab.tasks.shard_files import SPLITS, write_index, write_part
from undertow.lab.tasks.shards import words_of

TRAINING: dict[str, Any] = {"steps": 10, "batch": 4, "save_every": 3}
SAME = 1e-5


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts processes on the tiny recipe, with settings of their `own` and in working folders of
    their own if need be; whatever is left of them is killed."""
    running: list[Commands] = []

    def start(
        folder: str,
        count: int = 2,
        own: list[list[str]] | None = None,
        folders: list[Path] | None = None,
        port: int = 0,
        **changes: Any,
    ) -> Commands:
        training = TRAINING | changes.pop("training", {})
        changes = {"recurrence": tiny.T2MLR} | changes
        recipe = tiny.recipe_file(tmp_path / folder, training=training, **changes)
        places = folders or [tmp_path] * count
        running.append(Commands(recipe, own or [[]] * count, places, port or free_port()))
        return running[-1]

    yield start
    for each in running:
        each.kill()


def run_of(tmp_path: Path, folder: str) -> Run:
    return Run(tmp_path / folder / "tiny" / "seed-0")


def curve(tmp_path: Path, folder: str) -> list[float]:
    """The training losses, which are there once for each step."""
    entries = [entry for entry in run_of(tmp_path, folder).log() if "loss" in entry]
    assert [entry["step"] for entry in entries] == list(range(1, TRAINING["steps"] + 1))
    return [entry["loss"] for entry in entries]


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.01)


LOOP = {
    "recurrence": None,
    "depth": {"shape": [1, 1, 1], "schedule": {"kind": "sampled", "mean": 3}},
}


@pytest.mark.parametrize("changes", [{}, LOOP], ids=["in time", "in depth"])
def test_two_processes_train_as_one(changes: dict[str, Any], tmp_path: Path, started: Any) -> None:
    for count, folder in ((1, "one"), (2, "two")):
        assert started(folder, count, training={"accumulate": 2}, **changes).end()[0] == [0] * count
    assert curve(tmp_path, "two") == pytest.approx(curve(tmp_path, "one"), rel=SAME)
    logs = [run_of(tmp_path, folder).log() for folder in ("one", "two")]
    one, two = (next(entry for entry in log if "loss" in entry) for log in logs)
    for name in ("grad_norm", *(["grad_norm_recurrence"] if not changes else [])):
        assert two[name] == pytest.approx(one[name], rel=1e-4)
    # Operations a token hang on the mean length of all rows, whichever process has them.
    work = [entry["tflops"] / entry["tokens_per_second"] for entry in (one, two)]
    assert work[1] == pytest.approx(work[0], rel=1e-3)
    assert sorted(path.name for path in run_of(tmp_path, "two").folder.iterdir()) == sorted(
        path.name for path in run_of(tmp_path, "one").folder.iterdir()
    )


def sharded(folder: Path) -> dict[str, Any]:
    """Changes to the tiny recipe: it trains on shards, more than one pass of them."""
    draw, tokenizer = np.random.default_rng(0), character_tokenizer("abcdefgh")
    tokenizer.save_pretrained(folder / "tokenizer")
    parts: Any = {}
    for split in SPLITS:
        documents = [(7, draw.integers(3, 11, 7)) for _ in range(40)]
        halves = enumerate((documents[:20], documents[20:]))
        parts[split] = [write_part(folder, f"{split}-{n}", half, "uint16", 0) for n, half in halves]
    write_index(folder, {"id_type": "uint16", "words": words_of(tokenizer)}, parts)
    model = {"layers": 2, "width": 16, "heads": 2, "tokenizer": str(folder / "tokenizer")}
    task = {"kind": "shards", "folder": str(folder), "context": 12}
    return {"task": task, "model": model, "evaluation": {"lengths": [], "examples": 8}}


def test_killed_and_resumed_by_two_and_by_one(tmp_path: Path, started: Any) -> None:
    (tmp_path / "shards").mkdir()
    changes = sharded(tmp_path / "shards")
    assert started("whole", **changes).end()[0] == [0, 0]
    for count in (2, 1):
        folder = f"killed-{count}"
        killed = started(folder, **changes)
        wait_for(run_of(tmp_path, folder).folder / "checkpoint-3")
        killed.kill()
        assert not run_of(tmp_path, folder).finished
        assert started(folder, count, **changes).end()[0] == [0] * count
        assert curve(tmp_path, folder) == pytest.approx(curve(tmp_path, "whole"), rel=SAME)


def test_a_signal_to_one_saves_and_ends_all(tmp_path: Path, started: Any) -> None:
    stopped = started("stopped", training={"steps": 100_000, "save_every": None})
    wait_for(run_of(tmp_path, "stopped").log_file)
    until = time.monotonic() + 60
    while len(run_of(tmp_path, "stopped").log()) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    stopped.processes[1].terminate()
    codes, told = stopped.end()
    assert codes == [143, 143]
    assert len(told) == 1 and "goes on from" in told[0] and "checkpoint-" in told[0]


def test_a_dead_process_ends_the_other_with_one_line(tmp_path: Path, started: Any) -> None:
    broken = started("dead", training={"steps": 100_000})
    wait_for(run_of(tmp_path, "dead").folder / "checkpoint-3")
    broken.processes[1].kill()
    codes, told = broken.end()
    assert codes == [2, -signal.SIGKILL]
    assert len(told) == 1 and "another of the 2 processes ended" in told[0]
    assert list(run_of(tmp_path, "dead").folder.glob("checkpoint-*/manifest*"))


def test_recipes_that_differ_are_refused(tmp_path: Path, started: Any) -> None:
    own = [[], ["--training.learning_rate=0.5"]]
    codes, told = started("other", own=own).end()
    assert codes == [2, 2]
    assert len(told) == 1 and "processes have other recipes" in told[0]
    assert not run_of(tmp_path, "other").folder.exists()


def test_data_that_differ_are_refused(tmp_path: Path, started: Any) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        (folder / "text.txt").write_text(f"{folder.name} line\n" * 400)
    task = {"kind": "text", "files": ["text.txt"], "context": 8}
    codes, told = started("data", folders=folders, task=task, evaluation={"lengths": []}).end()
    assert codes == [2, 2]
    assert len(told) == 1 and "processes have other training examples" in told[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"batch": 3}}, "training.batch is 3, which 2 processes cannot share evenly"),
        ({"training": {"sharding": "full"}}, "training.sharding is full, which needs"),
        ({"evaluation": {"lengths": [500]}}, "evaluation.lengths holds 500"),
    ],
)
def test_mistakes_are_told_once(
    changes: dict[str, Any], message: str, tmp_path: Path, started: Any
) -> None:
    codes, told = started("wrong", **changes).end()
    assert codes == [2, 2]
    assert len(told) == 1 and message in told[0]
    assert not run_of(tmp_path, "wrong").folder.exists()


def test_a_port_in_use_is_told(started: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        both = started("port", port=taken.getsockname()[1])
        first, second = both.processes
        first.join(timeout=60)
        second.kill()  # which its launcher would do
        codes, told = both.end()
    assert codes == [2, -signal.SIGKILL]
    assert len(told) == 1 and "which another program uses; choose" in told[0]


def test_torchrun_starts_them(tmp_path: Path) -> None:
    recipe = tiny.recipe_file(tmp_path, recurrence=tiny.T2MLR)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", "undertow", "train", str(recipe)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") == 1
    assert run_of(tmp_path.parent, tmp_path.name).finished
