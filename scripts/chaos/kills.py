"""Kill trainings at random moments, go on by the same command, and compare with the same training
left alone, bit for bit.

    python scripts/chaos/kills.py [--seed 0]

Eight recipes; each trial kills once or twice. Half of the kills come after a random time. The other
half come at a random operation on a file of the run's folder, such as a rename in the middle of
saving, where a kill does most harm: checkpoints, model, log, recipe and the others are drawn alike.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import run, start
from small_runs import SEED, finite, measured, recipe, weights, whole, write
from tally import Tally, first, main

TRIALS = 60
DEFAULT_SOLVER_TRIALS = 4
# What the system tells of files: Python says so to audit hooks before it does it.
OPERATIONS = (
    "open",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
)

LOOPED = {"looped": {"prelude": [0], "core": [1], "coda": [2]}}
GPT2 = {"architecture": "gpt2", "layers": 2, "width": 32, "heads": 4}  # has dropout
TURBOCONN = {"kind": "turboconn", "connections": [[1, 0]], "lag": 2, "alpha": 1.0, "rank": 8}
GROUPS = {"kind": "group_tracking", "group": "S3", "min_length": 4, "max_length": 10}
SCAN = {"kind": "scan", "sweeps": 2, "backward": 1}
RECIPES = {
    "auto": recipe(),
    "sequential": recipe(solver="sequential"),
    "dropout": recipe(model=GPT2),
    "epochs, turboconn": recipe(
        recurrence=TURBOCONN,
        solver="sequential",
        training={"examples": 150, "epochs": 3, "gate_multiplier": 1.0},
    ),
    "groups, scan": recipe(task=GROUPS, solver=SCAN, training={"compare_every": 7}),
    "depth": recipe(
        recurrence=None,
        depth=LOOPED,
        model={"layers": 3, "width": 32, "heads": 4},
        training={"gate_multiplier": 1.0},
    ),
    "bf16": recipe(training={"precision": "bf16"}),
    "one evaluation, at the end": recipe(
        solver={"kind": "jacobi"}, training={"evaluate_every": None}
    ),
}


def watch(seen: Callable[[int, str], object]) -> None:
    """Call `seen` at each operation that writes in the run's folder, before it is done, with its
    number and what it is on.

    That is the first part of a name there: checkpoint, model, recipe, log, ...; temporary names
    count as what they become.
    """
    place, count = re.compile(rf"{re.escape(str(SEED))}/?\.?([a-z]*)"), 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in OPERATIONS or (event == "open" and not writes(arguments)):
            return
        found = place.search(" ".join(map(str, arguments[:2])))
        if found:
            count += 1
            seen(count, found[1])

    sys.addaudithook(hook)


def writes(arguments: tuple[Any, ...]) -> bool:
    """Whether a file is opened to write to it: by a mode such as "w", or by flags."""
    _, mode, flags = arguments
    return (
        any(letter in mode for letter in "wax+")
        if isinstance(mode, str)
        else bool(flags & (os.O_WRONLY | os.O_RDWR))
    )


def kill_at(number: int) -> Callable[[], None]:
    """What has this process killed at that operation."""
    return lambda: watch(
        lambda count, on: os.kill(os.getpid(), signal.SIGKILL) if count == number else None
    )


def operations(command: list[str], folder: Path) -> dict[str, list[int]]:
    """The numbers of a training's operations, by what they are on."""
    note = folder / "operations.txt"

    def count() -> None:
        descriptor = os.open(note, os.O_WRONLY | os.O_CREAT)
        watch(lambda number, on: os.write(descriptor, f"{number} {on}\n".encode()))

    run(command, folder, before=count)
    found: dict[str, list[int]] = {}
    for line in note.read_text().splitlines():
        number, _, on = line.partition(" ")
        found.setdefault(on, []).append(int(number))
    return found


def kill_and_resume(
    command: list[str],
    folder: Path,
    draw: random.Random,
    seconds: float,
    points: dict[str, list[int]],
) -> str:
    """Kill a training once or twice, then let the same command end it; what is wrong with that, ""
    if nothing."""
    for _ in range(draw.randint(1, 2)):
        if draw.random() < 0.5:
            outcome = run(
                command, folder, before=kill_at(draw.choice(points[draw.choice(sorted(points))]))
            )
        else:
            child = start(command, folder)
            child.wait_for(lambda: False, draw.random() * seconds)
            child.kill()
            outcome = child.wait()
        if outcome.kind not in ("killed", "ok"):  # ok: it was done before
            return f"before it was killed: {outcome}"
    outcome = run(command, folder)
    return "" if outcome.kind == "ok" else str(outcome)


def trials(work: Path, seed: int) -> list[Tally]:
    draw = random.Random(seed)
    same = Tally("killed at any moment: then the same weights and log, bit for bit")
    references = {}
    for name, made in RECIPES.items():
        folder = work / f"reference {name}"
        outcome = run(write(folder, made), folder)
        if outcome.kind != "ok":
            raise SystemExit(
                f"the training that the others are compared with failed ({name}): "
                f"{outcome}\n{outcome.text}"
            )
        references[name] = (folder / SEED, outcome.seconds)
    points = operations(write(work / "counted", RECIPES["auto"]), work / "counted")
    for number in range(TRIALS):
        name = list(RECIPES)[number % len(RECIPES)]
        reference, seconds = references[name]
        folder = work / f"trial {number}"
        fault = kill_and_resume(write(folder, RECIPES[name]), folder, draw, seconds, points)
        same.add(f"trial {number} ({name})", first(fault, whole(folder / SEED, reference)))
        shutil.rmtree(folder)

    ends = Tally("killed, with a solver that measures times: then ends, no step lost")
    for number in range(DEFAULT_SOLVER_TRIALS):
        folder = work / f"default {number}"
        made = recipe(solver={"kind": "auto"})
        fault = kill_and_resume(write(folder, made), folder, draw, references["auto"][1], points)
        steps = [entry["step"] for entry in measured(folder / SEED) if "loss" in entry]
        lost = (
            ""
            if steps == list(range(1, made["training"]["steps"] + 1))
            else f"the log has the steps {steps}"
        )
        model = weights(folder / SEED / "model")
        ends.add(
            f"trial {number}",
            first(fault, lost, "" if model and finite(model) else "no sound model"),
        )
        shutil.rmtree(folder)
    return [same, ends]


if __name__ == "__main__":
    main(trials, __doc__)
