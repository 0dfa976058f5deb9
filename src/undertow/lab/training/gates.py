"""A pathway's gates in training: a learning rate of their own, and how far they have opened."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from undertow.host.attachment import find_pathway, recurs_in_time
from undertow.pathways import Pathway


class GateLog(TrainerCallback):
    """Adds how far the pathway's gates have opened to each line of the log that has a loss, as
    `gate_recurrent`, tanh(γ_rec), and `gate_current`, tanh(γ_cur), of T²MLR."""

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs or not recurs_in_time(model):
            return
        found = {}
        for gate, value in find_pathway(model).gate_values().items():
            # FSDP's may be on another process.
            found[f"gate_{gate}"] = float(
                value.full_tensor() if isinstance(value, DTensor) else value
            )
        logs.update(found)  # for the callbacks after this one
        state.log_history[-1].update(found)


class FastGates:
    """Mixed in before a `Trainer`, TRL's `SFTTrainer` too: what a pathway calls its fast
    parameters, γ_rec and γ_cur of T²MLR, learns faster than the rest, by `gate_multiplier`.

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
            pathways = [module for module in trained.modules() if isinstance(module, Pathway)]
            fast = [p for each in pathways for p in each.fast_parameters() if p.requires_grad]
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if not any(p is f for f in fast)]
            if fast:
                rate = trainer.args.learning_rate * self.gate_multiplier
                optimizer.add_param_group({"params": fast, "lr": rate, "weight_decay": 0.0})
        return optimizer
