"""Loss by position in the sequence, and the size of the recurrent state there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from undertow.host.attachment import find_attachment, find_pathway, recurs_in_time
from undertow.lab.evaluation.accuracy import evaluating
from undertow.lab.evaluation.figures import lines_figure
from undertow.lab.inspections.inspection import examples, inspection
from undertow.lab.inspections.looking import batches_of
from undertow.lab.runs.run import Experiment
from undertow.lab.tables import table
from undertow.lab.tasks import model_inputs, real_tokens
from undertow.lab.tasks.encode import IGNORED
from undertow.lab.training.solver_gap import loss_and_states
from undertow.solvers import Sequential

Batch = Mapping[str, torch.Tensor]


def loss_by_position(model: Any, batches: Sequence[Batch]) -> dict[int, float]:
    """The mean loss of what is predicted from each position, over rows and batches; positions
    without labels are left out.

    Args:
        batches: what `PadCollator` makes: input_ids and labels ``[B, T]``, padded on the right.
    """
    totals: dict[int, tuple[float, int]] = {}
    with evaluating(model):
        for batch in batches:
            inputs = model_inputs(batch, model.device)
            logits = model(**inputs, use_cache=False).logits[:, :-1].float()
            labels = batch["labels"][:, 1:].to(logits.device)
            losses = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
            )
            for position, (total, count) in enumerate(
                zip(losses.sum(0).tolist(), (labels != IGNORED).sum(0).tolist(), strict=True)
            ):
                before = totals.get(position, (0.0, 0))
                totals[position] = before[0] + total, before[1] + count
    return {position: total / count for position, (total, count) in totals.items() if count}


def state_norms(model: Any, batches: Sequence[Batch]) -> dict[int, float]:
    """The mean length of the state that each position receives, over the square root of its width:
    its root mean square.

    Of the exact rollout; the first `lag` positions receive none, and padding does not count. One
    `[B, T, W]` state a batch is held at a time.

    Raises:
        ConfigError: the model has no recurrence.
    """
    attachment, lag = find_attachment(model), find_pathway(model).lag
    totals: dict[int, tuple[float, int]] = {}
    with evaluating(model):
        for batch in batches:
            inputs: dict[str, Any] = {
                name: tensor.to(model.device) for name, tensor in batch.items()
            }
            inputs["use_cache"] = False  # with a cache, packed documents would see each other
            _, states = loss_and_states(model, attachment, inputs, Sequential())
            sizes = states.float().pow(2).mean(-1).sqrt()  # [B, T]
            present = real_tokens(inputs)
            for position in range(lag, sizes.shape[1]):
                own = sizes[:, position][present[:, position]]
                before = totals.get(position, (0.0, 0))
                totals[position] = before[0] + float(own.sum()), before[1] + len(own)
    return {position: total / count for position, (total, count) in totals.items() if count}


@inspection("positions", "loss and state by position", examples(16))
def inspect_positions(run: Path, examples: int) -> str:
    """Loss by position and, with a recurrence, the size of the state there, on held-out examples: a
    figure and a table.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: there are no examples.
    """
    model, _, (valid,) = batches_of(Experiment(run), examples, "valid")
    lines = {"loss": loss_by_position(model, valid)}
    if recurs_in_time(model):
        lines["state"] = state_norms(model, valid)
    for name, line in lines.items():
        label = "loss (nats)" if name == "loss" else "root mean square of the state"
        lines_figure(
            {name: list(line.items())}, run / f"{name}-by-position.png", run.name, "position", label
        )
    last = max(lines["loss"])
    bounds = [0, *(2**n for n in range(last.bit_length()))]
    rows = []
    for start, stop in zip(bounds, [*bounds[1:], last + 1], strict=True):
        cells = []
        for line in lines.values():
            own = [value for position, value in line.items() if start <= position < stop]
            cells.append(f"{sum(own) / len(own):.4f}" if own else "")
        rows.append([f"{start} to {stop - 1}" if stop - 1 > start else start, *cells])
    return f"{table(['position', *lines], rows)}\n\nFigures: {run}/*-by-position.png"
