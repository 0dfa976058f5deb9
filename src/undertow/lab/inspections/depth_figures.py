"""Figures of what a recurrent-depth model's iterations do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from undertow.lab.evaluation.figures import new_figure, save_figure
from undertow.lab.inspections.depth import ExitResult


def depth_figure(
    curves: Mapping[str, Mapping[int, float]], path: Path, quantity: str, trained: int | None = None
) -> None:
    """A quantity against the number of iterations, one curve each; `trained` marks the trained
    mean."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker="o", markersize=4, label=name)
    if trained is not None:
        axes.axvline(trained, color="0.5", linestyle="--", linewidth=1, label="trained mean")
    axes.set(xlabel="iterations", ylabel=quantity, xscale="log")
    ticks = sorted({depth for curve in curves.values() for depth in curve})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(alpha=0.25)
    axes.legend()
    save_figure(figure, path)


def convergence_figure(distances: torch.Tensor, words: Sequence[str], path: Path) -> None:
    """The distance to the end ``[depth, T]`` of one row's tokens, iterations upwards, as a map in
    powers of ten."""
    figure = new_figure(max(5.0, 0.28 * len(words)), 4.5)
    axes = figure.subplots()
    image = axes.imshow(
        distances[:-1].clamp(min=1e-6).log10(),
        aspect="auto",
        origin="lower",
        cmap="magma",
        vmin=-4,
        vmax=0.5,
    )
    axes.set_xticks(
        range(len(words)), words, fontsize=7, rotation=0 if all(len(w) < 3 for w in words) else 90
    )
    axes.set(
        xlabel="token", ylabel="iteration", title="distance to the last state (relative, log10)"
    )
    figure.colorbar(image, ax=axes)
    save_figure(figure, path)


def exits_figure(results: Sequence[ExitResult], path: Path) -> None:
    """How many tokens stop at each depth, one panel a rule."""
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    figure = new_figure(3.2 * columns, 2.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, result in zip(panels, results, strict=False):
        axes.bar(range(1, len(result.histogram) + 1), result.histogram)
        axes.set_title(f"{result.rule.kind}: {result.mean_depth:.1f} a token", fontsize=8)
        axes.set(xlabel="depth", ylabel="tokens")
    for axes in panels[len(results) :]:
        axes.set_visible(False)
    save_figure(figure, path)


def trajectories_figure(
    components: torch.Tensor,
    words: Sequence[str],
    kinds: Sequence[str],
    chosen: Sequence[int],
    path: Path,
) -> None:
    """The ways of chosen tokens ``[depth + 1, T, 6]`` through three planes of principal
    components."""
    planes = [(a, a + 1) for a in range(0, components.shape[-1] - 1, 2)][:3]
    figure = new_figure(3.2 * len(planes), 2.6 * len(chosen))
    panels = figure.subplots(len(chosen), len(planes), squeeze=False)
    for row, token in zip(panels, chosen, strict=True):
        for axes, (first, second) in zip(row, planes, strict=True):
            way = components[:, token]
            axes.plot(way[:, first], way[:, second], linewidth=0.8, color="0.6")
            axes.scatter(way[:, first], way[:, second], c=range(len(way)), cmap="viridis", s=8)
            axes.scatter(way[-1, first], way[-1, second], marker="x", color="red", s=25)
            axes.set_title(
                f"{words[token]!r} ({kinds[token]}), components {first + 1}-{second + 1}",
                fontsize=7,
            )
            axes.tick_params(labelsize=6)
    save_figure(figure, path)
