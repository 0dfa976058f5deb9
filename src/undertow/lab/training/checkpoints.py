"""Checkpoints that prove themselves: written whole, with a manifest; the newest one that passes is
resumed from."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from undertow.errors import CheckpointError, DivergedError
from undertow.files import MANIFEST, sync
from undertow.manifest import check_manifest, write_manifest

PREFIX = "checkpoint-"
# What the Trainer would do without in silence, beside the weights.
NEEDED = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
# What is in the files of the training's state.
STATES = {
    "optimizer.pt": ("state", "param_groups"),
    "scheduler.pt": ("last_epoch", "lr_lambdas"),
    "rng_state.pth": ("python", "numpy", "cpu"),
}
KEPT = 2


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


@contextmanager
def fitting(checkpoint: str) -> Iterator[None]:
    """Say of a checkpoint that cannot be loaded which one it is."""
    try:
        yield
    except CheckpointError:
        raise
    except (
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OSError,
        SafetensorError,
    ) as error:
        raise CheckpointError(
            f"{checkpoint} does not fit this training: {error}; remove it if it is of another, or "
            "of an older undertow"
        ) from error


class ProvenCheckpoints:
    """Mixed in before a Trainer: its checkpoints are written beside their place, proven, and put
    there whole.

    `proven` are the steps of the last of them, oldest first. Older ones go only when there are two.
    """

    proven: list[int]
    masks: set[str]
    _writing: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self._writing is None else self._writing)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        folder, step = Path(trainer.args.output_dir), trainer.state.global_step
        self.check_finite()
        name = f"{PREFIX}{step}"
        writing, target = folder / f".{name}.writing", folder / name
        try:
            shutil.rmtree(writing, ignore_errors=True)
            self._writing = writing
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            write_manifest(writing / name)
            if target in checkpoints(folder):  # one that was skipped, and is made again
                remove(target)
            (writing / name).rename(target)
            sync(folder)
        except (
            OSError,
            RuntimeError,
            SafetensorError,
            CheckpointError,
        ) as error:  # torch.save: RuntimeError for a full disk
            on = (
                f"goes on from the checkpoint before, of step {self.proven[-1]}"
                if self.proven
                else "starts anew"
            )
            raise CheckpointError(
                f"could not write a checkpoint in {folder}: {error}; when that is mended, the same "
                f"run {on}"
            ) from error
        finally:
            self._writing = None
            shutil.rmtree(writing, ignore_errors=True)
        self.proven = [*self.proven, step][-KEPT:]
        if len(self.proven) == KEPT:
            for path in checkpoints(folder):
                if step_of(path) < self.proven[0]:
                    with suppress(OSError):
                        remove(path)

    def check_start(self) -> None:
        """Make sure that a training starts from a sound model. Buffers may hold infinities, as
        masks do.

        Raises:
            CheckpointError: one of its weights is not finite.
        """
        trainer: Any = self
        for name in infinite(trainer.model.named_parameters()):
            raise CheckpointError(
                f"the model's {name} is not finite before any training; load another model"
            )
        self.proven, self.masks = [], set(infinite(trainer.model.named_buffers()))

    def check_finite(self) -> None:
        """Make sure that the model and the optimiser's state may be saved.

        Raises:
            DivergedError: something in them is not finite.
        """
        trainer: Any = self
        names = {parameter: name for name, parameter in trainer.model.named_parameters()}
        states = trainer.optimizer.state.items() if trainer.optimizer is not None else ()
        optimised = (
            (f"the optimiser's {key} of {names[p]}", value)
            for p, state in states
            for key, value in state.items()
        )
        for name in infinite(chain(trainer.model.state_dict().items(), optimised)):
            if name not in self.masks:
                raise DivergedError(f"{name} is not finite after step {trainer.state.global_step}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with fitting(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with fitting(str(checkpoint)):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        trainer: Any = self
        weights = trainer.model.state_dict(keep_vars=True)
        loaded = {
            weights[name].data_ptr() for name in weights.keys() - set(load_result.missing_keys)
        }
        missing = [
            name for name in load_result.missing_keys if weights[name].data_ptr() not in loaded
        ]  # but for tied ones
        if missing or load_result.unexpected_keys:
            first = [*missing, *load_result.unexpected_keys][0]
            raise CheckpointError(
                f"the checkpoint and the model have other weights: {first} is in one of them alone"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both; their settings are the recipe's all the same, as a rate may have been lowered
        after a divergence."""
        trainer: Any = self
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        loaded = ("params", "lr")
        own = [
            {key: group[key] for key in group if key not in loaded}
            for group in optimizer.param_groups
        ]
        rates = list(scheduler.base_lrs)
        with fitting(str(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        scheduler.base_lrs = rates
        now = [
            rate * shape(scheduler.last_epoch)
            for rate, shape in zip(rates, scheduler.lr_lambdas, strict=True)
        ]
        for group, settings, rate in zip(optimizer.param_groups, own, now, strict=True):
            group.update(settings, lr=rate)
        scheduler._last_lr = now
