"""Tables and figures of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undertow.errors import ConfigError
from undertow.evaluation.accuracy import Accuracy


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns, which reads well on a terminal too; numbers stand to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def accuracy_table(results: Sequence[Accuracy]) -> str:
    """Accuracy by length and kind of decoding, and of single symbols where they were counted."""
    header = ["length", "decoding", "right", "of", "accuracy"]
    by_symbol = any(result.symbol_share is not None for result in results)
    rows = []
    for result in results:
        row: list[object] = [
            "all" if result.length is None else result.length,
            "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}",
            result.correct,
            result.total,
            percent(result.share),
        ]
        if by_symbol:
            row.append("" if result.symbol_share is None else percent(result.symbol_share))
        rows.append(row)
    return table([*header, "by symbol"] if by_symbol else header, rows)


def accuracy_figure(
    curves: Mapping[str, Sequence[Accuracy]],
    path: Path,
    title: str,
    unit: str,
    trained: int | None = None,
    chance: float | None = None,
) -> None:
    """Accuracy against length, one curve a model, as a PNG; `trained` marks the longest trained length.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, axes = new_axes()
    for (name, results), marker in zip(curves.items(), "osD^vP*X" * len(curves), strict=False):
        axes.plot(
            [r.length or 0 for r in results], [100 * r.share for r in results], marker=marker, markersize=4, label=name
        )
    if trained is not None:
        axes.axvline(trained, color="0.5", linestyle="--", linewidth=1, label="longest trained")
    if chance is not None:
        axes.axhline(100 * chance, color="0.8", linewidth=1, label="chance")
    axes.set(title=title, xlabel=unit, ylabel="accuracy (%)", ylim=(0, 103))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left")
    save_figure(figure, path)


def new_axes() -> tuple[Any, Any]:
    """An empty figure of the size that all of ours have.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('figures need matplotlib; install it with: pip install "undertow[train]"') from error
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    return figure, figure.subplots()


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG, whole or not at all."""
    temporary = path.with_name(f".{path.name}.writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def curves_figure(
    curves: Mapping[tuple[str, ...], Sequence[Sequence[tuple[int, float]]]], path: Path, title: str, unit: str
) -> None:
    """Curves of a measure against the training step as a PNG: a panel for each first label, a line a seed.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('figures need matplotlib; install it with: pip install "undertow[train]"') from error
    panels = list(dict.fromkeys(labels[0] if len(labels) > 1 else "" for labels in curves))
    figure = Figure(figsize=(max(7, 4.5 * len(panels)), 4), dpi=150, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        own = {labels: seeds for labels, seeds in curves.items() if len(labels) == 1 or labels[0] == panel}
        for number, (labels, seeds) in enumerate(own.items()):
            name: str | None = ", ".join(labels[1:] or labels)
            for points in filter(None, seeds):
                marker = "." if len(points) == 1 else None  # one point makes no line
                axes.plot(
                    *zip(*points, strict=True), color=f"C{number % 10}", marker=marker, linewidth=1, alpha=0.8, label=name
                )
                name = None
        axes.set(title=panel or title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.25)
        if axes.lines:
            axes.legend(fontsize="small")
    temporary = path.with_name(f".{path.name}.writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(temporary, format="png")
    temporary.replace(path)
