"""The LSTM, T²MLR's recurrent baseline on S5-Retrieval: a state of fixed size, and nothing to look
back at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from undertow.models.whole import WholeSequenceModel


class LSTMConfig(PreTrainedConfig):
    """Shape of an `LSTMForCausalLM`, under the names that Transformers have for it."""

    model_type = "lstm"

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        num_hidden_layers: int = 4,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.initializer_range = initializer_range
        super().__init__(**kwargs)


class LSTMForCausalLM(WholeSequenceModel):
    """Token embeddings, a stack of LSTM layers as wide as they are, and a linear head.

    8 d² + 8 d parameters a layer of width d, against about 12 d² of a Llama layer.
    """

    config_class = LSTMConfig
    base_model_prefix = ""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.LSTM(width, width, config.num_hidden_layers, batch_first=True)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits ``[B, T, V]`` for ids ``[B, T]``, and the loss if there are labels ``[B, T]``, not
        shifted.

        Padding, on either side, is passed over: the state before it goes on after it. Where
        `position_ids` ``[B, T]`` are 0 a packed document begins, and the state is that of the
        start; there is no mask then.
        """
        embedded = self.embed_tokens(input_ids)
        with torch.autocast(
            embedded.device.type, enabled=False
        ):  # not every CPU has an LSTM in bf16
            if attention_mask is None and position_ids is not None:
                hidden = self._by_document(embedded, position_ids)
            elif attention_mask is None or bool(attention_mask.all()):
                hidden = self.layers(embedded)[0]
            else:
                # Each row's own tokens first, in their order; what padding puts out is never looked
                # at.
                order = (
                    attention_mask.long()
                    .argsort(dim=1, descending=True, stable=True)[..., None]
                    .expand_as(embedded)
                )
                hidden = self.layers(embedded.gather(1, order))[0]
                hidden = torch.zeros_like(hidden).scatter(1, order, hidden)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutput(loss=loss, logits=logits)

    def _by_document(self, embedded: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """The layers' output ``[B, T, D]`` with each document read on its own, as a row of a padded
        batch."""
        begins = position_ids.expand(embedded.shape[:2]) == 0
        begins = torch.cat([torch.ones_like(begins[:, :1]), begins[:, 1:]], dim=1).flatten()
        document = begins.long().cumsum(0) - 1  # [B * T]
        lengths = document.bincount()
        offset = (
            torch.arange(len(document), device=document.device)
            - (lengths.cumsum(0) - lengths)[document]
        )
        rows = embedded.new_zeros(len(lengths), int(lengths.max()), embedded.shape[-1])
        rows[document, offset] = embedded.flatten(0, 1)
        hidden: torch.Tensor = self.layers(rows)[0][document, offset]
        return hidden.view_as(embedded)


AutoConfig.register(LSTMConfig.model_type, LSTMConfig)
AutoModelForCausalLM.register(LSTMConfig, LSTMForCausalLM)
