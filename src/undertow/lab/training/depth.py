"""Training with recurrence in depth: the recipe's section, native models from scratch, and what a
Trainer does besides."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from undertow.depth.handle import depth_handle
from undertow.depth.initial import mix, row_seeds
from undertow.depth.monitors import StateMonitor
from undertow.depth.objectives import expected_loss, gate_loss
from undertow.errors import ConfigError
from undertow.host.attachment import recurs_in_time
from undertow.lab.processes import rank, world
from undertow.lab.runs.depth import DepthSection
from undertow.lab.tasks.tokenizer import ids_of
from undertow.models import HuginnConfig, HuginnForCausalLM


def native_model(
    section: DepthSection, model: Any, tokenizer: PreTrainedTokenizerBase
) -> HuginnForCausalLM:
    """A native model of the section's shape and of the widths in the recipe's model section."""
    assert section.shape is not None
    prelude, core, coda = section.shape
    return HuginnForCausalLM(
        HuginnConfig(
            n_embd=model.width,
            n_heads=model.heads,
            n_layers_in_prelude=prelude,
            n_layers_in_recurrent_block=core,
            n_layers_in_coda=coda,
            intermediate_size=model.feed_forward or -(-8 * model.width // 24) * 8,
            vocab_size=ids_of(tokenizer),
            block_size=model.positions,
            mean_recurrence=section.mean,
            mean_backprop_depth=section.schedule.backward,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


class DepthTraining:
    """What a `Trainer` does for a model with recurrence in depth; mixed in before it. Without a
    section it does nothing.

    Each micro-batch's depth and initial states are functions of the recipe's seed and of the
    micro-batch's number, so that ranks agree and a resumed run goes on as it would have. The log
    gets the monitors of collapse, and every evaluation the loss at several depths.
    """

    depth: DepthSection | None = None
    depth_seed: int = 0
    _measured_depth: int | None = None
    _step, _part = -1, 0

    @cached_property
    def _monitored(self) -> bool:
        """Whether each iteration runs once and on all tokens, which a recurrence in time does not
        let it do."""
        trainer: Any = self
        return not recurs_in_time(trainer.model)

    def _micro_step(self) -> int:
        trainer: Any = self
        if self._step != trainer.state.global_step:
            self._step, self._part = trainer.state.global_step, 0
        number = self._step * trainer.args.gradient_accumulation_steps + self._part
        self._part += 1
        return int(number)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        section = self.depth
        if section is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        inputs = {**inputs, "use_cache": False}
        if model.training:
            step = self._micro_step()
            inputs["depth"] = section.draw(step, self.depth_seed)
            rows = len(inputs["input_ids"])  # of this process, whose rows are some of the batch's
            seeds = row_seeds(mix(self.depth_seed, step), rows * world())
            inputs["state_seed"] = seeds[rows * rank() : rows * (rank() + 1)]
            if self._monitored:
                self._monitor, self._real = StateMonitor(), inputs.get("attention_mask")
                inputs["watch"] = self._monitor
        else:
            inputs["depth"] = self._measured_depth or section.mean
        if section.objective != "last" and model.training:
            return gated_loss(model, inputs, section) * self._share(
                inputs["labels"], num_items_in_batch
            )
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]

    def _share(self, labels: torch.Tensor, whole: torch.Tensor | int | None) -> Any:
        """A micro-batch's share of the tokens of its step: given their number, the Trainer adds
        losses up as they are."""
        trainer: Any = self
        if whole is None:
            return 1.0
        ranks = (
            trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
        )
        return (labels[:, 1:] != -100).sum() * ranks / whole

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        metrics = super().evaluate(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
        if self.depth is not None:
            for depth in self.depth.measured:
                name = f"{metric_key_prefix}_depth_{depth}"
                if depth == self.depth.mean:  # what has just been measured
                    known = {f"{name}_loss": metrics[f"{metric_key_prefix}_loss"]}
                    self.log(known)
                    metrics |= known
                    continue
                self._measured_depth = depth
                try:
                    metrics |= super().evaluate(*args, metric_key_prefix=name, **kwargs)  # type: ignore[misc]
                finally:
                    self._measured_depth = None
        return metrics

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        monitor: StateMonitor | None = getattr(self, "_monitor", None)
        if self.depth is not None and monitor is not None and "loss" in logs:
            logs = logs | monitor.measures(self._real)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def gated_loss(model: Any, inputs: dict[str, Any], section: DepthSection) -> torch.Tensor:
    """The objective of a model with an exit gate, from its loss after every iteration (see
    `depth.objectives`)."""
    handle = depth_handle(model)
    if not handle.settings.gate or handle.settings.coda:
        raise ConfigError(
            f"objective {section.objective} needs a loop with a gate and without a coda, as "
            "Looped.whole has"
        )
    states: list[torch.Tensor] = []
    watch: Callable[..., None] = inputs["watch"]

    def collect(index: int, before: torch.Tensor, after: torch.Tensor) -> None:
        states.append(after)
        watch(index, before, after)

    labels = inputs["labels"]
    steps = inputs["depth"]
    # The gate weighs every iteration, so every one of them carries gradient.
    model(**{**inputs, "labels": None, "depth": (0, steps.total), "watch": collect})
    counted = labels[:, 1:] != -100
    losses, gates = [], []
    for state in states:
        logits = handle.logits(state)[:, :-1]
        losses.append(
            F.cross_entropy(logits[counted].float(), labels[:, 1:][counted], reduction="none")
        )
        seen = state.detach() if section.objective == "gate" else state
        gates.append(handle.gate(seen)[:, :-1][counted])
    if section.objective == "gate":
        return gate_loss(torch.stack(losses), torch.stack(gates))
    return expected_loss(torch.stack(losses), torch.stack(gates), section.entropy)
