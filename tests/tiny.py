"""Tiny recipes and what their runs leave behind, for the tests of training, evaluation and the
command line."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import undertow
from undertow.lab.runs.log import read_log
from undertow.lab.training import Recipe
from undertow.lab.training.log import RunLog
from undertow.mapping import from_mapping

TURBOCONN: dict[str, Any] = {
    "kind": "turboconn",
    "connections": [[1, 0]],
    "lag": 1,
    "alpha": 1.0,
    "rank": 8,
}
T2MLR: dict[str, Any] = {"kind": "t2mlr", "first_layer": 0, "last_layer": 1}
TINY: dict[str, Any] = {
    "name": "tiny",
    "task": {"kind": "parity", "template": "bare", "max_length": 8},
    "model": {"layers": 2, "width": 16, "heads": 2, "positions": 64},
    "training": {
        "steps": 6,
        "batch": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "log_every": 1,
        "evaluate_examples": 8,
        "save_every": 2,
    },
    "evaluation": {"lengths": [6, 8], "examples": 8},
}


def settings(output: Path, **changes: Any) -> dict[str, Any]:
    """The tiny recipe as plain data; a section that is given changes only the keys that it names, a
    pretrained model all."""
    merged = TINY | {"output": str(output)}
    for name, value in changes.items():
        whole = (
            name in ("recurrence", "lora")
            or not isinstance(value, dict)
            or "kind" in value
            or "path" in value
        )
        merged[name] = value if whole else TINY.get(name, {}) | value
    return merged


def recipe(output: Path, **changes: Any) -> Recipe:
    """The tiny recipe, with changes as in `settings`."""
    return from_mapping(Recipe, settings(output, **changes))


def recipe_file(output: Path, **changes: Any) -> Path:
    """The tiny recipe as a YAML file beside its runs."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(output, **changes)))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights saved in a folder."""
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are the same, bit for bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) for key in first
    )


def interrupt(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the next runs stop at the end of a step, before anything is saved there, as Ctrl-C
    would."""

    def stop(self: RunLog, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunLog, "on_step_end", stop)


def environment() -> dict[str, str]:
    """The environment of another process that shall import the same package."""
    return os.environ | {"PYTHONPATH": str(Path(undertow.__file__).parents[1])}


def losses(folder: Path) -> dict[int, float]:
    """The logged loss of every step, each logged once."""
    lines = [entry for entry in read_log(folder / "log.jsonl") if "loss" in entry]
    found = {entry["step"]: entry["loss"] for entry in lines}
    assert len(found) == len(lines), "a step was logged twice"
    return found
