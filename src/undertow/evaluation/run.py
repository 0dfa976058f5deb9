"""Evaluate finished runs: accuracy by length, greedy and sampled, as a table, JSON and a figure."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

from undertow.config import apply_overrides, from_mapping, load_yaml
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.evaluation.accuracy import Accuracy, accuracy_by_length, generate
from undertow.evaluation.report import accuracy_figure, accuracy_table
from undertow.files import write_text
from undertow.tasks import Example, encode_prompt
from undertow.training.build import ADAPTER, load, quiet_libraries
from undertow.training.recipe import Recipe
from undertow.training.run import MODEL, RECIPE


def seed_folders(run: Path) -> list[Path]:
    """The folders of a run's seeds: the folder itself, or those inside it.

    Raises:
        CheckpointError: there is no finished run there.
    """
    folders = [run] if (run / RECIPE).is_file() else sorted(run.glob("seed-*"))
    finished = [folder for folder in folders if (folder / MODEL).is_dir()]
    if not finished:
        what = "its training has not finished; run `undertow train` again" if folders else "it has no recipe.yaml"
        what = what if run.exists() else "there is no such folder"
        raise CheckpointError(f"{run} is no finished run: {what}")
    return finished


def evaluate(run: Path, overrides: list[str]) -> str:
    """Evaluate every seed of a run by its recipe, with `overrides` applied; writes the results and returns a table."""
    quiet_libraries()
    pooled: dict[tuple[int | None, float], list[Accuracy]] = defaultdict(list)
    curves = {}
    folders = seed_folders(run)
    for folder in folders:
        recipe = from_mapping(Recipe, apply_overrides(load_yaml(folder / RECIPE), overrides))
        trained = from_mapping(Recipe, load_yaml(folder / RECIPE)).task
        results = evaluate_folder(folder, recipe, "" if recipe.task == trained else f"-{recipe.task.kind}")
        greedy = [result for result in results if result.temperature == 0 and result.length is not None]
        curves[folder.name] = greedy
        for result in results:
            pooled[result.length, result.temperature].append(result)
    if all(curves.values()):
        longest = getattr(recipe.task, "max_length", None) or getattr(recipe.task, "max_operands", None)
        accuracy_figure(curves, run / "accuracy.png", recipe.name, f"{recipe.task.kind}: length", longest)
    summed = [
        Accuracy(length, temperature, sum(r.correct for r in results), sum(r.total for r in results))
        for (length, temperature), results in pooled.items()
    ]
    seeds = f" ({len(folders)} seeds together)" if len(folders) > 1 else ""
    return f"{recipe.name}{seeds}\n\n{accuracy_table(summed)}"


def evaluate_folder(folder: Path, recipe: Recipe, suffix: str = "") -> list[Accuracy]:
    """Accuracies of one seed's model, also written to `accuracy.json` in its folder, with a suffix for another test."""
    model, tokenizer = load(str(folder / MODEL))
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
    write_text(
        folder / f"accuracy{suffix}.json", json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n"
    )
    return results


def continue_prompt(run: Path, prompt: str, max_new_tokens: int, temperature: float) -> str:
    """The text that the model of a run, or in any folder, writes after a prompt.

    Raises:
        CheckpointError: there is no model there.
        ConfigError: the answer would have no token, or the temperature is negative.
        DataError: the prompt is empty, or the tokenizer does not know a part of it.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max-new-tokens is {max_new_tokens}; use 1 or more")
    if temperature < 0:
        raise ConfigError(f"temperature is {temperature}; use 0 for greedy answers, or more")
    quiet_libraries()
    is_model = any((run / name).is_file() for name in ("config.json", ADAPTER)) or not run.is_dir()
    folder = run if is_model else seed_folders(run)[0] / MODEL
    model, tokenizer = load(str(folder))
    if not encode_prompt(prompt, tokenizer):
        raise DataError("the prompt is empty; give at least one character")
    (answer,) = generate(model, tokenizer, [Example(prompt, "", 0)], 1, temperature, max_new_tokens)
    return answer
