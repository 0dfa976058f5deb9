"""From the last layer's output to the expected embedding of the next token, in the units of the
first layer's input."""

from __future__ import annotations

from collections.abc import Callable

import torch

from undertow.host.offloading import weight_of
from undertow.host.owners import Owners
from undertow.host.support import refuse

FINAL_NORMS = ("norm", "ln_f", "norm_f", "final_layer_norm", "final_layernorm", "layer_norm")


def final_norm(owners: Owners) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm between a model's last layer and its head.

    Raises:
        UnsupportedArchitectureError: none was found.
    """
    for name in FINAL_NORMS:
        if hasattr(owners.backbone, name):
            return getattr(owners.backbone, name)
    raise refuse(owners.model, "this needs its final norm, which was not found")


class ExpectedEmbedding:
    """``softmax(head(norm(h))) E``: the model's own final norm, head and embeddings, looked up at
    every call.

    A plain object, so that the modules it refers to keep their one place in the model.
    """

    def __init__(self, owners: Owners) -> None:
        self.owners = owners
        self.scale = 1.0  # of the embeddings on their way into the first layer

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's logits ``[B, n, vocabulary]`` for the last layer's output ``[B, n, D]``."""
        norm, head = final_norm(self.owners), self.owners.model.get_output_embeddings()
        if head is None:
            raise refuse(self.owners.model, "this needs logits, and it has no language-model head")
        config = self.owners.model.config.get_text_config()
        logits: torch.Tensor = head(norm(hidden))
        logits = (
            logits
            * (getattr(config, "logit_scale", None) or 1)
            / (getattr(config, "logits_scaling", None) or 1)
        )
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(self.logits(hidden), dim=-1)
        with weight_of(self.owners.model.get_input_embeddings()) as embeddings:
            probabilities = probabilities[..., : embeddings.shape[0]].to(embeddings.dtype)
            return self.scale * (probabilities @ embeddings).to(hidden.dtype)

    def verify(
        self, ids: torch.Tensor, first: torch.Tensor, last: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Check the formula on one forward of the model: its token ids, first layer's input, last
        layer's output, logits.

        Raises:
            UnsupportedArchitectureError: the model adds to its embeddings before the first layer,
                or turns the last layer's output into logits in another way.
        """
        with weight_of(self.owners.model.get_input_embeddings()) as weight:
            embeddings = weight[ids].float()
        dtype = first.dtype
        fitted = (first.float() * embeddings).sum() / embeddings.pow(2).sum()
        # Some models round the scale to their own type, and all round the product.
        scales = fitted, fitted.to(dtype).float()
        self.scale = float(
            max(scales, key=lambda scale: int(((scale * embeddings).to(dtype) == first).sum()))
        )
        rounding = max(1e-3, torch.finfo(dtype).eps)
        if not torch.allclose(first.float(), self.scale * embeddings, rtol=rounding, atol=1e-5):
            raise refuse(
                self.owners.model,
                "soft tokens replace token embeddings, but its first layer sees more (learned "
                "positions or a norm)",
            )
        if not torch.allclose(self.logits(last).float(), logits.float(), rtol=rounding, atol=1e-4):
            raise refuse(
                self.owners.model,
                "soft tokens need its logits to be head(norm(h)), scaled or capped, which they "
                "are not",
            )
