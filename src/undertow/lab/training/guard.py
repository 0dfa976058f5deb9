"""No step is taken with a loss or a gradient that is no number."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback

from undertow.errors import DivergedError

NAMES = ("loss", "norm of the gradient", "loss")


class GuardedSteps:
    """Mixed in before a Trainer: every step's loss and gradient are looked at before the optimiser
    moves.

    On a GPU nobody waits for them. The optimiser's kernels leave everything as it is where they are
    not finite, and what they were is read a step later, or before anything is saved: `settle`.
    """

    _losses: Any = 0.0
    _norm: Any = None
    _looked: tuple[int, torch.Tensor, Any] | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        trainer: Any = self
        try:
            loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        except DivergedError as error:  # of the model itself
            error.step = trainer.state.global_step + 1
            raise
        self._losses = self._losses + loss.detach()
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        self._norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        return self._norm

    def _get_grad_norm(
        self, model: Any, grad_norm: Any = None
    ) -> Any:  # asked for without clipping too
        self._norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        return self._norm

    def look(self) -> None:
        """Look at the step that is about to be taken.

        Raises:
            DivergedError: its loss or gradient is not finite, or on a GPU those of the step before.
        """
        trainer: Any = self
        if self._norm is None:
            gradients = [
                parameter.grad
                for parameter in trainer.model.parameters()
                if parameter.grad is not None
            ]
            self._norm = torch.nn.utils.get_total_norm(gradients)
        # The Trainer's own sum since the last line of the log, where it has one, is what will be
        # logged.
        seen = [self._losses, self._norm, getattr(trainer, "_tr_loss", self._losses)]
        values = torch.stack(
            [torch.as_tensor(value, device=trainer.args.device).detach().float() for value in seen]
        )
        self._losses, self._norm = 0.0, None
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        step = trainer.state.global_step + 1
        late = self.reads_late(values) and getattr(optimizer, "_step_supports_amp_scaling", False)
        self.settle()
        if late:
            optimizer.found_inf = (~torch.isfinite(values).all()).float()
            self._looked = (step, *sent_home(values))
        else:
            judge(step, values)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.settle()  # the loss that is logged had to be waited for
        super().log(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.settle()  # a step that was not taken is not saved as if it was
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    @staticmethod
    def reads_late(values: torch.Tensor) -> bool:
        return values.is_cuda

    def settle(self) -> None:
        """Read what the last step was like, if that is still to be done.

        Raises:
            DivergedError: it was not finite, and was not taken.
        """
        if self._looked is not None:
            (step, values, arrived), self._looked = self._looked, None
            if arrived is not None:
                arrived.synchronize()
            judge(step, values)


class Guard(TrainerCallback):
    """Calls the trainer's `look` before each step of its optimiser."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.look()


def sent_home(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on the CPU of a few values, and the event after which it is there; None if it is
    already."""
    if not values.is_cuda:
        return values.clone(), None
    home = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    home.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return home, arrived


def judge(step: int, values: torch.Tensor) -> None:
    """Raise a DivergedError if one of a step's values is not finite."""
    for name, value in zip(NAMES, values.tolist(), strict=True):
        if not math.isfinite(value):
            error = DivergedError(
                f"the {name} is {value} at step {step}, which is not taken: training has diverged"
            )
            error.step = step
            raise error
