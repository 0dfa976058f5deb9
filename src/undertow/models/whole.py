"""What the native baselines have in common: they read a sequence as a whole, in generation too."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel


class WholeSequenceModel(PreTrainedModel, GenerationMixin):
    """A language model without a cache: each step of `generate()` reads the whole sequence again.

    That costs time that grows with the square of the length, which the short answers of our tasks
    can bear.
    """

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        *args: Any,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}
