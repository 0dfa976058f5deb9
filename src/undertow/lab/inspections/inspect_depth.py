"""`undertow inspect depth RUN`: everything that the iterations of a finished run's model do, in
tables and figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from undertow.depth.exits import EXIT_RULES, ExitRule, Scripted
from undertow.depth.handle import at_depth, depth_handle, get_depth
from undertow.files import write_json, write_text
from undertow.host.attachment import recurs_in_time
from undertow.lab.evaluation.accuracy import accuracy_by_length
from undertow.lab.inspections.depth import (
    behaviours,
    convergence,
    iteration_logits,
    iteration_states,
    loss_by_depth,
    measure_exits,
    path_independence,
    principal_components,
)
from undertow.lab.inspections.depth_figures import (
    convergence_figure,
    depth_figure,
    exits_figure,
    trajectories_figure,
)
from undertow.lab.inspections.inspection import examples as examples_option
from undertow.lab.inspections.inspection import inspection
from undertow.lab.inspections.looking import first_items, of_run
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.run import Experiment
from undertow.lab.tables import percent, table
from undertow.lab.tasks import PadCollator, real_tokens
from undertow.mapping import to_mapping

# Shares of the trained mean at which things are measured, and how much deeper than it "to the end"
# is.
SHARES, END = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0), 4
CHOSEN = 3  # tokens whose trajectories are drawn


def rules(gate: bool) -> list[ExitRule]:
    """The exit rules that decide by what a model does, as registered: with their default settings,
    and only if it has a gate those that need one."""
    fitting = [cls for cls in EXIT_RULES.values() if gate or not cls.needs_gate]
    return [cls() for cls in fitting if cls is not Scripted and not needs_settings(cls)]


def needs_settings(cls: type[ExitRule]) -> bool:
    """Whether a rule has a setting without a default."""
    missing = dataclasses.MISSING
    each = dataclasses.fields(cls)
    return any(one.default is missing and one.default_factory is missing for one in each)


@inspection("depth", "what the iterations of a recurrent-depth model do", examples_option(16))
def inspect_depth(run: Path, examples: int) -> str:
    """Inspect the first seed's model on the first held-out examples of its task; writes `depth/`
    into its folder.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: its model has no recurrence in depth, or there are no examples.
    """
    seed = Experiment(run).runs[0]
    recipe, model, tokenizer = of_run(seed, examples)
    mean = get_depth(model)
    depths = sorted({max(1, round(share * mean)) for share in SHARES})
    batch = PadCollator(tokenizer)(first_items(recipe.task, "valid", tokenizer, examples))
    model.eval()

    results: dict[str, Any] = {"mean": mean, "loss_by_depth": loss_by_depth(model, batch, depths)}
    scored = recipe.task.measured_by != "loss"
    results["accuracy_by_depth"] = (
        accuracy_by_depth(model, tokenizer, recipe, depths, examples) if scored else {}
    )
    output = seed.folder / "depth"
    depth_figure({"held-out loss": results["loss_by_depth"]}, output / "loss.png", "loss", mean)
    if scored:
        depth_figure(
            {"accuracy": results["accuracy_by_depth"]}, output / "accuracy.png", "accuracy", mean
        )
    text = depth_report(results)
    if recurs_in_time(model):
        text += (
            "\n\nNo exits and states here: beside a recurrence in time the loop runs again and "
            "again."
        )
    else:
        found, more = inspect_states(model, tokenizer, batch, mean, output)
        results, text = results | found, f"{text}\n\n{more}"
    write_json(output / "depth.json", results)
    write_text(output / "depth.md", text + "\n")
    return f"{text}\n\nFigures: {output}"


def inspect_states(
    model: Any, tokenizer: Any, batch: Any, mean: int, output: Path
) -> tuple[dict[str, Any], str]:
    """What becomes of each token's state, and when exit rules stop it: measures, tables, and
    figures in `output`."""
    end = END * mean
    settings = depth_handle(model).settings
    exits = measure_exits(model, batch, rules(settings.gate), end)
    states = iteration_states(model, batch, end)
    distances = convergence(states)
    kinds = behaviours(states)
    real = real_tokens(batch)
    start = int(real[0].long().argmax())  # the first row without its padding, on either side
    row = slice(start, start + int(real[0].sum()))
    ids = batch["input_ids"][0, row]
    words = [str(tokenizer.decode([int(token)])) or "·" for token in ids]
    lens = iteration_logits(model, batch, mean)[:, 0, row]

    exits_figure(exits, output / "exits.png")
    convergence_figure(distances[:, 0, row], words, output / "convergence.png")
    chosen = sorted(range(len(words)), key=lambda i: -float(distances[-2, 0, start + i]))[:CHOSEN]
    trajectories_figure(
        principal_components(states)[:, 0, row],
        words,
        kinds[0][row],
        chosen,
        output / "trajectories.png",
    )
    counted = [
        kind
        for kept, found in zip(real.tolist(), kinds, strict=True)
        for k, kind in zip(kept, found, strict=True)
        if k
    ]
    results: dict[str, Any] = {
        "exits": [
            dataclasses.asdict(result) | {"rule": to_mapping(result.rule)} for result in exits
        ],
        "distance_to_the_end": [float(d[real].mean()) for d in distances],
        # Without noise there is one start only, and nothing to compare.
        "distance_between_starts": path_independence(model, batch, end)
        if settings.injection != "none"
        else None,
        "behaviours": {
            kind: counted.count(kind) / len(counted) for kind in ("fixed point", "orbit", "slider")
        },
    }
    return results, states_report(results, mean, lens, words, tokenizer, exits)


def accuracy_by_depth(
    model: Any, tokenizer: Any, recipe: Recipe, depths: list[int], examples: int
) -> dict[int, float]:
    """Share of right answers, or of sequences all of whose labels are right, over the recipe's
    lengths at each depth."""
    found = {}
    for depth in depths:
        with at_depth(model, depth):
            results = accuracy_by_length(
                model,
                tokenizer,
                recipe.task,
                recipe.evaluation.lengths,
                examples,
                recipe.evaluation.batch,
            )
        found[depth] = sum(result.correct for result in results) / sum(
            result.total for result in results
        )
    return found


def depth_report(results: dict[str, Any]) -> str:
    """Loss and accuracy by depth."""
    mean, right = results["mean"], results["accuracy_by_depth"]
    return table(
        ["iterations", "held-out loss", "accuracy"],
        [
            [
                f"{depth}{' (trained mean)' if depth == mean else ''}",
                f"{loss:.4f}",
                percent(right[depth]) if right else "–",
            ]
            for depth, loss in results["loss_by_depth"].items()
        ],
    )


def states_report(
    results: dict[str, Any],
    mean: int,
    lens: torch.Tensor,
    words: list[str],
    tokenizer: Any,
    exits: Any,
) -> str:
    """The other tables."""
    by_rule = table(
        ["exit rule", "iterations a token", "held-out loss"],
        [[result.rule.kind, f"{result.mean_depth:.2f}", f"{result.loss:.4f}"] for result in exits],
    )
    marks = sorted({0, mean // 2, mean - 1, 2 * mean - 1, END * mean - 2})
    end, apart = results["distance_to_the_end"], results["distance_between_starts"]
    ways = table(
        ["after iteration", f"distance to iteration {END * mean}", "distance between two starts"],
        [
            [index + 1, f"{end[index]:.4f}", f"{apart[index + 1]:.4f}" if apart else "–"]
            for index in marks
        ],
    )
    guesses = table(
        ["token", *[f"r={index + 1}" for index in range(len(lens))]],
        [
            [repr(word), *[repr(tokenizer.decode([int(step[at].argmax())])) for step in lens]]
            for at, word in list(enumerate(words))[-8:]
        ],
    )
    shares = ", ".join(f"{percent(share)} {kind}s" for kind, share in results["behaviours"].items())
    return "\n\n".join(
        [by_rule, ways, f"States: {shares}.", "Likeliest next token at every iteration:", guesses]
    )
