"""Run a recipe: train with transformers.Trainer, log, save and resume."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from undertow.config import load_config, save_yaml, to_mapping
from undertow.errors import CheckpointError, ConfigError
from undertow.files import replacing_folder, write_text
from undertow.host.attach import recurs_in_time
from undertow.paths import takes_paths
from undertow.pathways import TurboConn
from undertow.solvers import Sequential
from undertow.tasks import PadCollator, Split, TaskDataset, Text
from undertow.training.build import build, context_of, quiet_libraries
from undertow.training.data import check_documents, most_tokens, training_set
from undertow.training.depth import DepthTraining
from undertow.training.gates import FastGates, GateLog
from undertow.training.log import Progress, RunLog
from undertow.training.recipe import Recipe, TrainingSection
from undertow.training.schedule import cosine_restarts
from undertow.training.solver_gap import SolverGap

RECIPE, VERSIONS, LOG, MODEL = "recipe.yaml", "versions.json", "log.jsonl", "model"
# Its name up to transformers 5.23 was gradient_checkpointing.
CHECKPOINTING = next(
    f.name for f in fields(TrainingArguments) if f.name in ("activation_checkpointing", "gradient_checkpointing")
)
PACKAGES = ("undertow", "torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "numpy")


def run_folder(recipe: Recipe, seed: int) -> Path:
    return Path(recipe.output) / recipe.name / f"seed-{seed}"


def train(recipe: Recipe, seed: int, description: str | None = None) -> Path:
    """Train a recipe with one seed and return the run's folder.

    The folder holds the resolved recipe, versions, the log, checkpoints to resume from and, at the end, the model. A run
    that was interrupted goes on from its last complete checkpoint; one that is finished is left as it is.

    Raises:
        UndertowError: the recipe asks for what cannot be done.
    """
    quiet_libraries()
    check_devices()
    check_precision(recipe.training.precision)
    folder = run_folder(recipe, seed)
    check_folder(folder, recipe)
    if (folder / MODEL).is_dir():
        save_yaml(recipe, folder / RECIPE)  # its evaluation may be another now
        return folder
    section = recipe.training
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    built, tokenizer = build(recipe, seed)
    context = context_of(built)
    dataset, skipped = training_set(recipe.task, tokenizer, section, seed, context)
    a_step = section.batch * section.accumulate
    held_out = held_out_set(recipe, tokenizer, context)
    if isinstance(recipe.task, Text) and recipe.task.has_documents(tokenizer):
        check_documents(built)
    checkpoint = last_checkpoint(folder)

    save_yaml(recipe, folder / RECIPE)
    write_text(folder / VERSIONS, json.dumps(versions(), indent=2) + "\n")
    log = RunLog(folder / LOG, resume_step=step_of(checkpoint))
    log.write(
        event="start",
        seed=seed,
        parameters=sum(p.numel() for p in built.parameters()),
        trainable_parameters=sum(p.numel() for p in built.parameters() if p.requires_grad),
        examples_left_out=skipped + held_out.skipped,
        threads=torch.get_num_threads(),
    )
    sets: Any = {"training": dataset.dataset, "held-out": held_out}
    for text in remarks(recipe, sets, tokenizer):
        print(f"undertow: {text}", file=sys.stderr)
        log.write(event="remark", text=text)
    progress = Progress(description or f"{recipe.name} seed {seed}")
    recurrent = recurs_in_time(built)
    watches = recurrent and not isinstance(recipe.solver, Sequential)
    trainer = RecipeTrainer(
        section,
        model=built,
        args=arguments(recipe, folder, seed, evaluates=len(held_out) > 0, steps=len(dataset) // a_step),
        train_dataset=dataset,
        eval_dataset=held_out if len(held_out) else None,
        data_collator=PadCollator(tokenizer),
        callbacks=[*([SolverGap(section.compare_every)] if watches else []), GateLog(), log, progress],
    )
    trainer.depth, trainer.depth_seed = recipe.depth, seed
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        progress.close()
    if len(held_out) and not evaluated(trainer.state):
        trainer.evaluate()
    log.write(event="end", **trainer.lengths(recipe))

    model: Any = trainer.model
    if recipe.lora is not None and recipe.lora.save == "merged":
        model = model.merge_and_unload()
    model.config.use_cache = True
    with replacing_folder(folder / MODEL) as saving:  # a folder called model is a finished run
        tokenizer.save_pretrained(saving)
        model.save_pretrained(saving)
    for old in folder.glob("checkpoint-*"):
        shutil.rmtree(old)
    return folder


def evaluated(state: TrainerState) -> bool:
    """Whether the held-out examples have been evaluated after the last step already, as one of `evaluate_every`."""
    last = (entry for entry in state.log_history if entry["step"] == state.global_step)
    return any(name.startswith("eval_") for entry in last for name in entry)


def remarks(recipe: Recipe, sets: dict[str, TaskDataset], tokenizer: Any) -> list[str]:
    """What is to be known of a training before it starts: what was left out, and settings that a paper advises against."""
    found = [
        f"{examples.skipped:,} of {len(examples) + examples.skipped:,} {name} examples are left out: "
        f"they have more than training.max_tokens, {recipe.training.max_tokens}"
        for name, examples in sets.items()
        if examples.skipped
    ]
    splits: tuple[Split, ...] = ("train", "valid")
    for split in splits:
        for reason, count in recipe.task.left_out(split, tokenizer).items():
            found.append(f"{count:,} rows of the {split} split are left out: {reason}")
    if isinstance(recipe.recurrence, TurboConn):
        advice = recipe.recurrence.advice(recipe.model.path is not None, recipe.training.learning_rate)
        found += [] if advice is None else [advice]
    return found


class RecipeTrainer(FastGates, DepthTraining, Trainer):
    """A Trainer that takes the examples in the order that `training_set` chose; its gates learn at their own rate."""

    def __init__(self, section: TrainingSection, **settings: Any) -> None:
        super().__init__(**settings)
        self.section, self.gate_multiplier = section, section.gate_multiplier
        self.padded: list[int] = []

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # With a cache, transformers does not tell packed documents apart.
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.padded.append(inputs["input_ids"].shape[1])
        return super().training_step(model, inputs, *args, **kwargs)

    def lengths(self, recipe: Recipe) -> dict[str, float]:
        """The mean number of tokens of a batch, padding included, and of groups that an exact rollout of it goes through."""
        if not self.padded:
            return {}
        lag = 1 if recipe.recurrence is None else getattr(recipe.recurrence, "lag", 1)
        groups = [1 if recipe.recurrence is None else -(-tokens // lag) for tokens in self.padded]
        return {"tokens": statistics.mean(self.padded), "groups": statistics.mean(groups)}

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.section.schedule != "cosine_restarts" or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        shape = functools.partial(cosine_restarts, warmup=self.section.warmup_steps, period=self.section.restart_every)
        scheduled: Any = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, shape)
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError for a full disk
            raise CheckpointError(
                f"could not write a checkpoint in {self.args.output_dir}: {error}; "
                "when that is mended, the same run goes on from the checkpoint before"
            ) from error


def arguments(
    recipe: Recipe, folder: Path, seed: int, evaluates: bool = True, steps: int | None = None
) -> TrainingArguments:
    section = recipe.training
    checkpointing: dict[str, Any] = {CHECKPOINTING: section.activation_checkpointing}
    steps = section.steps if steps is None else steps
    restarts = section.schedule == "cosine_restarts"  # which the Trainer does not know
    schedule = "constant_with_warmup" if restarts else "cosine_with_min_lr" if section.floor else section.schedule
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=section.batch,
        per_device_eval_batch_size=section.batch,
        gradient_accumulation_steps=section.accumulate,
        learning_rate=section.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs={"min_lr_rate": section.floor} if section.floor else None,
        warmup_steps=section.warmup_steps,
        weight_decay=section.weight_decay,
        adam_beta2=section.beta2,
        max_grad_norm=section.clip,
        bf16=section.precision == "bf16",
        tf32=section.precision == "tf32",  # for the whole process, so an earlier run's is taken back
        **checkpointing,
        logging_steps=section.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # the log shall say what was
        eval_strategy="steps" if evaluates and section.evaluate_every is not None else "no",
        eval_steps=section.evaluate_every,
        save_strategy="no" if section.save_every is None else "steps",
        save_steps=section.save_every or steps,
        save_total_limit=2,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
    )


def held_out_set(recipe: Recipe, tokenizer: Any, context: int | None = None) -> TaskDataset:
    """The first examples of the valid split.

    Raises:
        DataError: it has none, which is better known before the training than after it.
    """
    size = recipe.task.size("valid", tokenizer)
    count = recipe.training.evaluate_examples if size is None else min(recipe.training.evaluate_examples, size)
    overlong: Literal["error", "skip"] = "error" if recipe.training.max_tokens is None else "skip"
    limit = most_tokens(recipe.training, context)
    examples = TaskDataset(recipe.task, "valid", tokenizer, count, max_tokens=limit, overlong=overlong)
    if len(examples):
        examples[0]
    if overlong == "error" and size is not None and not isinstance(recipe.task, Text):
        examples.check_lengths()
    return examples


def check_devices() -> None:
    """Refuse what would split each batch over devices and so show the same examples several times.

    Raises:
        ConfigError: there are several processes, or several GPUs in sight.
    """
    processes, devices = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count()
    if processes > 1:
        raise ConfigError(
            f"undertow train uses one process, but is one of {processes}; start it alone, or train the model with "
            "transformers.Trainer, which takes any number"
        )
    if devices > 1:
        raise ConfigError(f"undertow train uses one GPU, but sees {devices}; set CUDA_VISIBLE_DEVICES to one of them")


def check_precision(precision: str) -> None:
    """Refuse arithmetic that the machine does not have.

    Raises:
        ConfigError: it has no such GPU. CPUs have bf16, if slowly.
    """
    cuda = torch.cuda.is_available()
    if precision == "tf32" and not (cuda and torch.cuda.get_device_capability() >= (8, 0)):
        raise ConfigError("training.precision is tf32, which takes a GPU since Ampere, and there is none; use fp32")
    if precision == "bf16" and cuda and not torch.cuda.is_bf16_supported():
        raise ConfigError(f"training.precision is bf16, which {torch.cuda.get_device_name()} does not have; use fp32")


def check_folder(folder: Path, recipe: Recipe) -> None:
    """Refuse to go on in the folder of another experiment, or beside seeds of another.

    Raises:
        CheckpointError: the recipe that the folder, or another seed's beside it, was made with differs in what it trains.
    """
    now = trained_part(recipe)
    for made in sorted(folder.parent.glob(f"seed-*/{RECIPE}")):
        before = trained_part(load_config(Recipe, made))
        for key in now | before:
            if before.get(key) != now.get(key):
                raise CheckpointError(
                    f"{made.parent} was made by another recipe, whose {key} is {before.get(key)} and not {now.get(key)}; "
                    "choose another name or remove the folder"
                )


def trained_part(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides the weights, by dotted key."""
    sections = to_mapping(recipe)
    kept: dict[str, Any] = {}
    solved = recipe.recurrence is not None or recipe.model.path is not None  # which may have one
    for name in ("task", "model", "recurrence", "depth", *(["solver"] if solved else []), "lora", "training"):
        section = sections[name]
        if isinstance(section, dict):
            kept |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            kept[name] = section
    for key in ("log_every", "save_every", "evaluate_every", "compare_every", "threads"):
        kept.pop(f"training.{key}", None)
    return kept


@takes_paths
def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run. One that was cut short lacks the state that the Trainer writes last."""
    complete = []
    for path in folder.glob("checkpoint-*"):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            shutil.rmtree(path)
            continue
        complete.append(path)
    return max(complete, key=step_of, default=None)


def step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])


def versions() -> dict[str, Any]:
    """Versions of what the run is made with, the commit of a checkout, and the command."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    found: dict[str, Any] = {"command": command, "python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        found["commit"] = done.stdout.strip() or None
    return found


@takes_paths
def load_recipe(path: Path, overrides: list[str]) -> Recipe:
    """Read a recipe from YAML with `--section.key=value` overrides applied.

    Raises:
        ConfigError: a key is unknown, or a value does not fit.
    """
    return load_config(Recipe, path, overrides)
