"""Two processes that work side by side, forked from one that has imported everything, and a parent
that waits for them no longer than it says."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

Trials = Mapping[str, Callable[[int], Any]]
WORLD = 2
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "undertow.lab.evaluation.run",
    "undertow.cli.main",
]


def started(work: Callable[..., None], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """A process for each of the arguments."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=work, args=given) for given in arguments]
    for process in processes:
        process.start()
    return processes


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- trials


def try_all(rank: int, trials: Trials, folder: str) -> None:
    """One of the two processes. Outcomes are written as they come, so that a trial that hangs is
    known by its name."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    for name, trial in trials.items():
        try:
            outcome = {"result": trial(rank)}
        except Exception:
            outcome = {"error": traceback.format_exc()}
        with (Path(folder) / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"trial": name, **outcome}) + "\n")
        if "error" in outcome:  # the other one may wait in a collective of this trial
            break
    distributed.destroy_process_group()


def run(trials: Trials, folder: Path, seconds: float) -> dict[str, list[Any]]:
    """What each trial, a function of the rank, returned in the two processes: what JSON can hold.

    The error of one that failed stands in place of its results. Those after one that failed or hung
    are missing. `seconds` is how long to wait for all of them.
    """
    processes = started(try_all, [(rank, trials, str(folder)) for rank in range(WORLD)])
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        process.kill()
    found: dict[str, list[Any]] = {}
    for rank in range(WORLD):
        path = folder / f"{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            outcome = json.loads(line)
            result = outcome.get("result", outcome.get("error"))
            found.setdefault(outcome["trial"], []).append(result)
    return found


# --- commands


def command(rank: int, world: int, port: int, arguments: list[str], folder: str, said: str) -> None:
    """`undertow` as one of several processes, whose words go to a file."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.chdir(folder)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from undertow.cli.main import main

    code = main(arguments)
    sys.stderr.flush()
    os._exit(code)


class Commands:
    """`undertow train` in processes that train together, each with its own settings and working
    folder."""

    def __init__(
        self, recipe: Path, settings: list[list[str]], folders: list[Path], port: int
    ) -> None:
        self.files = [recipe.parent / f"said-{rank}.txt" for rank in range(len(settings))]
        self.processes = started(
            command,
            [
                (rank, len(settings), port, ["train", str(recipe), *own], str(folder), str(said))
                for rank, (own, folder, said) in enumerate(
                    zip(settings, folders, self.files, strict=True)
                )
            ],
        )

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def end(self) -> tuple[list[int], list[str]]:
        """The exit codes, and what they said of errors."""
        for process in self.processes:
            process.join(timeout=60)
        texts = [path.read_text() for path in self.files if path.exists()]
        lines = [line for text in texts for line in text.replace("\r", "\n").splitlines()]
        assert not any("Traceback" in line for line in lines), "\n".join(lines)
        codes = [process.exitcode for process in self.processes]
        return codes, [line for line in lines if line.startswith("undertow: ")]
