"""Checkpoints that prove themselves: written whole, with a manifest; the newest one that passes is
resumed from."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from undertow.errors import CheckpointError
from undertow.files import MANIFEST
from undertow.manifest import check_manifest

PREFIX = "checkpoint-"
# What the Trainer would do without in silence, beside the weights.
NEEDED = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
# What is in the files of the training's state.
STATES = {
    "optimizer.pt": ("state", "param_groups"),
    "scheduler.pt": ("last_epoch", "lr_lambdas"),
    "rng_state.pth": ("python", "numpy", "cpu"),
}


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, whole or not, newest first."""
    named = [
        path
        for path in folder.glob(f"{PREFIX}*")
        if path.name.removeprefix(PREFIX).isdecimal() and path.is_dir()
    ]
    return sorted(named, key=step_of, reverse=True)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; one that lies elsewhere stays there, and only the link to it goes.

    Raises:
        OSError: it cannot be removed.
    """
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint)


def step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix(PREFIX))


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run that proves itself; see `choose`."""
    return choose(folder)[0]


def choose(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that proves itself, None if there is none at all; and what is to be
    said of others.

    Nothing is removed here: what cannot be read now may be readable later.

    Raises:
        CheckpointError: there are checkpoints, but none of them passes.
    """
    found, said = checkpoints(folder), []
    for path in found:
        try:
            remark = prove(path)
        except (CheckpointError, OSError) as error:
            said.append(f"{path.name} is skipped: {error}")
            continue
        return path, said + ([remark] if remark else [])
    if found:
        raise CheckpointError(
            f"no checkpoint in {folder} can be resumed from ({'; '.join(said)}); restore one of "
            f"them, or remove {'them' if len(found) > 1 else 'it'} to start anew"
        )
    return None, []


def prove(checkpoint: Path) -> str | None:
    """Make sure that a checkpoint is what was saved; a remark, if it is of an older undertow and
    can show less.

    Raises:
        CheckpointError: it is not.
        OSError: something could not be read.
    """
    proven = (checkpoint / MANIFEST).exists()
    check_manifest(checkpoint, NEEDED)
    step = step_in(checkpoint / "trainer_state.json")
    if step != step_of(checkpoint):
        raise CheckpointError(f"{checkpoint} is of step {step}; give it its name back")
    weights = sorted(checkpoint.glob("*.safetensors"))
    if not weights:
        raise CheckpointError(f"{checkpoint} has no weights")
    if proven:
        return None
    for path in weights:
        check_weights(path)
    for name, keys in STATES.items():
        check_state(checkpoint / name, keys)
    return (
        f"{checkpoint.name} has no {MANIFEST}, as those of an older undertow: it is complete and "
        "can be read, but that it is unchanged is not known"
    )


def check_weights(path: Path) -> None:
    """Make sure that a file of weights can be read, and that all are finite.

    Raises:
        CheckpointError: it cannot, or they are not.
    """
    try:
        with safe_open(path, "pt") as file:
            for name in infinite((name, file.get_tensor(name)) for name in file.keys()):  # noqa: SIM118
                raise CheckpointError(f"{path} holds a {name} that is not finite")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def step_in(path: Path) -> int:
    """The step that a Trainer's state is of.

    Raises:
        CheckpointError: it is missing, or no such state.
    """
    try:
        state = TrainerState.load_from_json(str(path))
        numbers = [
            state.global_step,
            state.max_steps,
            state.num_train_epochs,
            state.epoch or 0,
            state.train_batch_size,
        ]
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError
        if (
            not isinstance(state.log_history, list)
            or "TrainerControl" not in state.stateful_callbacks
        ):
            raise TypeError
        return state.global_step
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged") from error


def check_state(path: Path, keys: Iterable[str]) -> None:
    """Make sure that a file of the training's state can be read, and holds these keys.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        with safe_globals():
            state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not state.keys() >= set(keys):
            raise CheckpointError(f"{path} is damaged: it does not hold {', '.join(keys)}")
        if not isinstance(state.get("last_epoch", 0), int):
            raise CheckpointError(f"{path} is damaged: its last_epoch is {state['last_epoch']!r}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # unpickling raises any kind
        raise CheckpointError(f"{path} is damaged") from error


def infinite(named: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The names of tensors that hold a NaN or an infinity."""
    for name, tensor in named:
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.is_floating_point()
            and not torch.isfinite(tensor).all()
        ):
            yield name
