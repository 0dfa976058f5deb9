"""Run a recipe: train with transformers.Trainer, log, save and resume."""

from __future__ import annotations

import dataclasses
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from undertow.errors import DivergedError, Interrupted
from undertow.files import replacing_folder, sync
from undertow.host.attachment import recurs_in_time
from undertow.host.compiling import compile_layers
from undertow.lab.processes import check_same, first, joined, of_first, wait, world
from undertow.lab.runs.checkpoints import checkpoints, choose, infinite, remove, step_of
from undertow.lab.runs.loading import context_of, quiet_libraries
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.run import Run, trained_part
from undertow.lab.tasks import PadCollator
from undertow.lab.training.build import build
from undertow.lab.training.data import check_documents, held_out_set, training_set
from undertow.lab.training.gates import GateLog
from undertow.lab.training.guard import Guard
from undertow.lab.training.interrupts import Interrupts, TimedSaves, how_to_go_on
from undertow.lab.training.log import NoLog, Progress, RunLog, tell
from undertow.lab.training.machine import check_machine
from undertow.lab.training.remarks import remarks
from undertow.lab.training.solver_gap import SolverGap
from undertow.lab.training.throughput import Throughput
from undertow.lab.training.tracking import trackers
from undertow.lab.training.trainer import RecipeTrainer, arguments
from undertow.manifest import write_manifest
from undertow.mapping import to_mapping


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
    check_machine(recipe.training)
    run = Run.of(recipe, seed)
    with joined(), ExitStack() as held:
        check_same("recipes", [to_mapping(recipe), seed])
        try:
            changed, finished = of_first(lambda: begin(run, recipe, held))
            if not finished:
                Training(run, recipe, seed, changed).go(description)
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            saves = recipe.training.save_every is not None
            raise Interrupted(number, how_to_go_on(run.folder, run.finished, saves)) from error
    return run.folder


def begin(run: Run, recipe: Recipe, held: ExitStack) -> tuple[dict[str, Any], bool]:
    """Take hold of the run's folder: what of the recipe has changed since a divergence, and whether
    the run is finished."""
    run.check(recipe)  # before anything is made there
    held.enter_context(run.locked())
    changed = run.check(recipe)
    run.clean()
    if run.finished:
        keep_finished(run, recipe, changed)
    return changed, run.finished


def keep_finished(run: Run, recipe: Recipe, changed: dict[str, Any]) -> None:
    """Write down how a finished run is evaluated now. What it was trained by stays, if another
    seed's remedy differs."""
    for key, before in changed.items():
        tell(f"{run.folder} is finished, with {key} {before}, and is left as it is")
    if changed:
        recipe = dataclasses.replace(run.recipe(), evaluation=recipe.evaluation)
    run.save_recipe(recipe)


class Training:
    """One training, from the newest checkpoint of its run or from the start, to the end.

    Args:
        run: where it is.
        changed: what of the recipe was another before a divergence, by dotted key.
    """

    tokenizer: PreTrainedTokenizerBase
    trainer: RecipeTrainer
    log: RunLog

    def __init__(self, run: Run, recipe: Recipe, seed: int, changed: dict[str, Any]) -> None:
        self.run = run
        self.recipe = recipe
        self.seed = seed
        self.changed = changed

    def go(self, description: str | None) -> None:
        """Train, evaluate and save. Raises as `train` does."""
        interrupts = Interrupts()
        progress = Progress(description or f"{self.recipe.name} seed {self.seed}")
        checkpoint = self.prepare(interrupts, progress)
        trainer, goes_on_from = self.trainer, None if checkpoint is None else str(checkpoint)
        with interrupts.hearing():
            try:
                trainer.train(resume_from_checkpoint=goes_on_from)
                trainer.settle()
                interrupts.stop()
                if trainer.eval_dataset is not None and not of_first(self.evaluated):
                    interrupts.closing = True
                    trainer.evaluate()
                trainer.check_finite()
            except DivergedError as error:
                raise self.diverged(error) from error
            finally:
                progress.close()
            self.log.write(event="end", **trainer.lengths(self.recipe))
            self.save()
            if interrupts.number is not None:
                raise Interrupted(interrupts.number)

    def prepare(self, interrupts: Interrupts, progress: Progress) -> Path | None:
        """Make the model, the data and the Trainer, and begin the log; the checkpoint to go on from
        is returned, if there is one."""
        recipe = self.recipe
        section = recipe.training
        seed = self.seed
        if section.threads is not None:
            torch.set_num_threads(section.threads)
        model, self.tokenizer = build(recipe, seed)
        if section.compile == "regional":
            compile_layers(model)
        context = context_of(model)
        dataset, skipped = training_set(recipe.task, self.tokenizer, section, seed, context)
        steps = len(dataset) // (section.batch * section.accumulate)
        held_out = held_out_set(recipe, self.tokenizer, context)
        if recipe.task.has_documents(self.tokenizer):
            check_documents(model)
        tracked = trackers(section, self.run.folder)
        name, said = of_first(self.chosen)
        checkpoint = self.run.folder / name if name else None
        check_same("training examples", [dataset.indices, dataset[0]])

        self.log = (RunLog if first() else NoLog)(self.run.log_file, step_of(checkpoint))
        if first():
            self.run.save_recipe(recipe)
            self.run.save_versions()
        self.log.write(
            event="start",
            seed=seed,
            parameters=sum(p.numel() for p in model.parameters()),
            trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            examples_left_out=skipped + held_out.skipped,
            threads=torch.get_num_threads(),
            processes=world(),
        )
        if self.log.lacks_start:
            said.append(f"{self.log.path} was lost, and begins after step {step_of(checkpoint)}")
        if self.changed:
            said.append(self.mended(checkpoint))
        sets: Any = {"training": dataset.dataset, "held-out": held_out}
        for text in [*said, *remarks(recipe, sets, self.tokenizer, steps)]:
            self.log.tell(text)

        guard, throughput = Guard(), Throughput(recipe)
        watches = recurs_in_time(model) and not recipe.solver.exact
        self.trainer = RecipeTrainer(
            section,
            model=model,
            args=arguments(recipe, self.run.folder, seed, len(held_out) > 0, steps),
            train_dataset=dataset,
            eval_dataset=held_out if len(held_out) else None,
            data_collator=PadCollator(self.tokenizer),
            callbacks=[
                guard,
                *([SolverGap(section.compare_every)] if watches else []),
                GateLog(),
                throughput,
                self.log,
                *(tracked if first() else []),
                progress,
                *([TimedSaves()] if section.save_every == "auto" else []),
                interrupts,
            ],
        )
        guard.trainer = interrupts.trainer = throughput.trainer = self.trainer
        self.trainer.depth, self.trainer.depth_seed = recipe.depth, seed
        if checkpoint is not None:
            self.trainer.proven = [step_of(checkpoint)]
        for callback in (ProgressCallback, PrinterCallback):
            self.trainer.remove_callback(callback)
        return checkpoint

    def chosen(self) -> tuple[str, list[str]]:
        """The name of the checkpoint to go on from, empty for none, and what is to be said."""
        checkpoint, said = choose(self.run.folder)
        return "" if checkpoint is None else checkpoint.name, said

    def mended(self, checkpoint: Path | None) -> str:
        """What is said, and written to the log, of a training that goes on after a divergence."""
        now = trained_part(self.recipe)
        name = None if checkpoint is None else checkpoint.name
        mends = {key: now.get(key) for key in self.changed}
        self.log.write(event="mended", before=self.changed, now=mends, checkpoint=name)
        listed = ", ".join(
            f"{key} {now.get(key)} in place of {before}" for key, before in self.changed.items()
        )
        goes_on = "anew" if name is None else f"on from {name}"
        return f"the training had diverged, and goes {goes_on} with {listed}"

    def evaluated(self) -> bool:
        """Whether the held-out examples have been evaluated after the last step already: as one of
        `evaluate_every`, or by a process that was killed before its end."""
        state = self.trainer.state
        last = (entry for entry in state.log_history if entry["step"] == state.global_step)
        return any(
            name.startswith("eval_") for entry in last for name in entry
        ) or self.log.has_evaluation(state.global_step)

    def save(self) -> None:
        """Save what was trained, and remove the checkpoints when it is on the disk."""
        model: Any = self.trainer.model
        if self.recipe.lora is not None and self.recipe.lora.save == "merged":
            model = model.merge_and_unload()
        model.config.use_cache = True
        weights = self.trainer.whole_weights()
        if first():
            # A folder called model is a finished run.
            with replacing_folder(self.run.model_folder) as saving:
                self.tokenizer.save_pretrained(saving)
                model.save_pretrained(saving, **weights)
                write_manifest(saving)
            sync(self.run.folder)
            for old in checkpoints(self.run.folder):
                remove(old)
        wait()

    def diverged(self, error: DivergedError) -> DivergedError:
        """What is said of a training that diverged, and written to its log: the step, its examples,
        and how to go on."""
        trainer, section = self.trainer, self.recipe.training
        step = error.step or 0
        indices = trainer.examples_of(step) if step else []
        good = f"checkpoint-{trainer.proven[-1]}" if trainer.proven else None
        self.log.write(
            event="diverged",
            step=step or trainer.state.global_step,
            reason=str(error),
            examples=indices,
            checkpoint=good,
        )
        shown = ", ".join(map(str, indices[:8]))
        shown += f" and {len(indices) - 8} others" if len(indices) > 8 else ""
        where = f"; the step's examples are {shown} of the train split" if indices else ""
        model: Any = trainer.model
        weight = next(infinite(model.named_parameters()), None)
        broken = "" if weight is None else f"; the weight {weight} was no number before it"
        clip = "lower training.clip" if section.clip else "set training.clip, which is 0"
        has_alpha = hasattr(self.recipe.recurrence, "alpha")
        alpha = ", or lower the recurrence's alpha" if has_alpha else ""
        mend = f"lower training.learning_rate, which is {section.learning_rate}, or {clip}{alpha}"
        on = (
            f"goes on from the last good checkpoint, {self.run.folder / good}; remove that if it "
            "is spoilt already"
            if good
            else "starts anew, as there is no checkpoint yet"
        )
        return DivergedError(f"{error}; {mend}: the same command then {on}{where}{broken}")
