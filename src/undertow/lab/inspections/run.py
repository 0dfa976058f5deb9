"""Inspect finished runs, or a recipe before it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from undertow.config import load_config
from undertow.errors import ConfigError
from undertow.files import write_text
from undertow.host.attachment import recurs_in_time
from undertow.lab.evaluation.figures import lines_figure
from undertow.lab.evaluation.run import seed_folders
from undertow.lab.inspections.choices import (
    Choices,
    Chosen,
    choices_figure,
    choices_table,
    measure_choices,
)
from undertow.lab.inspections.compare import labels
from undertow.lab.inspections.fidelity import (
    SETTINGS,
    fidelity_figure,
    fidelity_table,
    measure_fidelity,
    recommendation,
    worst,
)
from undertow.lab.inspections.positions import loss_by_position, state_norms
from undertow.lab.inspections.probes import probe_losses
from undertow.lab.runs.folder import LOG, MODEL, RECIPE
from undertow.lab.runs.loading import load, quiet_libraries
from undertow.lab.runs.log import read_log
from undertow.lab.runs.recipe import Recipe, load_recipe
from undertow.lab.study.study import runs_in
from undertow.lab.tables import table
from undertow.lab.tasks import PadCollator, Split, Task
from undertow.lab.training.build import count_parameters, outline
from undertow.paths import takes_paths
from undertow.solvers import Sequential


@takes_paths
def inspect_fidelity(run: Path, examples: int) -> str:
    """How faithful each solver setting is on a run's models and the first held-out examples of its
    task.

    A table of the worst over the seeds, with the run's own solver; `fidelity.json` beside each
    seed's model, and a figure `fidelity.png`.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: its model has no recurrence, or there are no examples.
    """
    by_seed = {}
    for folder in seed_folders(run):
        recipe, model, tokenizer = one_seed(folder, examples)
        batch = PadCollator(tokenizer)(first_items(recipe.task, "valid", tokenizer, examples))
        known = recipe.solver in (Sequential(), *SETTINGS.values())
        by_seed[folder.name] = found = measure_fidelity(
            model.train(), batch, SETTINGS if known else {**SETTINGS, "as trained": recipe.solver}
        )
        write_text(
            folder / "fidelity.json",
            json.dumps([dataclasses.asdict(one) for one in found], indent=1) + "\n",
        )
    fidelity_figure(by_seed, run / "fidelity.png", run.name)
    found = worst(list(by_seed.values()))
    return f"{fidelity_table(found)}\n\n{recommendation(found)}\n\nFigure: {run / 'fidelity.png'}"


@takes_paths
def inspect_choices(paths: Sequence[Path], examples: int) -> str:
    """How the models of several runs spread probability over the possible answers: a table like the
    paper's Table 4.

    One row a run and length, over its seeds. A study's folder stands for its runs. Each seed's
    folder gets `choices.json`, and each run that was tested by length the figure `choices.png`.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: a task has no fixed choices, or there are no examples.
    """
    if examples < 1:
        raise ConfigError(f"examples is {examples}; ask 1 or more")
    quiet_libraries()
    table_rows = []
    for run in [run for path in paths for run in runs_in(path)]:
        by_seed: dict[str, list[Choices]] = {}
        for folder in seed_folders(run):
            recipe = load_config(Recipe, folder / RECIPE)
            model, tokenizer = load(str(folder / MODEL))
            found = measure_choices(
                model, tokenizer, recipe.task, recipe.evaluation.lengths, examples
            )
            write_text(
                folder / "choices.json",
                json.dumps([dataclasses.asdict(one) for one in found], indent=1) + "\n",
            )
            by_seed[folder.name] = found
        if recipe.evaluation.lengths:
            choices_figure(by_seed, run / "choices.png", recipe.name, f"{recipe.task.kind}: length")
        table_rows.append(Chosen(recipe.name, len(recipe.task.choices()), list(by_seed.values())))
    return choices_table(table_rows)


@takes_paths
def inspect_parameters(path: Path, overrides: list[str]) -> str:
    """What a recipe would train, counted without its weights.

    Raises:
        ConfigError, CheckpointError: the recipe is wrong, or there is no config of its pretrained
            model.
    """
    quiet_libraries()
    recipe = load_recipe(path, overrides)
    counts = count_parameters(outline(recipe))
    return f"{recipe.name}\n\n" + table(
        ["parameters", "number"], [[name, f"{count:,}"] for name, count in counts.items()]
    )


@takes_paths
def inspect_gates(run: Path) -> str:
    """Both gates of T²MLR over training, of each of a run's seeds: a figure `gates.png` and a table
    of where they ended.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: it has no such gates.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for folder in seed_folders(run):
        for entry in read_log(folder / LOG):
            for gate in filter(lambda name: name.startswith("gate_"), entry):
                lines.setdefault(f"{folder.name}, {gate}", []).append((entry["step"], entry[gate]))
    if not lines:
        raise ConfigError(
            f"the log of {run} has no gates: only T²MLR has them; train with recurrence.kind t2mlr"
        )
    lines_figure(lines, run / "gates.png", "input-independent gates", "step", "tanh(γ)", zero=True)
    rows = [
        [
            label,
            f"{points[-1][0]:.0f}",
            f"{points[-1][1]:+.4f}",
            f"{max(abs(y) for _, y in points):.4f}",
        ]
        for label, points in lines.items()
    ]
    return f"{table(['gate', 'step', 'tanh(γ)', 'largest'], rows)}\n\nFigure: {run / 'gates.png'}"


@takes_paths
def inspect_positions(run: Path, examples: int) -> str:
    """Loss by position and, with a recurrence, the size of the state there, on held-out examples: a
    figure and a table.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: there are no examples.
    """
    model, _, batches = prepared(run, examples)
    (valid,) = batches
    lines = {"loss": loss_by_position(model, valid)}
    if recurs_in_time(model):
        lines["state"] = state_norms(model, valid)
    for name, line in lines.items():
        label = "loss (nats)" if name == "loss" else "root mean square of the state"
        lines_figure(
            {name: list(line.items())}, run / f"{name}-by-position.png", run.name, "position", label
        )
    last = max(lines["loss"])
    bounds = [0, *(2**n for n in range(last.bit_length()))]
    rows = []
    for start, stop in zip(bounds, [*bounds[1:], last + 1], strict=True):
        cells = []
        for line in lines.values():
            own = [value for position, value in line.items() if start <= position < stop]
            cells.append(f"{sum(own) / len(own):.4f}" if own else "")
        rows.append([f"{start} to {stop - 1}" if stop - 1 > start else start, *cells])
    return f"{table(['position', *lines], rows)}\n\nFigures: {run}/*-by-position.png"


@takes_paths
def inspect_probes(run: Path, baseline: Path | None, examples: int) -> str:
    """What probes on each layer know of the next token, of a run and, if given, of another: a table
    and `probes.png`.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: there are no examples, or the other run is one on another task.
    """
    paths = [run, *([] if baseline is None else [baseline])]
    found, tasks = {}, []
    for name, path in zip(labels([path.name for path in paths], paths), paths, strict=True):
        model, recipe, (train, valid) = prepared(path, examples, "train", "valid")
        tasks.append(recipe.task)
        if recipe.task != tasks[0]:
            raise ConfigError(
                f"{path} learned another task than {run}, so their probes do not compare; give a "
                "run on that"
            )
        found[name] = probe_losses(model, train, valid)
    longest = max(len(losses) for losses in found.values())
    rows = [
        [
            layer,
            *(f"{losses[layer]:.4f}" if layer < len(losses) else "" for losses in found.values()),
        ]
        for layer in range(longest)
    ]
    lines = {name: list(enumerate(losses)) for name, losses in found.items()}
    lines_figure(
        lines, run / "probes.png", "probes that predict the next token", "layer", "loss (nats)"
    )
    return (
        f"{table(['layer', *(f'{name}: loss' for name in found)], rows)}\n\nFigure: "
        f"{run / 'probes.png'}"
    )


def prepared(
    run: Path, examples: int, *splits: Split
) -> tuple[Any, Recipe, list[list[dict[str, torch.Tensor]]]]:
    """A run's model, its recipe, and batches of the first examples of some splits of its task, the
    valid one by default."""
    _, recipe, model, tokenizer = first_seed(run, examples)
    collate, found = PadCollator(tokenizer), []
    for split in splits or ("valid",):
        items = first_items(recipe.task, split, tokenizer, examples)
        items.sort(key=lambda item: len(item["input_ids"]))
        found.append([collate(items[start : start + 32]) for start in range(0, len(items), 32)])
    return model, recipe, found


def first_seed(run: Path, examples: int) -> tuple[Path, Recipe, Any, Any]:
    """The folder of a run's first seed, its recipe, model and tokenizer; see `one_seed`."""
    folder = seed_folders(run)[0]
    return folder, *one_seed(folder, examples)


def one_seed(folder: Path, examples: int) -> tuple[Recipe, Any, Any]:
    """The recipe, model and tokenizer of a seed's folder, to look at some examples with.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: there are no examples.
    """
    if examples < 1:
        raise ConfigError(f"examples is {examples}; use 1 or more")
    quiet_libraries()
    return load_config(Recipe, folder / RECIPE), *load(str(folder / MODEL))


def first_items(task: Task, split: Split, tokenizer: Any, examples: int) -> list[dict[str, Any]]:
    """The first examples of a split, encoded; all of them if it holds fewer."""
    size = task.size(split, tokenizer)
    return [
        task.encode(split, index, tokenizer)
        for index in range(examples if size is None else min(examples, size))
    ]
