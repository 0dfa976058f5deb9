"""Checkpoints that a Trainer writes beside their place, proves, and puts there whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from undertow.depth.initial import mix
from undertow.errors import CheckpointError, DivergedError
from undertow.files import sync
from undertow.lab.processes import first, rank, reachable, wait, world
from undertow.lab.runs.checkpoints import PREFIX, checkpoints, infinite, remove, step_of
from undertow.manifest import write_manifest

KEPT = 2
# The Trainer's file of the random numbers of one process alone.
ALONE = "rng_state.pth"


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
            if first():
                shutil.rmtree(writing, ignore_errors=True)
            wait()
            self._writing = writing
            with reachable():  # which no disk is to blame for
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            wait()
            if first():
                self._put_there(writing / name, target)
            wait()
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
            if first():
                shutil.rmtree(writing, ignore_errors=True)
        self.proven = [*self.proven, step][-KEPT:]
        if first() and len(self.proven) == KEPT:
            for path in checkpoints(folder):
                if step_of(path) < self.proven[0]:
                    with suppress(OSError):
                        remove(path)

    def _put_there(self, written: Path, target: Path) -> None:
        """Give a checkpoint that is whole its manifest and its place."""
        if not (written / ALONE).exists():
            # So that it goes on in one process too, or in another number of them.
            shutil.copyfile(written / ALONE.replace(".", "_0."), written / ALONE)
        write_manifest(written)
        if target in checkpoints(target.parent):  # one that was skipped, and is made again
            remove(target)
        written.rename(target)
        sync(target.parent)

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
        own = ALONE if world() == 1 else ALONE.replace(".", f"_{rank()}.")
        if checkpoint is not None and not (Path(checkpoint) / own).exists():
            # It is of another number of processes, of which this was none.
            trainer: Any = self
            torch.manual_seed(mix(trainer.args.seed, step_of(Path(checkpoint)), rank()))
            return
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
