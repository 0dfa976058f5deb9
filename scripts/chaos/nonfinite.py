"""Let a loss, a gradient or a weight be no number in the middle of a training, and look what is
left.

    python scripts/chaos/nonfinite.py [--seed 0]

The run has to stop, naming the step and the last good checkpoint, with nothing on the disk that is
not finite. The same command without the fault has to give the weights of a run that never had it; a
lower rate has to go on from there, and the log has to say so.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import Outcome, run
from small_runs import (
    SEED,
    equal,
    finite,
    log_entries,
    note_start,
    recipe,
    resumed_after,
    weights,
    write,
)
from tally import Tally, first, main

# What goes wrong, at which of thirty steps, and settings that are another than usual.
FAULTS: list[tuple[str, int, dict[str, Any]]] = [
    ("nan gradient", 14, {}),
    ("inf gradient", 14, {}),
    ("nan loss", 14, {}),
    ("nan weight", 14, {}),
    ("nan gradient", 1, {}),
    ("nan gradient", 30, {}),
    ("nan gradient", 30, {"evaluate_examples": 0}),
    ("nan gradient", 23, {"steps": 28, "evaluate_examples": 0}),
    ("nan gradient", 14, {"clip": 0}),
    ("inf gradient", 14, {"clip": 0}),
    ("nan loss", 14, {"accumulate": 2}),
    ("inf gradient", 14, {"precision": "bf16"}),
]
RATES = (1e3, 1e30, float("inf"), float("nan"))


def made(changes: dict[str, Any]) -> dict[str, Any]:
    usual = {
        "steps": 30,
        "batch": 4,
        "accumulate": 1,
        "learning_rate": 3e-3,
        "warmup_steps": 1,
        "gate_multiplier": 20.0,
    }
    training = (
        usual
        | {"log_every": 10, "save_every": 2, "evaluate_every": None, "evaluate_examples": 4}
        | changes
    )
    return recipe(model={"layers": 2, "width": 16, "heads": 2, "positions": 64}, training=training)


def breaking(kind: str, at: int) -> Callable[[], None]:
    """What makes that step's loss, gradient or weight be no number in this process."""
    value, what = kind.split()

    def before() -> None:
        import torch
        from transformers import Trainer

        compute = Trainer.compute_loss

        def broken(self: Any, model: Any, *args: Any, **settings: Any) -> Any:
            hit = model.training and self.state.global_step + 1 == at
            weight = [parameter for parameter in model.parameters() if parameter.requires_grad][-1]
            if hit and what == "weight":
                with torch.no_grad():
                    weight.view(-1)[0] = float(value)
            if hit and what == "gradient":
                weight.register_hook(lambda gradient: torch.full_like(gradient, float(value)))
            loss = compute(self, model, *args, **settings)
            return loss * float(value) if hit and what == "loss" else loss

        Trainer.compute_loss = broken

    return before


def on_disk(folder: Path) -> str:
    """What is saved of a run that is not finite, "" if nothing."""
    for saved in [folder / "model", *sorted(folder.glob("checkpoint-*"))]:
        if not finite(weights(saved)):
            return f"{saved.name} is not finite"
    return "it is saved as finished" if (folder / "model").exists() else ""


def stopped_well(outcome: Outcome, folder: Path, at: int) -> str:
    """What is wrong with how a run ended whose step `at` could not be taken."""
    if outcome.kind != "refused":
        return str(outcome)
    steps = [int(step) for step in re.findall(r"\bsteps? (\d+)", outcome.said)]
    if at not in steps:
        return f"it names the steps {steps} and not {at}; {outcome}"
    if "examples" not in outcome.said:
        return f"it does not name the step's examples; {outcome}"
    good = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")]
    newest = max((step for step in good if step < at), default=None)
    if at > 2 and newest is None:  # checkpoints are saved every other step
        return f"no good checkpoint is left; {outcome}"
    if newest is not None and f"checkpoint-{newest}" not in outcome.said:
        return f"it does not name checkpoint-{newest}; {outcome}"
    return on_disk(folder)


def trials(work: Path, seed: int) -> list[Tally]:
    stops = Tally("steps that are not finite: stopped there, nothing of them saved")
    again = Tally("the same command without that fault: weights as if it never was")
    lower = Tally("a lower rate then: on from the good checkpoint, and logged")
    for kind, at, changes in FAULTS:
        trial = f"{kind} at step {at}, {changes or 'usual settings'}"
        reference, case = work / "reference", work / "case"
        for folder in (reference, case):
            shutil.rmtree(folder, ignore_errors=True)
        command = write(reference, made(changes))
        run(command, reference)
        write(case, made(changes))
        outcome = run(command, case, before=breaking(kind, at))
        stops.add(trial, stopped_well(outcome, case / SEED, at))
        other = work / "lower"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(case, other)

        outcome = run(command, case)
        same = equal(weights(case / SEED / "model"), weights(reference / SEED / "model"))
        again.add(trial, "" if outcome.kind == "ok" and same else f"other weights; {outcome}")

        newest = max(
            (int(path.name.rpartition("-")[2]) for path in (other / SEED).glob("checkpoint-*")),
            default=0,
        )
        outcome = run(
            write(other, made(changes | {"learning_rate": 1e-4})), other, before=note_start
        )
        entries = log_entries(other / SEED)
        recorded = any("learning_rate" in str(entry) and "event" in entry for entry in entries)
        lower.add(
            trial,
            first(
                "" if outcome.kind == "ok" else str(outcome),
                ""
                if resumed_after(other) == newest
                else f"it went on from step {resumed_after(other)} and not {newest}",
                "" if recorded else "the log does not say so",
                "" if finite(weights(other / SEED / "model")) else "the model is not finite",
            ),
        )
    for rate in RATES:
        folder = work / f"rate {rate}"
        outcome = run(write(folder, made({"learning_rate": rate})), folder)
        done = outcome.kind == "ok" and finite(weights(folder / SEED / "model"))
        fault = (
            "" if done else str(outcome) if outcome.kind != "refused" else on_disk(folder / SEED)
        )
        stops.add(f"learning rate {rate}", fault)
    return [stops, again, lower]


if __name__ == "__main__":
    main(trials, __doc__)
