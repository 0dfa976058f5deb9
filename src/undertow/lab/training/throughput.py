"""How fast a training goes, and how large the gradient is in the recurrence and in the rest."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from undertow.lab.processes import total, world
from undertow.lab.runs.recipe import Recipe
from undertow.lab.training.dry_run import layer_costs

# Peak rates without sparsity in TFLOP/s, by a part of the device's name and training.precision,
# from NVIDIA's data sheets. The first that fits counts.
PEAKS: dict[str, dict[str, float]] = {
    "H200": {"fp32": 67, "tf32": 495, "bf16": 989},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "bf16": 756},
    "H100": {"fp32": 67, "tf32": 495, "bf16": 989},
    "A100": {"fp32": 19.5, "tf32": 156, "bf16": 312},
}


def peak(device: str, precision: str) -> float | None:
    """The peak rate of a device in TFLOP/s, by its name; None where it is not known, as of CPUs."""
    found = next((rates for name, rates in PEAKS.items() if name in device), {})
    return found.get(precision)


class Throughput(TrainerCallback):
    """Adds to each line of the log that has a loss, for the steps since the line before:

    - `tokens_per_second`: of all processes, padding not counted.
    - `tflops`: what these tokens take of the plain model at its mean depth, forward and backward,
      in TFLOP/s. What a solver's sweeps, a rollout or recomputed activations take besides is time
      and no work here.
    - `flops_use`: the share of the devices' peak that this is, where the peak is known.
    - `grad_norm_recurrence` and `grad_norm_backbone`: the parts of `grad_norm`, in the line's step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.trainer: Any = None
        self.seconds = 0.0
        self.shares: dict[str, torch.Tensor] = {}
        cuda = torch.cuda.is_available()
        device = torch.cuda.get_device_name() if cuda else "cpu"
        self.peak = peak(device, recipe.training.precision)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        step = state.global_step + 1
        if step == 1 or step % args.logging_steps == 0:
            self.shares = gradient_shares(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self.begun

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs or not self.seconds:
            return
        found: dict[str, float] = {}
        tokens, rows = total(self.trainer.taken())
        rate = tokens / self.seconds
        found["tokens_per_second"] = round(rate, 1)
        each, _ = layer_costs(self.recipe, model, tokens / max(rows, 1))
        found["tflops"] = 3 * each * rate / 1e12
        if self.peak is not None:
            found["flops_use"] = found["tflops"] / (self.peak * world())
        for name, share in self.shares.items():
            found[f"grad_norm_{name}"] = float(share) * float(logs.get("grad_norm", 0.0))
        self.seconds, self.shares = 0.0, {}
        logs.update(found)  # for the callbacks after this one
        state.log_history[-1].update(found)


def gradient_shares(model: nn.Module) -> dict[str, torch.Tensor]:
    """The norms of the gradient in the recurrence and in the rest, over that of all: clipping does
    not change these. Nothing where one of the two does not learn."""
    parts: dict[str, list[torch.Tensor]] = {"recurrence": [], "backbone": []}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parts["recurrence" if "recurrence." in name else "backbone"].append(parameter.grad)
    if not all(parts.values()):
        return {}
    norms = {name: whole(nn.utils.get_total_norm(each)) for name, each in parts.items()}
    of_all = torch.stack(list(norms.values())).norm().clamp_min(torch.finfo(torch.float32).tiny)
    return {name: norm / of_all for name, norm in norms.items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    """A number of which each process may hold a part."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().float()
