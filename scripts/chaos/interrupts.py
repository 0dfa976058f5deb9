"""Interrupt trainings with SIGINT and SIGTERM at random moments, and hold them to what they then
say.

    python scripts/chaos/interrupts.py [--seed 0]

The first signal lets the step end and saves; what is said of how to go on has to be true, and the
same command has to give the weights and the log of a run that was left alone, bit for bit. A second
signal ends at once.
"""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path
from typing import Any

from forked import Outcome, run, start
from small_runs import SEED, note_start, recipe, resumed_after, whole, write
from tally import Tally, first, main

TRIALS = 20
TWICE = 6
SAVES = ("every four steps", "by default", "none")


def made(saves: str) -> dict[str, Any]:
    """A recipe that saves checkpoints so often."""
    found = recipe(training={"save_every": None} if saves == "none" else {})
    if saves == "by default":
        del found["training"]["save_every"]
    return found


def true(outcome: Outcome, folder: Path) -> str:
    """What is untrue of what an interrupted training says, "" if nothing."""
    if outcome.kind != "interrupted":
        return str(outcome)
    newest = max(
        (int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")), default=None
    )
    promised = re.search(r"checkpoint-(\d+)", outcome.said.splitlines()[-1] if outcome.said else "")
    if promised:
        return "" if int(promised[1]) == newest else f"the newest checkpoint is {newest}; {outcome}"
    if (folder / "model").exists():
        # Trained: said while the model was saved, or in the evaluation after that.
        told = any(words in outcome.said for words in ("is finished", "what was trained is kept"))
        return "" if told else f"it does not say that the run is finished; {outcome}"
    if newest is not None:
        return f"it does not name checkpoint-{newest}; {outcome}"
    return "" if "anew" in outcome.said else f"it does not say that nothing is kept; {outcome}"


def trials(work: Path, seed: int) -> list[Tally]:
    draw = random.Random(seed)
    kept = Tally("interrupted: saved, told truly, then the same weights and log")
    references = {}
    for saves in SAVES:
        folder = work / f"reference {saves}"
        outcome = run(write(folder, made(saves)), folder)
        if outcome.kind != "ok":
            raise SystemExit(
                f"the training that the others are compared with failed: {outcome}\n{outcome.text}"
            )
        references[saves] = (folder / SEED, outcome.seconds)
    for number in range(TRIALS):
        saves = SAVES[number % len(SAVES)]
        sent = (signal.SIGINT, signal.SIGTERM)[number // len(SAVES) % 2]
        reference, seconds = references[saves]
        folder = work / f"trial {number}"
        command = write(folder, made(saves))
        child = start(command, folder)
        # From the first line of the log on, which is written when the steps begin; the evaluation
        # comes after the training.
        child.wait_for((folder / SEED / "log.jsonl").exists, limit=60)
        child.wait_for(lambda: False, draw.random() * seconds * 0.7)
        child.kill(sent)
        stopped = child.wait()
        said = "" if stopped.kind == "ok" else true(stopped, folder / SEED)
        before = max(
            (int(path.name.rpartition("-")[2]) for path in (folder / SEED).glob("checkpoint-*")),
            default=0,
        )
        outcome = run(command, folder, before=note_start)
        on = resumed_after(folder)
        kept.add(
            f"trial {number} ({sent.name}, checkpoints {saves})",
            first(
                said,
                "" if outcome.kind == "ok" else f"the same command then: {outcome}",
                "" if on in (before, None) else f"it went on from step {on} and not {before}",
                whole(folder / SEED, reference),
            ),
        )
    return [kept, twice(work, draw, references["every four steps"])]


def twice(work: Path, draw: random.Random, reference: tuple[Path, float]) -> Tally:
    tally = Tally("interrupted twice: ends at once, then the same weights and log")
    expected, seconds = reference
    for number in range(TWICE):
        folder = work / f"twice {number}"
        command = write(folder, made("every four steps"))
        child = start(command, folder)
        child.wait_for((folder / SEED / "log.jsonl").exists, limit=60)
        child.wait_for(lambda: False, draw.random() * seconds * 0.5)
        child.kill(signal.SIGINT)
        child.wait_for(lambda: False, draw.random() * 0.02)
        child.kill(signal.SIGINT)
        stopped = child.wait()
        outcome = run(command, folder)
        tally.add(
            f"trial {number}",
            first(
                "" if stopped.kind in ("interrupted", "ok") else str(stopped),
                "" if outcome.kind == "ok" else f"the same command then: {outcome}",
                whole(folder / SEED, expected),
            ),
        )
    return tally


if __name__ == "__main__":
    main(trials, __doc__)
