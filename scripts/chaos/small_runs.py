"""Small recipes that train in a second or two, and what is compared of the runs that they leave."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

PARITY = {"kind": "parity", "template": "bare", "max_length": 12}
# With a cost, `Auto` measures no times, so that the same seed gives the same bits.
AUTO = {"kind": "auto", "rollout_cost": 2.0, "every": 8}
TRAINING = {
    "steps": 20,
    "batch": 8,
    "accumulate": 2,
    "learning_rate": 2e-3,
    "gate_multiplier": 30.0,
    "save_every": 4,
    "log_every": 1,
    "threads": 1,
    "warmup_steps": 5,
    "schedule": "cosine",
    "evaluate_every": 10,
    "evaluate_examples": 8,
}
BASE = {
    "name": "trial",
    "output": "runs",
    "task": PARITY,
    "model": {"layers": 2, "width": 32, "heads": 4},
    "recurrence": {"kind": "t2mlr", "first_layer": 0, "last_layer": 1},
    "solver": AUTO,
    "training": TRAINING,
    "evaluation": {"lengths": [8], "examples": 4},
}
# The same experiment with half the work: for trials in which the training itself is not what is
# tried.
SHORT = {
    "steps": 8,
    "batch": 4,
    "save_every": 2,
    "warmup_steps": 1,
    "evaluate_every": None,
    "evaluate_examples": 2,
}
# What of a line of the log is a time, and so another every time.
TIMES = ("elapsed", "seconds_per_step", "runtime", "per_second", "total_flos")
RUN = Path("runs/trial")
SEED = RUN / "seed-0"


def recipe(**changes: Any) -> dict[str, Any]:
    """The base recipe with some sections replaced, None for none; `training` has its keys replaced
    one by one."""
    made = copy.deepcopy(BASE)
    for name, value in changes.items():
        if name == "training":
            made["training"] |= value
        elif value is None:
            del made[name]
        else:
            made[name] = value
    return made


def short(**changes: Any) -> dict[str, Any]:
    """A recipe of half the work, which saves a checkpoint every other step of eight."""
    return recipe(**changes | {"training": SHORT | changes.get("training", {})})


def write(folder: Path, made: dict[str, Any]) -> list[str]:
    """Write a recipe into a working folder; the words of the command that trains it there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    return ["train", "recipe.yaml"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model's or a checkpoint's folder, by file and name; empty if there is no
    such folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {f"{path.name}:{name}": tensor for name, tensor in load_file(path).items()}
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether there are weights, and they are the same, bit for bit."""
    return (
        bool(one)
        and one.keys() == other.keys()
        and all(torch.equal(one[name], other[name]) for name in one)
    )


def finite(tensors: dict[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def log_entries(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; what is no line of JSON is an error."""
    path = folder / "log.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.is_file()
        else []
    )


def measured(folder: Path) -> list[dict[str, Any]]:
    """What a run's log says of its steps, in order and without times: losses, norms, sweeps,
    evaluations."""
    entries = [entry for entry in log_entries(folder) if "loss" in entry or "eval_loss" in entry]
    return [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in entries
    ]


def note_start() -> None:
    """Have this process note which step its training goes on from; `resumed_after` reads it."""
    from transformers import Trainer

    compute, note = Trainer.compute_loss, Path("resumed-after").absolute()
    note.unlink(missing_ok=True)

    def noting(self: Any, model: Any, *args: Any, **settings: Any) -> Any:
        if model.training and not note.exists():
            note.write_text(str(self.state.global_step))
        return compute(self, model, *args, **settings)

    Trainer.compute_loss = noting


def resumed_after(folder: Path) -> int | None:
    """The step that the last training with `note_start` went on from in a working folder; None if
    it took no step."""
    note = folder / "resumed-after"
    return int(note.read_text()) if note.exists() else None


def names(folder: Path) -> list[str]:
    """The names in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def whole(folder: Path, reference: Path) -> str:
    """What a finished run lacks of being the reference's: the first difference, or "" if it is the
    same, bit for bit."""
    if not equal(weights(folder / "model"), weights(reference / "model")):
        return "its weights differ" if (folder / "model").is_dir() else "it has no model"
    if measured(folder) != measured(reference):
        return "its log differs"
    if names(folder) != names(reference):
        return f"its folder holds {names(folder)} and not {names(reference)}"
    return ""
