"""How far the solver that a model is trained with is from the exact rollout: measured, logged, and told in plain words."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from undertow.errors import ConfigError
from undertow.host.attach import Attachment, find_attachment
from undertow.host.state import StateLayer
from undertow.solvers import Auto, Sequential, Solver, SolverMemory

logger = logging.getLogger("undertow")

# States that are this far off are worth a warning, and again whenever they are twice as far off as at the last one.
WARNING_GAP = 0.05


@dataclass(frozen=True)
class Gap:
    """A solver against the exact rollout on one batch.

    Attributes:
        states: the relative error of its states.
        loss: its loss minus the exact one.
    """

    states: float
    loss: float


def measure_gap(model: Any, inputs: Mapping[str, Any]) -> Gap:
    """Run the model's training solver and the exact rollout on a batch, without gradients and dropout.

    Args:
        model: a hosted model.
        inputs: what it is called with, labels among them.

    Raises:
        ConfigError: the model has no recurrence.
    """
    attachment = find_attachment(model)
    solver, training = attachment.solver, model.training
    if isinstance(solver, Auto):
        raise ConfigError("Auto measures its own distance to the exact rollout; its plans tell it")
    model.eval()
    try:
        loss, states = loss_and_states(model, attachment, inputs, solver)
        exact_loss, exact = loss_and_states(model, attachment, inputs, Sequential())
    finally:
        model.train(training)
    error = float((states - exact).norm() / exact.norm().clamp_min(torch.finfo(exact.dtype).tiny))
    return Gap(error, loss - exact_loss)


@torch.no_grad()
def loss_and_states(
    model: Any, attachment: Attachment, inputs: Mapping[str, Any], solver: Solver
) -> tuple[float, torch.Tensor]:
    """The loss with a solver, and the states ``[B, 1, T, W]`` that it found, 0 where a token has none."""
    before = attachment.prefill
    attachment.prefill = solver
    try:
        output = model(**{**inputs, "use_cache": True})
    finally:
        attachment.prefill = before
    layer = next(layer for layer in output.past_key_values.layers if isinstance(layer, StateLayer))
    return float(output.loss), layer.keys * layer.values


class SolverGap(TrainerCallback, ExportableState):
    """Logs, every so many steps, how far the training solver is from the exact rollout, and warns when that grows.

    For a fixed solver both run on the last batch of the step. `Auto` measures by itself; its sweeps and its gap are logged,
    and its plans go into the Trainer's checkpoints, so that a resumed run goes on with them. The log lines get `solver_gap`
    (relative error of the states) and `solver_loss_gap` or `solver_sweeps`.
    """

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise ConfigError(f"the solver is compared every {every} steps; use 1 or more")
        self.every = every
        self.memory: dict[str, Any] = {}
        self.warned = WARNING_GAP / 2
        self.found: dict[str, float] = {}
        self.inputs: dict[str, Any] = {}
        self.hook: Any = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"args": {"every": self.every}, "attributes": {"memory": self.memory, "warned": self.warned}}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        attachment = find_attachment(model)
        kept = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})  # of the checkpoint resumed from
        self.warned = kept.get("warned", self.warned)
        self.memory = kept.get("memory", self.memory)
        if self.memory:
            attachment.memory = SolverMemory.from_mapping(self.memory)
        if not isinstance(attachment.solver, Auto):
            self.hook = model.register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            self.inputs = {key: value for key, value in kwargs.items() if key not in ("return_dict", "num_items_in_batch")}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        attachment = find_attachment(model)
        if isinstance(attachment.solver, Auto):
            self.memory = attachment.memory.to_mapping()
            plans = attachment.memory.plans
            if plans:
                plan = plans[max(plans)]
                self.found = {"solver_gap": plan.gap, "solver_sweeps": plan.sweeps or 0}  # 0: the rollout
        elif state.global_step % self.every == 0 and self.inputs:
            gap = measure_gap(model, self.inputs)
            self.found = {"solver_gap": gap.states, "solver_loss_gap": gap.loss}
            if gap.states >= 2 * self.warned:
                self.warned = gap.states
                logger.warning(
                    "step %d: the states that %s finds are %.0f %% off the exact rollout's and its loss differs by %+.4f; "
                    "generation is exact, so the model will do otherwise there than in training: take more sweeps, or Auto",
                    state.global_step,
                    attachment.solver,
                    100 * gap.states,
                    gap.loss,
                )
        self.inputs = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs and self.found:
            logs.update(self.found)  # for the callbacks after this one
            state.log_history[-1].update(self.found)
            self.found = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.hook is not None:
            self.hook.remove()
        self.inputs = {}
