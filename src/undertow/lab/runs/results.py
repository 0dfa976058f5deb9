"""What evaluations find, as a run's folder keeps it and as tables: accuracy and loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from undertow.errors import CheckpointError, ConfigError
from undertow.lab.tables import percent, table
from undertow.mapping import from_mapping
from undertow.reading import read_json
from undertow.sentences import expected
from undertow.settings import settings

MEND = "the file is damaged; run `undertow eval` again"


@settings
class Accuracy:
    """How many answers of one length were right.

    Attributes:
        length: the task's own size; None for a whole data set.
        temperature: of the sampling; 0 for greedy answers.
        correct, total: answers, or sequences all of whose labels are right.
        right_symbols, symbols: single labels, or tokens of right answers for a task that scores
            them; None for others.
    """

    length: int | None
    temperature: float
    correct: int
    total: int
    right_symbols: int | None = None
    symbols: int | None = None

    @property
    def share(self) -> float:
        return self.correct / self.total

    @property
    def symbol_share(self) -> float | None:
        if self.right_symbols is None or self.symbols is None:
            return None
        return self.right_symbols / self.symbols

    @staticmethod
    def together(results: Sequence[Accuracy]) -> Accuracy:
        """The accuracy of several results of one length and temperature, such as those of several
        seeds."""
        counts = [
            [r.right_symbols, r.symbols]
            for r in results
            if r.right_symbols is not None and r.symbols is not None
        ]
        right_symbols, symbols = (
            (sum(each) for each in zip(*counts, strict=True)) if counts else (None, None)
        )
        return Accuracy(
            results[0].length,
            results[0].temperature,
            sum(result.correct for result in results),
            sum(result.total for result in results),
            right_symbols,
            symbols,
        )


@dataclass(frozen=True)
class Loss:
    """The mean cross-entropy of predicted tokens.

    Attributes:
        loss: in nats a token.
        tokens: how many were predicted.
        windows: how many windows they stand in, and of how many the split has.
        left_out: how many of the split are too long.
    """

    loss: float
    tokens: int
    windows: int
    of: int
    left_out: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def read_accuracies(path: Path) -> tuple[Accuracy, ...]:
    """The accuracies that an evaluation wrote down.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        rows = read_json(path, CheckpointError, MEND)
        if not isinstance(rows, list):
            raise expected("accuracies", "[section, ...]", rows)
        found = tuple(from_mapping(Accuracy, row, f"accuracies[{i}]") for i, row in enumerate(rows))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}; {MEND}") from error
    for each in found:
        symbols = (each.right_symbols or 0, each.symbols or 0)
        if (
            not 0 <= each.correct <= each.total
            or each.total < 1
            or not 0 <= symbols[0] <= symbols[1]
        ):
            raise CheckpointError(
                f"{path} counts {each.correct} right answers of {each.total}; {MEND}"
            )
    return found


def read_loss(path: Path) -> float:
    """The loss a token, in nats, that an evaluation wrote down.

    Raises:
        CheckpointError: the file is damaged.
    """
    held = read_json(path, CheckpointError, MEND)
    loss = held.get("loss") if isinstance(held, dict) else None
    if not isinstance(loss, int | float) or isinstance(loss, bool):
        raise CheckpointError(f"{path} has no number as 'loss'; {MEND}")
    return float(loss)


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


def loss_table(losses: Mapping[str, Loss]) -> str:
    """Loss and perplexity by the name of the model."""
    return table(
        ["model", "loss", "perplexity", "tokens", "windows", "of"],
        [
            [name, f"{loss.loss:.4f}", f"{loss.perplexity:.3f}", loss.tokens, loss.windows, loss.of]
            for name, loss in losses.items()
        ],
    )
