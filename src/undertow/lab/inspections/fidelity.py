"""Loss and gradient of every solver setting against the exact rollout, on a given model and batch
(T²MLR, Figure 3)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undertow.host import set_solver
from undertow.host.attachment import find_attachment, find_backbone, find_pathway
from undertow.lab.evaluation.figures import new_figure, save_figure
from undertow.lab.inspections.inspection import examples, inspection
from undertow.lab.inspections.looking import first_items, of_run
from undertow.lab.runs.run import Experiment
from undertow.lab.tables import table
from undertow.lab.tasks import PadCollator
from undertow.solvers import Adjoint, Jacobi, Scan, Sequential, Solver

SETTINGS: dict[str, Solver] = {
    "scan(1,1)": Scan(1, 1),
    "scan(2,1)": Scan(2, 1),
    "scan(3,1)": Scan(3, 1),
    "scan(3,2)": Scan(3, 2),
    "scan(2), adjoint(1)": Scan(2, 0, gradient=Adjoint(1)),
    "scan(4), adjoint(2)": Scan(4, 0, gradient=Adjoint(2)),
    "jacobi(4,4)": Jacobi(4, 4),
    "jacobi(8,4)": Jacobi(8, 4),
    "jacobi(16,4)": Jacobi(16, 4),
    "exact, adjoint(1)": Sequential(Adjoint(1)),
    "exact, adjoint(2)": Sequential(Adjoint(2)),
    "exact, adjoint(4)": Sequential(Adjoint(4)),
}
# What a setting must keep to be called enough.
LOSS_ERROR = 1e-3
COSINE_ALL = 0.999
COSINE_PATHWAY = 0.99


@dataclass(frozen=True)
class Fidelity:
    """One setting against the exact rollout with its full gradient.

    Attributes:
        loss_error: its loss minus the exact one.
        cosine_all, cosine_pathway, cosine_layer: cosine similarity of the gradients of all
            parameters, of the pathway's, and of a layer's in the middle of the recurrent block.
        seconds: of one loss and gradient.
    """

    name: str
    loss_error: float
    cosine_all: float
    cosine_pathway: float
    cosine_layer: float
    seconds: float

    @property
    def enough(self) -> bool:
        return (
            abs(self.loss_error) <= LOSS_ERROR
            and self.cosine_all >= COSINE_ALL
            and self.cosine_pathway >= COSINE_PATHWAY
        )


def measure_fidelity(
    model: Any, batch: Mapping[str, torch.Tensor], settings: Mapping[str, Solver] | None = None
) -> list[Fidelity]:
    """Compare solver settings on one batch, exact rollout first. The model's solver and gradients
    are left as they were.

    Args:
        model: a hosted model.
        batch: what it is called with: input_ids, labels and, if rows are padded, attention_mask.
        settings: solvers by name; a list from one scan to exact states by default.

    Raises:
        ConfigError: the model has no recurrence.
    """
    attachment = find_attachment(model)
    before = attachment.solver, {name: p.grad for name, p in model.named_parameters()}
    pathway = find_pathway(model)
    middle = pathway.block[len(pathway.block) // 2]
    layer = getattr(find_backbone(model), attachment.stack_name)[middle]
    groups = {
        "all": list(model.parameters()),
        "pathway": list(pathway.parameters()),
        "layer": list(layer.parameters()),
    }
    try:
        exact, gradients, seconds = loss_and_gradients(model, batch, Sequential(), groups)
        found = [Fidelity("exact", 0.0, 1.0, 1.0, 1.0, seconds)]
        for name, solver in (settings or SETTINGS).items():
            loss, other, seconds = loss_and_gradients(model, batch, solver, groups)
            near = {
                g: float(torch.nn.functional.cosine_similarity(other[g], gradients[g], dim=0))
                for g in groups
            }
            found.append(
                Fidelity(name, loss - exact, near["all"], near["pathway"], near["layer"], seconds)
            )
    finally:
        set_solver(model, before[0])
        for name, parameter in model.named_parameters():
            parameter.grad = before[1][name]
    return found


def loss_and_gradients(
    model: Any,
    batch: Mapping[str, torch.Tensor],
    solver: Solver,
    groups: Mapping[str, list[torch.nn.Parameter]],
) -> tuple[float, dict[str, torch.Tensor], float]:
    """Loss, the flat gradient of each group of parameters, and the seconds that both took."""
    set_solver(model, solver)
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    seconds = time.perf_counter() - started
    flat = {
        name: torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        )
        for name, parameters in groups.items()
    }
    return float(loss.detach()), flat, seconds


def recommendation(found: Sequence[Fidelity]) -> str:
    """The fastest setting that is enough, in a sentence."""
    enough = [one for one in found[1:] if one.enough]
    if not enough:
        return "None of these is enough here: train with the exact rollout."
    best = min(enough, key=lambda one: one.seconds)
    return (
        f"{best.name} is enough here, at {best.seconds / found[0].seconds:.2f} of the exact "
        "rollout's time."
    )


def worst(by_seed: Sequence[Sequence[Fidelity]]) -> list[Fidelity]:
    """Of each setting, over the seeds' models, the largest loss error, the smallest cosines and the
    mean seconds."""
    return [
        Fidelity(
            same[0].name,
            max((one.loss_error for one in same), key=abs),
            min(one.cosine_all for one in same),
            min(one.cosine_pathway for one in same),
            min(one.cosine_layer for one in same),
            sum(one.seconds for one in same) / len(same),
        )
        for same in zip(*by_seed, strict=True)
    ]


def fidelity_figure(by_seed: Mapping[str, Sequence[Fidelity]], path: Path, title: str) -> None:
    """How far each setting's gradients point from the exact ones, a mark a seed, as a PNG: T²MLR's
    Figure 3 on this model.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    names = [one.name for one in next(iter(by_seed.values()))[1:]]
    figure = new_figure(7, 1.5 + 0.3 * len(names))
    axes = figure.subplots()
    kinds = (
        ("cosine_all", "all parameters"),
        ("cosine_pathway", "pathway"),
        ("cosine_layer", "middle layer"),
    )
    for marker, (key, label) in zip("os^", kinds, strict=True):
        apart = [
            (max(1 - getattr(one, key), 1e-8), one.name)
            for found in by_seed.values()
            for one in found[1:]
        ]
        axes.scatter(*zip(*apart, strict=True), marker=marker, s=22, alpha=0.8, label=label)
    for bound, style in ((1 - COSINE_ALL, "--"), (1 - COSINE_PATHWAY, ":")):
        axes.axvline(bound, color="0.5", linestyle=style, linewidth=1)
    axes.set(title=title, xlabel="1 - cosine of the gradient with the exact one", xscale="log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")
    save_figure(figure, path)


def fidelity_table(found: Sequence[Fidelity]) -> str:
    return table(
        [
            "solver",
            "loss error",
            "cosine, all",
            "pathway",
            "middle layer",
            "time over exact",
            "enough",
        ],
        [
            [
                one.name,
                f"{one.loss_error:+.1e}",
                f"{one.cosine_all:.4f}",
                f"{one.cosine_pathway:.4f}",
                f"{one.cosine_layer:.4f}",
                f"{one.seconds / found[0].seconds:.2f}",
                "yes" if one.enough else "no",
            ]
            for one in found
        ],
    )


@inspection("fidelity", "each solver's loss and gradient against the exact rollout's", examples(16))
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
    for seed in Experiment(run).runs:
        recipe, model, tokenizer = of_run(seed, examples)
        batch = PadCollator(tokenizer)(first_items(recipe.task, "valid", tokenizer, examples))
        known = recipe.solver in (Sequential(), *SETTINGS.values())
        by_seed[seed.name] = found = measure_fidelity(
            model.train(), batch, SETTINGS if known else {**SETTINGS, "as trained": recipe.solver}
        )
        seed.write_results("fidelity.json", found)
    fidelity_figure(by_seed, run / "fidelity.png", run.name)
    found = worst(list(by_seed.values()))
    return f"{fidelity_table(found)}\n\n{recommendation(found)}\n\nFigure: {run / 'fidelity.png'}"
