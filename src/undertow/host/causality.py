"""A recurrence from token to token needs a causal model: no token attends to a later one.

Text is causal. Images often are not: the tokens of one see each other, and a rollout token by token
would show each of them only those before it. Some models say so in their configuration, others in
the masks of an input.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from undertow.host.support import refuse


def check_kernels(model: PreTrainedModel, stack: nn.ModuleList) -> None:
    """Refuse a model whose attention sees later tokens without a mask that says so."""
    if any(getattr(module, "is_causal", True) is False for module in stack.modules()):
        raise refuse(
            model,
            "its attention is bidirectional: tokens see later ones, and so would the states "
            "carried to them",
        )


def check_masks(model: PreTrainedModel, masks: list[torch.Tensor], tokens: int, past: int) -> None:
    """Refuse an input in which a token attends to a later one.

    The last keys of `masks` ``[B, 1, T, keys]``, or those from the `past`-th on where they reach as
    far as a static cache, are the new tokens' own.
    """
    if tokens == 1 or torch.compiler.is_compiling():  # what is traced may hold no decision
        return
    for mask in masks:
        if mask.triu(min(past, mask.shape[-1] - tokens) + 1).any():
            raise refuse(
                model,
                "this input lets tokens attend to later ones, as the tokens of an image often do, "
                "and then no state can be carried from one to the next; give it text, or take the "
                "recurrence off with undertow.detach(model)",
            )
