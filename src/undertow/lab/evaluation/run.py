"""Evaluate finished runs: accuracy by length as a table, JSON and a figure, or the loss a token."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from undertow.config import load_config, save_yaml
from undertow.depth.loop import check_depth
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.files import write_text
from undertow.lab.evaluation.accuracy import Accuracy, accuracy_by_length, generate
from undertow.lab.evaluation.depth import set_depth
from undertow.lab.evaluation.figures import accuracy_figure
from undertow.lab.evaluation.loss import Loss, loss_per_token, loss_table
from undertow.lab.evaluation.report import accuracy_table
from undertow.lab.runs.folder import MODEL, RECIPE, clean, made_by, run_folder
from undertow.lab.runs.loading import ADAPTER, context_of, load, loops, quiet_libraries
from undertow.lab.runs.lock import locked
from undertow.lab.runs.recipe import Recipe
from undertow.lab.tasks import Example, Text, encode_prompt
from undertow.lab.training.data import most_tokens
from undertow.lab.training.fit import check_examples, check_fit
from undertow.paths import takes_paths

# Seconds to wait for a process that writes into the same folder.
WAIT = 60.0


@takes_paths
def seed_folders(run: Path) -> list[Path]:
    """The folders of a run's seeds: the folder itself, or those inside it.

    Raises:
        CheckpointError: there is no finished run there.
    """
    folders = [run] if (run / RECIPE).is_file() else sorted(run.glob("seed-*"))
    finished = [folder for folder in folders if (folder / MODEL).is_dir()]
    if not finished:
        what = (
            "its training has not finished; run `undertow train` again"
            if folders
            else "it has no recipe.yaml"
        )
        what = what if run.exists() else "there is no such folder"
        raise CheckpointError(f"{run} is no finished run: {what}")
    return finished


@takes_paths
def load_at(folder: Path, depth: int | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model in a folder and its tokenizer, set to run `depth` iterations; as many as it was
    trained with if None.

    Raises:
        CheckpointError: there is no model there.
        ConfigError: the depth is below 1, or the model has no recurrence in depth.
    """
    if depth is not None:
        check_depth("depth", depth)  # before a large model is loaded
    model, tokenizer = load(str(folder))
    if depth is not None:
        if not loops(model):
            raise ConfigError(
                f"depth is {depth}, but {folder} has no recurrence in depth; leave depth out"
            )
        set_depth(model, depth)
    return model, tokenizer


def depth_suffix(depth: int | None) -> str:
    """What the names of results end in where a depth was asked for, so that those of the trained
    one stay."""
    return "" if depth is None else f"-depth-{depth}"


@takes_paths
def evaluate(run: Path, overrides: list[str], depth: int | None = None) -> str:
    """Evaluate every seed of a run by its recipe, with `overrides` applied; writes the results and
    returns a table.

    A `depth` is how many iterations recurrent-depth models run, instead of as many as they were
    trained with.
    """
    quiet_libraries()
    folders = seed_folders(run)
    recipes = [load_config(Recipe, folder / RECIPE, overrides) for folder in folders]
    recipe = recipes[-1]
    check_examples(recipe)
    suffixes = [
        suffix_of(folder, recipe) + depth_suffix(depth)
        for folder, recipe in zip(folders, recipes, strict=True)
    ]
    name = recipe.name if depth is None else f"{recipe.name} at depth {depth}"
    if recipe.task.measured_by == "loss":
        losses = {
            folder.name: evaluate_loss(folder, recipe, suffix, depth)
            for folder, recipe, suffix in zip(folders, recipes, suffixes, strict=True)
        }
        return f"{name}\n\n{loss_table(losses)}"
    pooled: dict[tuple[int | None, float], list[Accuracy]] = defaultdict(list)
    curves = {}
    for folder, recipe, suffix in zip(folders, recipes, suffixes, strict=True):
        results = evaluate_folder(folder, recipe, suffix, depth)
        curves[folder.name] = [
            result for result in results if result.temperature == 0 and result.length is not None
        ]
        for result in results:
            pooled[result.length, result.temperature].append(result)
    if all(curves.values()):
        longest = getattr(recipe.task, "max_length", None) or getattr(
            recipe.task, "max_operands", None
        )
        accuracy_figure(
            curves,
            run / f"accuracy{suffixes[-1]}.png",
            name,
            f"{recipe.task.kind}: length",
            longest,
        )
    seeds = f" ({len(folders)} seeds together)" if len(folders) > 1 else ""
    together = [Accuracy.together(results) for results in pooled.values()]
    return f"{name}{seeds}\n\n{accuracy_table(together)}"


def check_test(recipe: Recipe) -> None:
    """Look at the test split before a training, so that what is wrong with it is not told after it
    only.

    Raises:
        ConfigError, DataError: there is no such file, it is malformed, or there is no test example
            of a length.
    """
    if not isinstance(recipe.task, Text):  # it has one source for all splits
        recipe.task.size("test")
    for length in recipe.evaluation.lengths:
        recipe.task.example("test", 0, length)


def check_recipe(recipe: Recipe) -> None:
    """Look at a recipe's test split, and at what its model and this machine can hold, before the
    training.

    Where each seed is trained already there is nothing more to hold.

    Raises:
        UndertowError: as `check_test` and `undertow.lab.training.fit.check_fit`.
    """
    check_test(recipe)
    if not all((run_folder(recipe, seed) / MODEL).is_dir() for seed in recipe.seeds):
        check_fit(recipe)


def suffix_of(folder: Path, recipe: Recipe) -> str:
    """What the names of a recipe's results end in: its task's kind and test file, if it is not the
    task that was learned."""
    trained = load_config(Recipe, folder / RECIPE).task
    file = getattr(recipe.task, "test", None)
    own = "" if file is None else f"-{Path(file).stem}"
    return "" if recipe.task == trained else f"-{recipe.task.kind}{own}"


@takes_paths
def evaluate_folder(
    folder: Path, recipe: Recipe, suffix: str = "", depth: int | None = None
) -> list[Accuracy]:
    """Accuracies of one seed's model, also written to `accuracy.json` in its folder, with a suffix
    for another test or depth."""
    model, tokenizer = load_at(folder / MODEL, depth)
    section = recipe.evaluation
    results = []
    for temperature in (0.0, section.temperature):
        if temperature is not None:
            results += accuracy_by_length(
                model,
                tokenizer,
                recipe.task,
                section.lengths,
                section.examples,
                section.batch,
                temperature,
                section.max_new_tokens,
            )
    write_results(
        folder,
        f"accuracy{suffix}.json",
        [dataclasses.asdict(result) for result in results],
        None if suffix else recipe,
    )
    return results


def write_results(folder: Path, name: str, results: Any, recipe: Recipe | None) -> None:
    """Write results into a run's folder, and with a recipe down in the folder's how its model was
    evaluated last: what a study and comparisons go by. Another process that writes there is waited
    for."""
    with locked(folder, WAIT):
        clean(folder)
        write_text(folder / name, json.dumps(results, indent=1) + "\n")
        if recipe is None:
            return
        trained = made_by(folder / RECIPE)
        if trained.evaluation != recipe.evaluation:
            save_yaml(dataclasses.replace(trained, evaluation=recipe.evaluation), folder / RECIPE)


@takes_paths
def evaluate_loss(folder: Path, recipe: Recipe, suffix: str = "", depth: int | None = None) -> Loss:
    """The loss a token of one seed's model on its task's test split, also written to `loss.json` in
    its folder, with a suffix for another text or depth."""
    model, tokenizer = load_at(folder / MODEL, depth)
    loss = loss_per_token(
        model,
        tokenizer,
        recipe.task,
        recipe.evaluation.examples,
        recipe.evaluation.batch,
        max_tokens=most_tokens(recipe.training, context_of(model)),
        # Texts are cut to windows, none of which is too long; as in training, rows are left out
        # only if that is asked for.
        overlong="error"
        if recipe.training.max_tokens is None or isinstance(recipe.task, Text)
        else "skip",
    )
    if loss.left_out:
        print(
            f"undertow: {loss.left_out:,} test examples are left out: they have more than "
            f"training.max_tokens, {recipe.training.max_tokens}",
            file=sys.stderr,
        )
    written = dataclasses.asdict(loss) | {"perplexity": loss.perplexity}
    write_results(folder, f"loss{suffix}.json", written, None if suffix else recipe)
    return loss


@takes_paths
def continue_prompt(
    run: Path, prompt: str, max_new_tokens: int, temperature: float, depth: int | None = None
) -> str:
    """The text that the model of a run, or in any folder, writes after a prompt, with `depth`
    iterations if it is given.

    Raises:
        CheckpointError: there is no model there.
        ConfigError: the answer would have no token, the temperature is negative, or the model
            cannot run at the depth.
        DataError: the prompt is empty, or the tokenizer does not know a part of it.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max-new-tokens is {max_new_tokens}; use 1 or more")
    if not 0 <= temperature < math.inf:  # nan is neither
        raise ConfigError(f"temperature is {temperature}; use 0 for greedy answers, or more")
    quiet_libraries()
    is_model = any((run / name).is_file() for name in ("config.json", ADAPTER)) or not run.is_dir()
    folder = run if is_model else seed_folders(run)[0] / MODEL
    model, tokenizer = load_at(folder, depth)
    if not encode_prompt(prompt, tokenizer):
        raise DataError("the prompt is empty; give at least one character")
    (answer,) = generate(model, tokenizer, [Example(prompt, "", 0)], 1, temperature, max_new_tokens)
    return answer
