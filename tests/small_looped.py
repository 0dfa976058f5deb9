"""Tiny looped models whose loop has weights, and their inputs."""

import copy
import functools
from typing import Any

import torch
from helpers import unhosted
from transformers import PreTrainedModel

import undertow
from undertow import Looped

# On models of four layers.
LOOPS: dict[str, Looped] = {
    "adapter": Looped((0,), (1, 2), (3,), depth=4, backward=2),
    "plain": Looped((0,), (1, 2), (3,), injection="none", depth=4, backward=2),
    "dropping": Looped((0,), (2,), (3,), depth=4, backward=2),
    "whole": Looped.whole(4, depth=4, backward=2),
}


@functools.cache
def _looped(name: str, loop: str) -> PreTrainedModel:
    model = undertow.attach(unhosted(name), LOOPS[loop])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "recurrence.loop.adapter" in key:
                width = parameter.shape[0]
                parameter[:, :width] = 0.3 * torch.eye(width)
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            elif "recurrence.loop.gate" in key:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def looped(name: str, loop: str = "adapter") -> PreTrainedModel:
    """A tiny model with a loop whose weights are not the initial ones."""
    return copy.deepcopy(_looped(name, loop))


def padded(
    lengths: tuple[int, ...] = (9, 5, 7),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Left-padded ids and mask of rows of these lengths, and the rows alone."""
    generator = torch.Generator().manual_seed(11)
    rows = [torch.randint(2, 97, (1, length), generator=generator) for length in lengths]
    width = max(lengths)
    ids, mask = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, dtype=torch.long),
    )
    for row, text in enumerate(rows):
        ids[row, width - text.shape[1] :], mask[row, width - text.shape[1] :] = text[0], 1
    return ids, mask, rows


def run(model: Any, ids: torch.Tensor, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, **inputs)
