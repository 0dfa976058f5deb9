"""What a run tells while it trains: a JSON-lines log on disk and a progress bar on the terminal."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from undertow.errors import CheckpointError, DivergedError
from undertow.files import write_text
from undertow.lab.processes import GRACE, first
from undertow.lab.runs.log import read_log


class RunLog(TrainerCallback):
    """One JSON object a line: losses, learning rate, gradient norm, the median seconds a step since
    the last line.

    A resumed run drops the lines after the step that it resumes from, but for divergences and what
    was mended after them. A loss that is no number ends the run, with a `DivergedError`.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self.path = path
        self.durations: list[float] = []
        self.started = time.perf_counter()
        kept = [entry for entry in read_log(path) if keeps(entry, resume_step)]
        self.lacks_start = resume_step > 0 and not any(
            entry.get("event") == "start" for entry in kept
        )
        write_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))

    def write(self, **entry: Any) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"could not write to {self.path}: {error}; mend that, and the same command goes on"
            ) from error

    def tell(self, text: str) -> None:
        """A remark, on the terminal and in the log."""
        tell(text)
        self.write(event="remark", text=text)

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation after this step is in it: of this process, or of one that was
        killed before its end."""
        return any(
            entry.get("step") == step and "eval_loss" in entry for entry in read_log(self.path)
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.durations.append(time.perf_counter() - self.step_started)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        entry = {
            "step": state.global_step,
            "elapsed": round(time.perf_counter() - self.started, 3),
            **(logs or {}),
        }
        if self.durations and "loss" in entry:
            entry["seconds_per_step"] = round(statistics.median(self.durations), 6)
            self.durations = []
        self.write(**entry)
        for name in ("loss", "eval_loss"):
            if not math.isfinite(entry.get(name, 0.0)):
                raise DivergedError(
                    f"the {name} is {entry[name]} after step {state.global_step}: training has "
                    "diverged"
                )


class NoLog(RunLog):
    """The log of a process that is not the first: it ends a run that diverged alike, and writes
    that down where the first one did not see it, as the run's remedies hang on it."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self.path = path
        self.durations = []
        self.started = time.perf_counter()
        self.lacks_start = False

    def write(self, **entry: Any) -> None:
        if entry.get("event") == "diverged":
            time.sleep(GRACE)
            if not any(each.get("event") == "diverged" for each in read_log(self.path)[-1:]):
                super().write(**entry)

    def tell(self, text: str) -> None:
        pass


class Progress(TrainerCallback):
    """A progress bar with the last loss."""

    def __init__(self, description: str) -> None:
        self.description = description
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc=self.description,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.5,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(1)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.bar is not None and logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.4f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the bar's line, so that what is printed next stands on its own."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def tell(text: str) -> None:
    """On the terminal, once for all processes."""
    if first():
        print(f"undertow: {text}", file=sys.stderr)


def keeps(entry: dict[str, Any], resume_step: int) -> bool:
    """Whether a line stays in the log of a run that goes on from a step, 0 for its start."""
    if entry.get("event") in ("diverged", "mended"):
        return True
    return resume_step > 0 and bool(entry.get("step", 0) <= resume_step)
