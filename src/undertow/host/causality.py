"""A recurrence from token to token needs a causal model: no token attends to a later one.

Text is causal. Images often are not: the tokens of one see each other, and a rollout token by token would show each of them
only those before it. Some models say so in their configuration, others in the masks of an input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from undertow.host.arguments import CallLayout
from undertow.host.stack import Recording
from undertow.host.support import refuse


def check_kernels(model: PreTrainedModel, stack: nn.ModuleList) -> None:
    """Refuse a model whose attention sees later tokens without a mask that says so."""
    if any(getattr(module, "is_causal", True) is False for module in stack.modules()):
        raise refuse(model, "its attention is bidirectional: tokens see later ones, and so would the states carried to them")


def check_masks(model: PreTrainedModel, recording: Recording, layouts: list[CallLayout], past: int) -> None:
    """Refuse an input in which a token attends to a later one.

    A mask ``[B, 1, T, K]`` holds True, or nearly 0, where a token attends; its last keys, or those from the `past`-th on
    where it reaches as far as a static cache, are the new tokens' own.
    """
    tokens = recording.hidden.shape[1]
    if tokens == 1:
        return
    checked = set()
    for call, layout in zip(recording.calls, layouts, strict=True):
        for path in layout.masks:
            mask = at(call, path)
            if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or id(mask) in checked:
                continue
            checked.add(id(mask))
            if mask.dtype == torch.bool:
                seen = ~mask if path in layout.inverted else mask
            else:
                seen = mask > torch.finfo(mask.dtype).min / 2
            if seen.triu(min(past, mask.shape[-1] - tokens) + 1).any():
                raise refuse(
                    model,
                    "this input lets tokens attend to later ones, as the tokens of an image often do, and then no state can "
                    "be carried from one to the next; give it text, or take the recurrence off with undertow.detach(model)",
                )


def at(call: Any, path: tuple[Any, ...]) -> Any:
    """What is at a path in a call; None where it has none."""
    for step in path:
        try:
            call = call[step]
        except (IndexError, KeyError, TypeError):
            return None
    return call
