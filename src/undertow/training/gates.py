"""How far T²MLR's two input-independent gates have opened, in every line of the log."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback

# What the log calls them, and the parameter of each.
GATES = {"gate_recurrent": "gamma_recurrent", "gate_current": "gamma_current"}


class GateLog(TrainerCallback):
    """Adds tanh(γ_rec) and tanh(γ_cur) to each line of the log that has a loss, for a model with T²MLR."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **kwargs: Any
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        found = {}
        for name, parameter in model.named_parameters():
            for gate, gamma in GATES.items():
                if name.rpartition(".")[2] == gamma and "original_module" not in name:
                    found[gate] = math.tanh(float(parameter.detach()))
        logs.update(found)  # for the callbacks after this one
        state.log_history[-1].update(found)
