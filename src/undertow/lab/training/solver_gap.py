"""How far the solver that a model is trained with is from the exact rollout: measured, logged, and
told in plain words."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from undertow.errors import ConfigError
from undertow.host.attachment import Attachment, find_attachment
from undertow.solvers import Plans, RecurrentBlock, Sequential, Solution, Solver

logger = logging.getLogger("undertow")

# States that are this far off are worth a warning, and again whenever they are twice as far off as
# at the last one.
WARNING_GAP = 0.05


@dataclass(frozen=True)
class Gap:
    """A solver against the exact rollout on one batch.

    Attributes:
        states: the relative error of the states that tokens receive, as `Auto` measures it.
        loss: its loss minus the exact one; None for a batch without labels.
    """

    states: float
    loss: float | None


def measure_gap(model: Any, inputs: Mapping[str, Any]) -> Gap:
    """Run the model's training solver and the exact rollout on a batch, without gradients and
    dropout.

    Args:
        model: a hosted model.
        inputs: what it is called with.

    Raises:
        ConfigError: the model has no recurrence.
    """
    attachment = find_attachment(model)
    solver, training = attachment.solver, model.training
    if solver.adapts:
        raise ConfigError(
            f"{type(solver).__name__} measures its own distance to the exact rollout; its plans "
            "tell it"
        )
    model.eval()
    try:
        loss, states = loss_and_states(model, attachment, inputs, solver)
        exact_loss, exact = loss_and_states(model, attachment, inputs, Sequential())
    finally:
        model.train(training)
    error = float((states - exact).norm() / exact.norm().clamp_min(torch.finfo(exact.dtype).tiny))
    return Gap(error, None if loss is None or exact_loss is None else loss - exact_loss)


@torch.no_grad()
def loss_and_states(
    model: Any, attachment: Attachment, inputs: Mapping[str, Any], solver: Solver
) -> tuple[float | None, torch.Tensor]:
    """The loss with a solver, if there are labels, and the states ``[B, T, W]`` that tokens receive
    for it.

    A cache holds states too, but those of one pass later; and with a cache packed documents would
    see each other.
    """
    before, report = attachment.prefill, attachment.report
    attachment.prefill = overheard = Overheard(solver, [])
    try:
        loss = model(**inputs).loss
    finally:
        attachment.prefill, attachment.report = before, report
    (received,) = overheard.received
    return None if loss is None else float(loss), received


@dataclass(frozen=True)
class Overheard(Solver):
    """A solver in one forward; what tokens received in the pass that gave the output is noted."""

    kind: ClassVar[str] = "overheard"

    solver: Solver
    received: list[torch.Tensor]

    def solve(self, block: RecurrentBlock) -> Solution:
        solution = self.solver.solve(block)
        self.received.append(solution.received_by(block))
        return solution


class SolverGap(TrainerCallback, ExportableState):
    """Logs, every so many steps, how far the training solver is from the exact rollout, and warns
    when that grows.

    For a fixed solver both run on the last batch of the step. `Auto` measures by itself; its sweeps
    and its gap are logged, and its plans go into the Trainer's checkpoints, so that a resumed run
    goes on with them. The log lines get `solver_gap` (relative error of the states that tokens
    receive), and `solver_sweeps` and `solver_products` or, if the model computes it,
    `solver_loss_gap`.
    """

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise ConfigError(f"the solver is compared every {every} steps; use 1 or more")
        self.every = every
        self.plans: dict[str, Any] = {}
        self.warned = WARNING_GAP / 2
        self.found: dict[str, float] = {}
        self.inputs: dict[str, Any] = {}
        self.hook: Any = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "args": {"every": self.every},
            "attributes": {"memory": self.plans, "warned": self.warned},
        }

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        attachment = find_attachment(model)
        self.let_go()  # of an interrupted training
        state.stateful_callbacks.setdefault(
            type(self).__name__, self.state()
        )  # the Trainer misses it in other checkpoints
        kept = state.stateful_callbacks[type(self).__name__][
            "attributes"
        ]  # of the checkpoint resumed from
        self.warned = kept["warned"]
        self.plans = kept["memory"]  # the name that checkpoints have always had
        if self.plans:
            attachment.plans = Plans.from_mapping(self.plans)
        if not attachment.solver.adapts:
            self.hook = model.register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            self.inputs = {
                key: value
                for key, value in kwargs.items()
                if key not in ("return_dict", "num_items_in_batch")
            }

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        attachment = find_attachment(model)
        if attachment.solver.adapts:
            self.plans = attachment.plans.to_mapping()
            plans = attachment.plans.by_length
            if plans:
                plan = plans[max(plans)]
                self.found = {
                    "solver_gap": plan.gap,
                    "solver_sweeps": plan.sweeps or 0,
                }  # 0: the rollout
                if plan.products is not None:
                    self.found["solver_products"] = plan.products
        elif state.global_step % self.every == 0 and self.inputs:
            gap = measure_gap(model, self.inputs)
            self.found = {"solver_gap": gap.states}
            by = ""
            if gap.loss is not None:
                self.found["solver_loss_gap"] = gap.loss
                by = f" and its loss differs by {gap.loss:+.4f}"
            if gap.states >= 2 * self.warned:
                self.warned = gap.states
                logger.warning(
                    "step %d: the states that %s finds are %.0f %% off the exact rollout's%s; "
                    "generation is exact, so the model will do otherwise there than in training: "
                    "take more sweeps, or Auto",
                    state.global_step,
                    attachment.solver,
                    100 * gap.states,
                    by,
                )
        self.inputs = {}

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is not None and "loss" in logs and self.found:
            logs.update(self.found)  # for the callbacks after this one
            state.log_history[-1].update(self.found)
            self.found = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.let_go()

    def let_go(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        self.hook, self.inputs = None, {}
