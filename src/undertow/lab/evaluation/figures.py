"""Figures of results, as PNG files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undertow.errors import ConfigError
from undertow.lab.runs.results import Accuracy

MARKERS = "osD^vP*X"
Points = Sequence[tuple[float, float]]


def accuracy_figure(
    curves: Mapping[str, Sequence[Accuracy]],
    path: Path,
    title: str,
    unit: str,
    trained: int | None = None,
    chance: float | None = None,
) -> None:
    """Accuracy against length, one curve a model, as a PNG; `trained` marks the longest trained
    length.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, axes = new_axes()
    for (name, results), marker in zip(curves.items(), itertools.cycle(MARKERS), strict=False):
        shares = [100 * result.share for result in results]
        lengths = [result.length or 0 for result in results]
        axes.plot(lengths, shares, marker=marker, markersize=4, label=name)
    if trained is not None:
        axes.axvline(trained, color="0.5", linestyle="--", linewidth=1, label="longest trained")
    if chance is not None:
        axes.axhline(100 * chance, color="0.8", linewidth=1, label="chance")
    axes.set(title=title, xlabel=unit, ylabel="accuracy (%)", ylim=(0, 103))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left")
    save_figure(figure, path)


def lines_figure(
    lines: Mapping[str, Points],
    path: Path,
    title: str,
    x: str,
    y: str,
    marked: bool = False,
    zero: bool = False,
) -> None:
    """Lines by label, each a sequence of points, as a PNG; points may be marked, and the height
    0.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, axes = new_axes()
    markers = itertools.cycle(MARKERS if marked else [None])
    for (label, points), marker in zip(lines.items(), markers, strict=False):
        style = {"marker": marker, "markersize": 4, "linewidth": 1.2}
        axes.plot(*zip(*points, strict=True), label=label, **style)
    if zero:
        axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")
    save_figure(figure, path)


def curves_figure(
    curves: Mapping[tuple[str, ...], Sequence[Sequence[tuple[int, float]]]],
    path: Path,
    title: str,
    unit: str,
) -> None:
    """Curves of a measure against the training step as a PNG: a panel for each first label, a line
    a seed.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    panels = list(dict.fromkeys(labels[0] if len(labels) > 1 else "" for labels in curves))
    figure, every = new_panels(len(panels))
    for axes, panel in zip(every, panels, strict=True):
        own = {
            labels: seeds
            for labels, seeds in curves.items()
            if len(labels) == 1 or labels[0] == panel
        }
        for number, (labels, seeds) in enumerate(own.items()):
            name: str | None = ", ".join(labels[1:] or labels)
            for points in filter(None, seeds):
                marker = "." if len(points) == 1 else None  # one point makes no line
                axes.plot(
                    *zip(*points, strict=True),
                    color=f"C{number % 10}",
                    marker=marker,
                    linewidth=1,
                    alpha=0.8,
                    label=name,
                )
                name = None
        axes.set(title=panel or title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.25)
        if axes.lines:
            axes.legend(fontsize="small")
    save_figure(figure, path)


def new_axes() -> tuple[Any, Any]:
    """An empty figure and its axes."""
    figure, (axes,) = new_panels(1)
    return figure, axes


def new_panels(count: int) -> tuple[Any, Sequence[Any]]:
    """An empty figure with `count` axes side by side, which share their height."""
    figure = new_figure(max(7, 4.5 * count), 4)
    return figure, list(figure.subplots(1, count, squeeze=False, sharey=True)[0])


def new_figure(width: float, height: float) -> Any:
    """An empty figure, its size in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            'figures need matplotlib; install it with: pip install "undertow[train]"'
        ) from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG, whole or not at all."""
    temporary = path.with_name(f".{path.name}.writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(temporary, format="png")
    temporary.replace(path)
