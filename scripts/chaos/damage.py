"""Damage each file of an interrupted run, and of a finished one, and look what goes on from there.

    python scripts/chaos/damage.py [--seed 0]

An interrupted run has to go on and end with the same weights, bit for bit, from this checkpoint or
the one before, saying which it skipped; or to refuse with a sentence that names what is damaged. A
finished one has to be evaluated and to generate as before, or to refuse. Nothing is ever removed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from forked import Outcome, run
from small_runs import RUN, SEED, equal, note_start, resumed_after, short, weights, write
from tally import Tally, main

MADE = short(model={"layers": 2, "width": 16, "heads": 2, "positions": 64})
STOPPED = 7  # killed in this step, with the checkpoints 4 and 6
NEWEST, OLDER = SEED / "checkpoint-6", SEED / "checkpoint-4"

Damage = Callable[[Path], object]


def flip_bit(case: Path, name: str, place: int) -> None:
    """Flip one bit of the newest checkpoint's file `name`."""
    flip(case / NEWEST / name, place, 1 << place % 8)


def flip(path: Path, place: int, bits: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "a byte at the start": lambda path: flip(path, min(8, path.stat().st_size - 1)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}
OF_JSON: dict[str, Damage] = {
    "another object": lambda path: path.write_text("{}"),
    "a list": lambda path: path.write_text("[]"),
    "null": lambda path: path.write_text("null"),
}


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damages(path: Path) -> dict[str, Damage]:
    return DAMAGES | OF_JSON if path.suffix == ".json" else DAMAGES


def stop_in_a_step() -> None:
    """Have this process killed when the step has been taken, before anything more is written."""
    import undertow.lab.training.run as training

    class Stopping(training.RunLog):  # type: ignore[name-defined, misc]
        def on_step_end(self, args, state, control, **rest):  # type: ignore[no-untyped-def]
            super().on_step_end(args, state, control, **rest)
            if state.global_step == STOPPED:
                os.kill(os.getpid(), signal.SIGKILL)

    training.RunLog = Stopping  # type: ignore[attr-defined]


class Trials:
    """The same runs, damaged in one way after another."""

    def __init__(self, work: Path) -> None:
        self.finished, self.stopped, self.case = work / "finished", work / "stopped", work / "case"
        self.command = write(self.finished, MADE)
        write(self.stopped, MADE)
        for folder, before, expected in (
            (self.finished, None, "ok"),
            (self.stopped, stop_in_a_step, "killed"),
        ):
            outcome = run(self.command, folder, before=before)
            if outcome.kind != expected:
                raise SystemExit(
                    f"the run to be damaged could not be made: {outcome}\n{outcome.text}"
                )
        self.expected = weights(self.finished / SEED / "model")

    def damaged(self, source: Path, damage: Callable[[Path], object]) -> Path:
        """A copy of a run with something done to it."""
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(source, self.case)
        damage(self.case)
        return self.case

    def resume(self, damage: Callable[[Path], object], names: tuple[str, ...]) -> str:
        """What is wrong with how a damaged run goes on, "" if nothing; `names`: one of them is in
        what is said."""
        case = self.damaged(self.stopped, damage)
        kept = {path.name for path in (case / SEED).glob("checkpoint-*")}
        outcome = run(self.command, case, before=note_start)
        if outcome.kind == "ok":
            if not equal(weights(case / SEED / "model"), self.expected):
                return f"its weights differ; {outcome}"
            if resumed_after(case) != STOPPED - 1 and not named(outcome, names):
                return f"it did not go on from the newest checkpoint, and said not why; {outcome}"
            return ""
        gone = kept - {path.name for path in (case / SEED).glob("checkpoint-*")}
        return f"it removed {sorted(gone)}; {outcome}" if gone else refused(outcome, names)

    def use(
        self, damage: Callable[[Path], object], name: str, command: list[str], expected: str
    ) -> str:
        """What is wrong with how a damaged model is used, "" if nothing."""
        outcome = run(command, self.damaged(self.finished, damage))
        if outcome.kind == "ok":
            return (
                ""
                if results(outcome) == expected
                else f"it gives other results, and says nothing; {outcome}"
            )
        return refused(outcome, (name, "model"))


def refused(outcome: Outcome, names: tuple[str, ...]) -> str:
    if outcome.kind != "refused":
        return str(outcome)
    return (
        ""
        if named(outcome, names)
        else f"it is refused, but what is damaged is not named; {outcome}"
    )


def named(outcome: Outcome, names: tuple[str, ...]) -> bool:
    return any(name in outcome.said for name in names)


def results(outcome: Outcome) -> str:
    """What a command prints of results: the lines that are no sentence and no bar."""
    lines = outcome.text.replace("\r", "\n").splitlines()
    return "\n".join(
        line for line in lines if not line.startswith("undertow: ") and "it/s" not in line
    )


def single_files(made: Trials) -> Tally:
    tally = Tally("damaged runs: the same weights, or refused by name")
    inside = sorted(path.relative_to(made.stopped) for path in (made.stopped / NEWEST).iterdir())
    for file in [*inside, *(SEED / name for name in ("recipe.yaml", "versions.json", "log.jsonl"))]:
        names = (file.name, file.parent.name) if file in inside else (file.name,)
        for how, damage in damages(file).items():
            fault = made.resume(lambda case, file=file, damage=damage: damage(case / file), names)  # type: ignore[misc]
            tally.add(f"{file.relative_to(SEED)}, {how}", fault)
    return tally


def harder(made: Trials, draw: random.Random) -> Tally:
    """Damage that a file alone does not show, and of several files."""
    tally = Tally("files of another step, single bits, two damaged checkpoints: the same")
    files = sorted(path.name for path in (made.stopped / NEWEST).iterdir())
    differing = [
        name
        for name in files
        if (made.stopped / OLDER / name).read_bytes() != (made.stopped / NEWEST / name).read_bytes()
        and ".json" not in name
    ]
    for name in differing:
        copied = lambda case, name=name: shutil.copy(case / OLDER / name, case / NEWEST / name)  # noqa: E731
        tally.add(f"{name} of another step", made.resume(copied, (name, "checkpoint-6")))
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        size = (made.stopped / NEWEST / name).stat().st_size
        for place in (draw.randrange(size), draw.randrange(size)):
            bit = partial(flip_bit, name=name, place=place)
            tally.add(f"{name}, a bit of byte {place}", made.resume(bit, (name, "checkpoint-6")))
        shorter = lambda case, name=name, size=size: os.truncate(case / NEWEST / name, size - 1)  # noqa: E731
        tally.add(f"{name}, the last byte", made.resume(shorter, (name, "checkpoint-6")))
        folder = lambda case, name=name: folder_in_place(case / NEWEST / name)  # noqa: E731
        tally.add(f"{name} is a folder", made.resume(folder, (name, "checkpoint-6")))

        def both(case: Path, name: str = name) -> None:
            for checkpoint in (NEWEST, OLDER):
                flip(case / checkpoint / name, (case / checkpoint / name).stat().st_size // 2)

        tally.add(
            f"{name} of both checkpoints", made.resume(both, (name, "checkpoint-6", "checkpoint-4"))
        )
    return tally


def finished_models(made: Trials) -> Tally:
    tally = Tally("damaged models: the same results, or refused by name")
    uses = {"eval": ["eval", str(RUN)], "generate": ["generate", str(RUN), "101="]}
    expected = {name: results(run(command, made.finished)) for name, command in uses.items()}
    files = sorted(
        path.relative_to(made.finished) for path in (made.finished / SEED / "model").iterdir()
    )
    for file in files:
        for how, damage in damages(file).items():
            done = lambda case, file=file, damage=damage: damage(case / file)  # noqa: E731
            for name, command in uses.items():
                fault = made.use(done, file.name, command, expected[name])
                tally.add(f"{name} with {file.name}, {how}", fault)
    return tally


def trials(work: Path, seed: int) -> list[Tally]:
    made = Trials(work)
    return [single_files(made), harder(made, random.Random(seed)), finished_models(made)]


if __name__ == "__main__":
    main(trials, __doc__)
