"""What each line of a training's log tells of its speed and of its gradients."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from undertow.lab.processes import summed, world
from undertow.lab.tasks.dataset import real_tokens
from undertow.pathways import Pathway

# Dense peaks in TFLOP/s by what torch calls a GPU, by training.precision, as its maker gives them.
PEAKS: dict[str, dict[str, float]] = {
    "A100": {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0},
    "H100 PCIe": {"fp32": 51.0, "tf32": 378.0, "bf16": 756.0},
    "H100 80GB HBM3": {"fp32": 67.0, "tf32": 494.5, "bf16": 989.0},
    "H200": {"fp32": 67.0, "tf32": 494.5, "bf16": 989.0},
}


@dataclass(frozen=True)
class Cost:
    """Operations of a training step, as `--dry-run` counts them: those of a token, and those that
    each token takes more for each token of its row."""

    token: float
    length: float

    def of(self, tokens: float, squares: float) -> float:
        """Of rows with so many tokens in all, and so large a sum of squared lengths."""
        return self.token * tokens + self.length * squares


class Clock(TrainerCallback):
    """The seconds that steps took, with their data, but without evaluations and checkpoints."""

    def __init__(self) -> None:
        self.seconds, self.mark = 0.0, time.perf_counter()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.mark = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.seconds, self.mark = self.seconds + now - self.mark, now

    on_evaluate = on_save = on_train_begin


class MeasuredSteps:
    """Mixed in before a Trainer: lines with a loss get `tokens_per_second` of all processes,
    padding not counted, `flops_per_second` by `cost`, `mfu` where the device's peak is known, and
    the norm of the whole gradient before clipping, of the recurrence and of the rest."""

    cost: Cost
    peak: float | None
    clock: Clock
    _seen: Any = 0.0
    _norms: dict[str, torch.Tensor] | None = None

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = real_tokens(inputs).sum(1).double()
        self._seen = self._seen + torch.stack([lengths.sum(), lengths.square().sum()])
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> Any:
        self._look_at_gradients()
        return super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:  # nothing has been clipped
            self._look_at_gradients()
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

    def _look_at_gradients(self) -> None:
        """Only in steps that are logged."""
        trainer: Any = self
        step = trainer.state.global_step + 1
        if step == 1 or step % trainer.state.logging_steps == 0:
            self._norms = norms(trainer.model)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.clock.seconds:
            logs = logs | self._measures()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _measures(self) -> dict[str, float]:
        tokens, squares = summed(torch.as_tensor(self._seen).tolist())
        seconds, self.clock.seconds = self.clock.seconds, 0.0
        rate = self.cost.of(tokens, squares) / seconds
        found = {"tokens_per_second": tokens / seconds, "flops_per_second": rate}
        if self.peak is not None:
            found["mfu"] = rate / (self.peak * world())
        for name, norm in (self._norms or {}).items():
            found[f"grad_norm_{name}"] = float(norm)
        self._seen, self._norms = 0.0, None
        return found


def norms(model: Any) -> dict[str, torch.Tensor]:
    """The norms of the whole gradients of a model's recurrence and of the rest of it; nothing for a
    model without one. Every process takes part."""
    inside = {
        id(each)
        for module in model.modules()
        if isinstance(module, Pathway)
        for each in module.parameters()
    }
    if not inside:
        return {}
    parts: dict[str, list[torch.Tensor]] = {"recurrence": [], "backbone": []}
    for each in model.parameters():
        if each.grad is not None:
            parts["recurrence" if id(each) in inside else "backbone"].append(each.grad)
    return {name: norm(gradients) for name, gradients in parts.items() if gradients}


def norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of them all, where some may be spread over processes and others not."""
    kinds: dict[bool, list[torch.Tensor]] = {}
    for each in gradients:
        kinds.setdefault(isinstance(each, DTensor), []).append(each)
    found = [torch.nn.utils.get_total_norm(each) for each in kinds.values()]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
    return torch.stack(whole).norm()


def peak(precision: str) -> float | None:
    """Operations a second that this process's device can do at most; None for a CPU, and for a GPU
    that is not in `PEAKS`."""
    if not torch.cuda.is_available():
        return None
    return peak_of(torch.cuda.get_device_name(), precision)


def peak_of(device: str, precision: str) -> float | None:
    found = [rates[precision] for name, rates in PEAKS.items() if name in device]
    return 1e12 * found[0] if found else None
