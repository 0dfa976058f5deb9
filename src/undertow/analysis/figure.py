"""One figure of lines, as the analyses draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from undertow.errors import ConfigError


def lines_figure(
    lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str, x: str, y: str, zero: bool = False
) -> None:
    """Lines by label, each a sequence of points, as a PNG; `zero` marks the height 0.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('figures need matplotlib; install it with: pip install "undertow[train]"') from error
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), linewidth=1.2, label=label)
    if zero:
        axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")
    temporary = path.with_name(f".{path.name}.writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(temporary, format="png")
    temporary.replace(path)
