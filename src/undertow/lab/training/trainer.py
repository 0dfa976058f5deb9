"""The Trainer that a recipe is trained with, and its arguments."""

from __future__ import annotations

import functools
import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from undertow.lab.processes import world
from undertow.lab.runs.recipe import Recipe, TrainingSection
from undertow.lab.tasks.dataset import real_tokens
from undertow.lab.training.checkpoints import ProvenCheckpoints
from undertow.lab.training.depth import DepthTraining
from undertow.lab.training.gates import FastGates
from undertow.lab.training.guard import GuardedSteps
from undertow.lab.training.schedule import cosine_restarts

# Its name up to transformers 5.23 was gradient_checkpointing.
CHECKPOINTING = next(
    f.name
    for f in fields(TrainingArguments)
    if f.name in ("activation_checkpointing", "gradient_checkpointing")
)


class RecipeTrainer(FastGates, DepthTraining, GuardedSteps, ProvenCheckpoints, Trainer):
    """A Trainer that takes the examples in the order that `training_set` chose; its gates learn at
    their own rate."""

    def __init__(self, section: TrainingSection, **settings: Any) -> None:
        super().__init__(**settings)
        self.section, self.gate_multiplier = section, section.gate_multiplier
        self.padded: list[int] = []
        self.tokens: list[torch.Tensor] = []
        self.rows = 0
        self.check_start()

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model.training:
            self.padded.append(inputs["input_ids"].shape[1])
            self.tokens.append(real_tokens(inputs).sum())  # read when it is logged
            self.rows += len(inputs["input_ids"])
        # With a cache, transformers does not tell packed documents apart.
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def taken(self) -> list[int]:
        """How many tokens, padding not counted, and rows were trained on since this was asked."""
        found = [int(sum(self.tokens)), self.rows]
        self.tokens, self.rows = [], 0
        return found

    def lengths(self, recipe: Recipe) -> dict[str, float]:
        """The mean number of tokens of a batch, padding included, and of groups that an exact
        rollout of it goes through."""
        if not self.padded:
            return {}
        lag = 1 if recipe.recurrence is None else getattr(recipe.recurrence, "lag", 1)
        groups = [1 if recipe.recurrence is None else -(-tokens // lag) for tokens in self.padded]
        return {"tokens": statistics.mean(self.padded), "groups": statistics.mean(groups)}

    def examples_of(self, step: int) -> list[int]:
        """The numbers of the examples, in their split, that a step takes, counted from 1."""
        count = self.section.batch * self.section.accumulate
        order: Any = self.train_dataset
        positions = order.indices[(step - 1) * count : step * count]
        return [order.dataset.indices[position] for position in positions]

    def whole_weights(self) -> dict[str, Any]:
        """What `save_pretrained` needs besides, where each process holds a part of the weights:
        every process takes part, and the first one gets them all."""
        if self.section.sharding == "none":
            return {}
        return {"state_dict": self.accelerator.get_state_dict(self.model_wrapped)}

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.section.schedule != "cosine_restarts" or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        shape = functools.partial(
            cosine_restarts, warmup=self.section.warmup_steps, period=self.section.restart_every
        )
        scheduled: Any = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, shape)
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)


def sharding(recipe: Recipe) -> dict[str, Any]:
    """The Trainer's settings of FSDP2: a layer a group, and sharded checkpoints, which any number
    of processes can read."""
    if recipe.training.sharding == "none":
        return {}
    return {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    }


def arguments(
    recipe: Recipe, folder: Path, seed: int, evaluates: bool = True, steps: int | None = None
) -> TrainingArguments:
    section = recipe.training
    checkpointing: dict[str, Any] = {CHECKPOINTING: section.activation_checkpointing}
    steps = section.steps if steps is None else steps
    restarts = section.schedule == "cosine_restarts"  # which the Trainer does not know
    schedule = (
        "constant_with_warmup"
        if restarts
        else "cosine_with_min_lr"
        if section.floor
        else section.schedule
    )
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=section.batch // world(),
        per_device_eval_batch_size=section.batch // world(),
        gradient_accumulation_steps=section.accumulate,
        learning_rate=section.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs={"min_lr_rate": section.floor} if section.floor else None,
        warmup_steps=section.warmup_steps,
        weight_decay=section.weight_decay,
        adam_beta2=section.beta2,
        max_grad_norm=section.clip,
        bf16=section.precision == "bf16",
        tf32=section.precision
        == "tf32",  # for the whole process, so an earlier run's is taken back
        **checkpointing,
        logging_steps=section.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # the log shall say what was
        eval_strategy="steps" if evaluates and section.evaluate_every is not None else "no",
        eval_steps=section.evaluate_every,
        save_strategy="steps" if isinstance(section.save_every, int) else "no",
        save_steps=section.save_every if isinstance(section.save_every, int) else steps,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,  # every parameter has a gradient, see `distributed`
        **sharding(recipe),
        report_to="none",  # see `tracking`: its callbacks come after those that add to the log
        run_name=f"{recipe.name}-seed-{seed}",
    )
