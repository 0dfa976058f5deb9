"""A recurrence's place in the model that it is part of, and its way back."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


class Owners:
    """The hosted model and its backbone: a plain object, so that they do not become submodules of
    their own submodule.

    Attributes:
        model: the causal language model.
        backbone: the module that owns the layer list.
        hooks: the hooks that attaching put on both.
    """

    def __init__(self, model: PreTrainedModel, backbone: nn.Module) -> None:
        self.model, self.backbone = model, backbone
        self.hooks: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Owners:
        # A copy of the whole model owns its copied recurrence. A copy of the recurrence alone,
        # which PEFT makes for each adapter, stays with the model: it must not drag in a copy of
        # that.
        if id(self.model) not in memo:
            return self
        copied = memo[id(self)] = copy.copy(self)
        copied.model, copied.backbone = memo[id(self.model)], copy.deepcopy(self.backbone, memo)
        copied.hooks = copy.deepcopy(self.hooks, memo)
        return copied
