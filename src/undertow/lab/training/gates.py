"""T²MLR's two input-independent gates in training: a learning rate of their own, and how far they
have opened."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

# What the log calls them, and the parameter of each.
GATES = {"gate_recurrent": "gamma_recurrent", "gate_current": "gamma_current"}


class GateLog(TrainerCallback):
    """Adds tanh(γ_rec) and tanh(γ_cur) to each line of the log that has a loss, for a model with
    T²MLR."""

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        found = {}
        for name, parameter in model.named_parameters():
            for gate, gamma in GATES.items():
                if name.rpartition(".")[2] == gamma and "original_module" not in name:
                    value: Any = parameter.detach()
                    whole = (
                        value.full_tensor() if isinstance(value, DTensor) else value
                    )  # FSDP's may be on another process
                    found[gate] = math.tanh(float(whole))
        logs.update(found)  # for the callbacks after this one
        state.log_history[-1].update(found)


class FastGates:
    """Mixed in before a `Trainer`, TRL's `SFTTrainer` too: γ_rec and γ_cur learn faster than the
    rest, by `gate_multiplier`.

    They get a parameter group of their own, without weight decay, that follows the same schedule::

        class GatedSFTTrainer(FastGates, SFTTrainer):
            gate_multiplier = 100.0
    """

    gate_multiplier: float = 1.0

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        trainer: Any = self
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if (
            self.gate_multiplier != 1 and len(optimizer.param_groups) == 2
        ):  # not from an earlier call
            trained: Any = trainer.model if model is None else model
            # In the model's order: a resumed run finds the optimiser's state by position.
            gates = [
                p for name, p in trained.named_parameters() if ".gamma_" in name and p.requires_grad
            ]
            for group in optimizer.param_groups:
                group["params"] = [
                    p for p in group["params"] if not any(p is gate for gate in gates)
                ]
            if gates:
                rate = trainer.args.learning_rate * self.gate_multiplier
                optimizer.add_param_group({"params": gates, "lr": rate, "weight_decay": 0.0})
        return optimizer
