"""Tables of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns, which reads well on a terminal too; numbers stand to
    the right."""
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
    rule = (
        "|"
        + "|".join(
            "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":"
            for i, width in enumerate(widths)
        )
        + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def spread(values: Sequence[float], show: Callable[[float], str] = percent) -> str:
    """The mean of several seeds' values, with the lowest and the highest if they differ."""
    middle = show(statistics.mean(values))
    return (
        middle
        if min(values) == max(values)
        else f"{middle} ({show(min(values))} - {show(max(values))})"
    )
