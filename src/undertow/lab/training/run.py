"""Run a recipe: train with transformers.Trainer, log, save and resume."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from undertow.config import save_yaml
from undertow.errors import ConfigError, DivergedError, Interrupted
from undertow.files import replacing_folder, sync, write_text
from undertow.host.attachment import recurs_in_time
from undertow.lab.runs.checkpoints import checkpoints, choose, infinite, remove, step_of
from undertow.lab.runs.folder import (
    LOG,
    MODEL,
    RECIPE,
    VERSIONS,
    check_folder,
    clean,
    made_by,
    run_folder,
    trained_part,
    versions,
)
from undertow.lab.runs.loading import context_of, quiet_libraries
from undertow.lab.runs.lock import locked
from undertow.lab.runs.recipe import Recipe, TrainingSection
from undertow.lab.tasks import PadCollator, Split, TaskDataset, Text
from undertow.lab.training.build import build
from undertow.lab.training.data import check_documents, most_tokens, training_set
from undertow.lab.training.gates import GateLog
from undertow.lab.training.guard import Guard
from undertow.lab.training.interrupts import Interrupts, TimedSaves, how_to_go_on
from undertow.lab.training.log import Progress, RunLog
from undertow.lab.training.solver_gap import SolverGap
from undertow.lab.training.trainer import RecipeTrainer, arguments
from undertow.manifest import write_manifest
from undertow.solvers import Sequential

# In so few steps one without a rate is worth a remark.
FEW_STEPS = 10


def train(recipe: Recipe, seed: int, description: str | None = None) -> Path:
    """Train a recipe with one seed and return the run's folder.

    The folder holds the resolved recipe, versions, the log, checkpoints to resume from and, at the
    end, the model. A run that was interrupted goes on from its newest checkpoint that proves
    itself; one that is finished is left as it is. The first SIGINT or SIGTERM saves one after the
    step under way; a training that diverged goes on with a lower rate.

    Raises:
        UndertowError: the recipe asks for what cannot be done.
        DivergedError: a loss, a gradient or a weight is no number any more. Nothing of it is saved.
        InUseError: another process trains or evaluates there.
        Interrupted: a signal stopped it; it says what is kept.
    """
    quiet_libraries()
    check_devices()
    check_precision(recipe.training.precision)
    folder = run_folder(recipe, seed)
    check_folder(folder, recipe)  # before anything is made there
    with locked(folder):
        try:
            changed = check_folder(folder, recipe)
            clean(folder)
            if (folder / MODEL).is_dir():
                keep_finished(folder, recipe, changed)
            else:
                train_on(folder, recipe, seed, changed, description)
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            kept = how_to_go_on(
                folder, (folder / MODEL).is_dir(), recipe.training.save_every is not None
            )
            raise Interrupted(number, kept) from error
    return folder


def keep_finished(folder: Path, recipe: Recipe, changed: dict[str, Any]) -> None:
    """Write down how a finished run is evaluated now. What it was trained by stays, if another
    seed's remedy differs."""
    if changed:
        for key, before in changed.items():
            tell(f"{folder} is finished, with {key} {before}, and is left as it is")
        recipe = dataclasses.replace(made_by(folder / RECIPE), evaluation=recipe.evaluation)
    save_yaml(recipe, folder / RECIPE)


def train_on(
    folder: Path, recipe: Recipe, seed: int, changed: dict[str, Any], description: str | None
) -> None:
    """Train from the newest checkpoint, or from the start, to the end; `changed` is what was
    another before a divergence."""
    section = recipe.training
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    built, tokenizer = build(recipe, seed)
    context = context_of(built)
    dataset, skipped = training_set(recipe.task, tokenizer, section, seed, context)
    a_step = section.batch * section.accumulate
    steps = len(dataset) // a_step
    held_out = held_out_set(recipe, tokenizer, context)
    if isinstance(recipe.task, Text) and recipe.task.has_documents(tokenizer):
        check_documents(built)
    checkpoint, said = choose(folder)

    log = RunLog(folder / LOG, resume_step=step_of(checkpoint))
    save_yaml(recipe, folder / RECIPE)
    write_text(folder / VERSIONS, json.dumps(versions(), indent=2) + "\n")
    log.write(
        event="start",
        seed=seed,
        parameters=sum(p.numel() for p in built.parameters()),
        trainable_parameters=sum(p.numel() for p in built.parameters() if p.requires_grad),
        examples_left_out=skipped + held_out.skipped,
        threads=torch.get_num_threads(),
    )
    if log.lacks_start:
        said.append(f"{folder / LOG} was lost, and begins after step {step_of(checkpoint)}")
    if changed:
        goes_on = "anew" if checkpoint is None else f"on from {checkpoint.name}"
        now = {key: trained_part(recipe).get(key) for key in changed}
        log.write(
            event="mended",
            before=changed,
            now=now,
            checkpoint=None if checkpoint is None else checkpoint.name,
        )
        listed = ", ".join(
            f"{key} {now[key]} in place of {before}" for key, before in changed.items()
        )
        said.append(f"the training had diverged, and goes {goes_on} with {listed}")
    sets: Any = {"training": dataset.dataset, "held-out": held_out}
    for text in [*said, *remarks(recipe, sets, tokenizer), *warmup_remarks(section, steps)]:
        tell(text)
        log.write(event="remark", text=text)
    progress = Progress(description or f"{recipe.name} seed {seed}")
    watches = recurs_in_time(built) and not isinstance(recipe.solver, Sequential)
    guard, interrupts = Guard(), Interrupts()
    trainer = RecipeTrainer(
        section,
        model=built,
        args=arguments(recipe, folder, seed, evaluates=len(held_out) > 0, steps=steps),
        train_dataset=dataset,
        eval_dataset=held_out if len(held_out) else None,
        data_collator=PadCollator(tokenizer),
        callbacks=[
            guard,
            *([SolverGap(section.compare_every)] if watches else []),
            GateLog(),
            log,
            progress,
            *([TimedSaves()] if section.save_every == "auto" else []),
            interrupts,
        ],
    )
    trainer.depth, trainer.depth_seed = recipe.depth, seed
    guard.trainer = interrupts.trainer = trainer
    if checkpoint is not None:
        trainer.proven = [step_of(checkpoint)]
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    with interrupts.hearing():
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            trainer.settle()
            interrupts.stop()
            if len(held_out) and not (
                evaluated(trainer.state) or log.has_evaluation(trainer.state.global_step)
            ):
                interrupts.closing = True
                trainer.evaluate()
            trainer.check_finite()
        except DivergedError as error:
            raise diverged_at(error, trainer, log, hasattr(recipe.recurrence, "alpha")) from error
        finally:
            progress.close()
        log.write(event="end", **trainer.lengths(recipe))
        save_model(trainer, tokenizer, recipe, folder)
        if interrupts.number is not None:
            raise Interrupted(interrupts.number)


def save_model(trainer: RecipeTrainer, tokenizer: Any, recipe: Recipe, folder: Path) -> None:
    """Save what was trained, and remove the checkpoints when it is on the disk."""
    model: Any = trainer.model
    if recipe.lora is not None and recipe.lora.save == "merged":
        model = model.merge_and_unload()
    model.config.use_cache = True
    with replacing_folder(folder / MODEL) as saving:  # a folder called model is a finished run
        tokenizer.save_pretrained(saving)
        model.save_pretrained(saving)
        write_manifest(saving)
    sync(folder)
    for old in checkpoints(folder):
        remove(old)


def diverged_at(
    error: DivergedError, trainer: RecipeTrainer, log: RunLog, has_alpha: bool
) -> DivergedError:
    """What is said of a training that diverged, and written to its log: the step, its examples, and
    how to go on."""
    step = error.step or 0
    a_step = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    dataset: Any = trainer.train_dataset
    order = dataset.indices[(step - 1) * a_step : step * a_step] if step else []
    indices = [dataset.dataset.indices[position] for position in order]
    good = f"checkpoint-{trainer.proven[-1]}" if trainer.proven else None
    log.write(
        event="diverged",
        step=step or trainer.state.global_step,
        reason=str(error),
        examples=indices,
        checkpoint=good,
    )
    shown = ", ".join(map(str, indices[:8])) + (
        f" and {len(indices) - 8} others" if len(indices) > 8 else ""
    )
    where = f"; the step's examples are {shown} of the train split" if indices else ""
    model: Any = trainer.model
    weight = next(infinite(model.named_parameters()), None)
    broken = "" if weight is None else f"; the weight {weight} was no number before it"
    clip = "lower training.clip" if trainer.section.clip else "set training.clip, which is 0"
    alpha = ", or lower the recurrence's alpha" if has_alpha else ""
    mend = f"lower training.learning_rate, which is {trainer.args.learning_rate}, or {clip}{alpha}"
    on = (
        f"goes on from the last good checkpoint, {log.path.parent / good}; remove that if it is "
        "spoilt already"
        if good
        else "starts anew, as there is no checkpoint yet"
    )
    return DivergedError(f"{error}; {mend}: the same command then {on}{where}{broken}")


def tell(text: str) -> None:
    print(f"undertow: {text}", file=sys.stderr)


def evaluated(state: TrainerState) -> bool:
    """Whether the held-out examples have been evaluated after the last step already, as one of
    `evaluate_every`."""
    last = (entry for entry in state.log_history if entry["step"] == state.global_step)
    return any(name.startswith("eval_") for entry in last for name in entry)


def remarks(recipe: Recipe, sets: dict[str, TaskDataset], tokenizer: Any) -> list[str]:
    """What is to be known of a training before it starts: what was left out, and settings that a
    paper advises against."""
    found = [
        f"{examples.skipped:,} of {len(examples) + examples.skipped:,} {name} examples are left "
        f"out: they have more than training.max_tokens, {recipe.training.max_tokens}"
        for name, examples in sets.items()
        if examples.skipped
    ]
    splits: tuple[Split, ...] = ("train", "valid")
    for split in splits:
        for reason, count in recipe.task.left_out(split, tokenizer).items():
            found.append(f"{count:,} rows of the {split} split are left out: {reason}")
    if recipe.recurrence is not None:
        advice = recipe.recurrence.advice(
            recipe.model.path is not None, recipe.training.learning_rate
        )
        found += [] if advice is None else [advice]
    return found


def warmup_remarks(section: TrainingSection, steps: int) -> list[str]:
    """What a warm-up leaves of a short training."""
    if section.warmup_steps >= steps:
        return [
            f"training.warmup_steps is {section.warmup_steps}, but there are {steps} steps: the "
            f"rate never gets to {section.learning_rate:g}, and is 0 in the first step; take a "
            "shorter warm-up"
        ]
    if section.warmup_steps and steps <= FEW_STEPS:
        return [
            f"the first of the {steps} steps has learning rate 0, as the warm-up begins there; "
            "warmup_steps: 0 has none"
        ]
    return []


def held_out_set(recipe: Recipe, tokenizer: Any, context: int | None = None) -> TaskDataset:
    """The first examples of the valid split.

    Raises:
        DataError: it has none, which is better known before the training than after it.
    """
    size = recipe.task.size("valid", tokenizer)
    count = (
        recipe.training.evaluate_examples
        if size is None
        else min(recipe.training.evaluate_examples, size)
    )
    overlong: Literal["error", "skip"] = "error" if recipe.training.max_tokens is None else "skip"
    limit = most_tokens(recipe.training, context)
    examples = TaskDataset(
        recipe.task, "valid", tokenizer, count, max_tokens=limit, overlong=overlong
    )
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
            f"undertow train uses one process, but is one of {processes}; start it alone, or train "
            "the model with transformers.Trainer, which takes any number"
        )
    if devices > 1:
        raise ConfigError(
            f"undertow train uses one GPU, but sees {devices}; set CUDA_VISIBLE_DEVICES to one of "
            "them"
        )


def check_precision(precision: str) -> None:
    """Refuse arithmetic that the machine does not have.

    Raises:
        ConfigError: it has no such GPU. CPUs have bf16, if slowly.
    """
    cuda = torch.cuda.is_available()
    if precision == "tf32" and not (cuda and torch.cuda.get_device_capability() >= (8, 0)):
        raise ConfigError(
            "training.precision is tf32, which takes a GPU since Ampere, and there is none; use "
            "fp32"
        )
    if precision == "bf16" and cuda and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"training.precision is bf16, which {torch.cuda.get_device_name()} does not have; use "
            "fp32"
        )
