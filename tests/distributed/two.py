"""Two processes over gloo that run trials side by side, and a parent that waits for them no longer
than it says.

One pair of processes runs all the trials of a test file, as each takes seconds to start. A trial is
a function of the rank, which returns what JSON can hold; an exception is its outcome too. Outcomes
are written as they come, so that a trial that hangs is known by its name.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

Trials = Mapping[str, Callable[[int], Any]]
WORLD = 2


def work(rank: int, trials: Trials, folder: str) -> None:
    """One of the two processes."""
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
    """What each trial returned in the two processes. Those after one that failed or hung are
    missing; its error stands in place of the results.

    `seconds` is how long to wait for all of them.
    """
    processes = multiprocessing.spawn(work, (trials, str(folder)), nprocs=WORLD, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not processes.join(timeout=max(0.1, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                break
    except multiprocessing.ProcessException as error:
        print(error, file=sys.stderr)
    finally:
        for process in processes.processes:
            process.kill()
            process.join()
    found: dict[str, list[Any]] = {}
    for rank in range(WORLD):
        path = folder / f"{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            outcome = json.loads(line)
            found.setdefault(outcome["trial"], []).append(
                outcome.get("result", outcome.get("error"))
            )
    return found
