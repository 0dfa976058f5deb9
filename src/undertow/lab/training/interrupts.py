"""When a training keeps its work: every so often, and when it is told to stop."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from undertow.errors import Interrupted
from undertow.files import MANIFEST
from undertow.lab.processes import first, largest, world
from undertow.lab.runs.checkpoints import checkpoints
from undertow.lab.signals import hearing

# Seconds between two checkpoints of `save_every: auto`, and how many times as long as it took to
# save one.
EVERY, SHARE = 600.0, 20.0
# A training that took as many seconds is saved before its last evaluation too.
LONG = 60.0
# Seconds in which several processes may be sent one signal twice.
ECHO = 2.0


class TimedSaves(TrainerCallback):
    """Saves a checkpoint every ten minutes, or less often where that takes long, and one at the end
    of a long training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = self.saved = time.monotonic()
        self.took = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now = time.monotonic()
        last = state.global_step >= state.max_steps and self.now - self.started >= LONG
        if last or self.now - self.saved >= max(EVERY, SHARE * self.took):
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = time.monotonic()
        self.took = self.saved - self.now


class Interrupts(TrainerCallback):
    """The first SIGINT or SIGTERM lets the step end, saves a checkpoint and stops; a second one
    stops at once.

    A process that another one started, as a study does, leaves the second one to that. Several
    processes that train together stop together, whichever hears of it.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.heard = 0.0
        self.trainer: Any = None
        self.closing = False

    def hearing(self) -> AbstractContextManager[None]:
        return hearing(self.hear)

    def hear(self, number: int, frame: Any) -> None:
        if self.number is None:
            self.number = number
            self.heard = time.monotonic()
            if parent_process() is None and first():
                os.write(
                    2,
                    b"\nundertow: ending after this step, with a checkpoint; "
                    b"the same signal again ends at once\n",
                )
        elif parent_process() is None and not self.is_echo():
            raise Interrupted(number)

    def is_echo(self) -> bool:
        """Whether a signal is the first one again: a launcher passes on what the terminal sent to
        all of its processes."""
        return world() > 1 and time.monotonic() - self.heard < ECHO

    def agree(self, saves: bool = False) -> bool:
        """Hear of what another process heard; whether any of them wants to save, as their clocks
        differ."""
        number, wanted = largest([self.number or 0, int(saves)])
        self.number = number or None
        return bool(number or wanted)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = self.agree(control.should_save)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.number is not None:
            raise Interrupted(self.number)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.closing:  # no step comes after this evaluation
            self.stop()

    def stop(self) -> None:
        """Stop a training whose steps are all taken, if that is asked for; with a checkpoint, so
        that they are kept."""
        self.agree()
        if self.number is None:
            return
        if self.trainer.proven[-1:] != [self.trainer.state.global_step]:
            self.trainer._save_checkpoint(self.trainer.model, None)
        raise Interrupted(self.number)


def how_to_go_on(folder: Path, finished: bool, saves: bool) -> str:
    """What an interrupted training has kept, and what the same command does next."""
    if finished:
        return f"{folder} is finished, and its model saved; the same command goes on from there"
    for newest in checkpoints(folder):
        if (newest / MANIFEST).is_file():
            return f"the same command goes on from {newest}"
        return (
            f"the same command goes on from {newest}, if it is whole, which the {MANIFEST} that it "
            "lacks would show"
        )
    why = "" if saves else ", as training.save_every is null"
    return f"no checkpoint was saved yet{why}, so the same command starts anew"
