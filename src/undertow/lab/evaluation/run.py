"""Evaluate finished runs: accuracy by length as a table, JSON and a figure, or the loss a token."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from undertow.errors import ConfigError, DataError
from undertow.lab.evaluation.accuracy import accuracy_by_length, generate
from undertow.lab.evaluation.figures import accuracy_figure
from undertow.lab.evaluation.loss import loss_per_token
from undertow.lab.processes import first, joined
from undertow.lab.runs.loading import context_of, is_model, load, quiet_libraries
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.results import Accuracy, Loss, accuracy_table, loss_table
from undertow.lab.runs.run import Experiment, Run
from undertow.lab.tasks import Example, encode_prompt
from undertow.lab.training.data import most_tokens
from undertow.lab.training.fit import check_data, check_fit
from undertow.lab.training.run import train
from undertow.paths import takes_paths


def carry_out(recipe: Recipe) -> Iterator[str]:
    """Train a recipe with each of its seeds, and evaluate what it trained: the folders, one after
    the other, and then the table of results.

    Raises:
        UndertowError: the recipe asks for what cannot be done, told before any training if that can
            be known.
    """
    with joined():
        check_fit(recipe)
        for seed in recipe.seeds:
            folder = train(recipe, seed)
            if first():
                yield str(folder)
    if first():
        yield evaluate(folder.parent, [])


@takes_paths
def evaluate(run: Path, overrides: list[str], depth: int | None = None) -> str:
    """Evaluate every seed of a run by its recipe, with `overrides` applied; writes the results and
    returns a table.

    A `depth` is how many iterations recurrent-depth models run, instead of as many as they were
    trained with.
    """
    quiet_libraries()
    seeds = Experiment(run).runs
    recipes = [seed.recipe(overrides) for seed in seeds]
    recipe = recipes[-1]
    check_data(recipe)
    suffixes = [
        suffix_of(seed.recipe(), recipe, depth) for seed, recipe in zip(seeds, recipes, strict=True)
    ]
    name = recipe.name if depth is None else f"{recipe.name} at depth {depth}"
    each = list(zip(seeds, recipes, suffixes, strict=True))
    if recipe.task.measured_by == "loss":
        losses = {
            seed.name: evaluate_loss(seed, recipe, suffix, depth) for seed, recipe, suffix in each
        }
        return f"{name}\n\n{loss_table(losses)}"
    pooled: dict[tuple[int | None, float], list[Accuracy]] = defaultdict(list)
    curves = {}
    for seed, recipe, suffix in each:
        results = evaluate_accuracy(seed, recipe, suffix, depth)
        curves[seed.name] = [
            result for result in results if result.temperature == 0 and result.length is not None
        ]
        for result in results:
            pooled[result.length, result.temperature].append(result)
    if all(curves.values()):
        figure = run / f"accuracy{suffixes[-1]}.png"
        unit = f"{recipe.task.kind}: length"
        accuracy_figure(curves, figure, name, unit, recipe.task.longest)
    together = [Accuracy.together(results) for results in pooled.values()]
    several = f" ({len(seeds)} seeds together)" if len(seeds) > 1 else ""
    return f"{name}{several}\n\n{accuracy_table(together)}"


def suffix_of(trained: Recipe, recipe: Recipe, depth: int | None) -> str:
    """What the names of results end in, so that those of the run's own evaluation stay: the task's
    kind and test file, if it is not the task that was learned, and a depth that was asked for."""
    file = getattr(recipe.task, "test", None)
    own = "" if file is None else f"-{Path(file).stem}"
    other = "" if recipe.task == trained.task else f"-{recipe.task.kind}{own}"
    return other + depth_suffix(depth)


def depth_suffix(depth: int | None) -> str:
    """What the names of results end in where a depth was asked for."""
    return "" if depth is None else f"-depth-{depth}"


def evaluate_run(run: Run, recipe: Recipe) -> None:
    """Measure what the recipe's task is measured by, and write it down as the run's own results."""
    (evaluate_loss if recipe.task.measured_by == "loss" else evaluate_accuracy)(run, recipe)


def evaluate_accuracy(
    run: Run, recipe: Recipe, suffix: str = "", depth: int | None = None
) -> list[Accuracy]:
    """Accuracies of a run's model, also written to `accuracy.json` in its folder, with a suffix for
    another test or depth."""
    model, tokenizer = run.load(depth)
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
    run.write_results(f"accuracy{suffix}.json", results, None if suffix else recipe)
    return results


def evaluate_loss(run: Run, recipe: Recipe, suffix: str = "", depth: int | None = None) -> Loss:
    """The loss a token of a run's model on its task's test split, also written to `loss.json` in
    its folder, with a suffix for another text or depth."""
    model, tokenizer = run.load(depth)
    skips = recipe.training.max_tokens is not None and not recipe.task.windows
    loss = loss_per_token(
        model,
        tokenizer,
        recipe.task,
        recipe.evaluation.examples,
        recipe.evaluation.batch,
        max_tokens=most_tokens(recipe.training, context_of(model)),
        overlong="skip" if skips else "error",
    )
    if loss.left_out:
        print(
            f"undertow: {loss.left_out:,} test examples are left out: they have more than "
            f"training.max_tokens, {recipe.training.max_tokens}",
            file=sys.stderr,
        )
    written = dataclasses.asdict(loss) | {"perplexity": loss.perplexity}
    run.write_results(f"loss{suffix}.json", written, None if suffix else recipe)
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
    made = load(str(run), depth) if is_model(run) else Experiment(run).runs[0].load(depth)
    model, tokenizer = made
    if not encode_prompt(prompt, tokenizer):
        raise DataError("the prompt is empty; give at least one character")
    (answer,) = generate(model, tokenizer, [Example(prompt, "", 0)], 1, temperature, max_new_tokens)
    return answer
