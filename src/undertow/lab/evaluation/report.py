"""Tables of results."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.lab.evaluation.accuracy import Accuracy
from undertow.lab.tables import percent, table


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
