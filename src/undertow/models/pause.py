"""Pause tokens (Goyal et al., 2024): T²MLR's baseline of the same parameters and twice the cost a
token."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from undertow.errors import ConfigError
from undertow.models.whole import WholeSequenceModel


class PauseConfig(PreTrainedConfig):
    """The config of a model with pauses: the base model's, and how many pauses follow each
    token."""

    model_type = "undertow_pause"

    def __init__(self, base: dict[str, Any] | None = None, pauses: int = 1, **kwargs: Any) -> None:
        self.base, self.pauses = base or {}, pauses
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            kwargs.setdefault(name, self.base.get(name))
        read = self.base.get("max_position_embeddings") or self.base.get("n_positions")
        if read is not None:  # a token and its pauses take a position each
            kwargs.setdefault("max_position_embeddings", read // (1 + pauses))
        super().__init__(**kwargs)


class PauseForCausalLM(WholeSequenceModel):
    """A causal language model that reads `pauses` pause tokens after each token, and predicts from
    the last of them.

    The pauses are inside: ids, labels and logits are those of the sequence without them, so that a
    pause is never predicted, and evaluation is that of any model. With one pause, the paper's "2x",
    each layer runs twice a token. All pauses share one learned embedding. Positions count them.
    """

    config_class = PauseConfig
    base_model_prefix = "base"

    def __init__(self, config: PauseConfig) -> None:
        super().__init__(config)
        settings = dict(config.base)
        self.base = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings)
        )
        self.pause = nn.Parameter(torch.zeros(self.base.get_input_embeddings().weight.shape[1]))
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.base.get_output_embeddings()

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

        `position_ids` ``[B, T]`` that start again with each packed document count tokens without
        their pauses.
        """
        rows, tokens = input_ids.shape
        each = 1 + self.config.pauses
        embedded = self.get_input_embeddings()(input_ids)
        pauses = self.pause.to(embedded.dtype).expand(rows, tokens, self.config.pauses, -1)
        paused = torch.cat([embedded[:, :, None], pauses], dim=2).flatten(1, 2)  # [B, T * each, D]
        if attention_mask is None and position_ids is not None:
            mask = None
            within = torch.arange(each, device=paused.device).repeat(tokens)
            positions = position_ids.repeat_interleave(each, dim=1) * each + within
        else:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            mask = mask.repeat_interleave(each, dim=1)
            positions = (mask.long().cumsum(1) - 1).clamp_min(0)
        output = self.base(
            inputs_embeds=paused,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=torch.arange(each - 1, tokens * each, each, device=paused.device),
            use_cache=False,
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=output.logits, labels=labels, vocab_size=output.logits.shape[-1], **kwargs
            )
        return CausalLMOutput(loss=loss, logits=output.logits)


def with_pauses(model: PreTrainedModel, pauses: int) -> PauseForCausalLM:
    """A model that reads `pauses` pauses after each token, around the given one; the pause starts
    as random as a token.

    Raises:
        ConfigError: the model cannot say which positions it shall predict from.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"{model.config.model_type} cannot have pauses, as its forward takes no "
            "logits_to_keep; use llama"
        )
    config = PauseConfig(
        model.config.to_dict(),
        pauses,
        **{
            name: getattr(model.config, name, None)
            for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        },
        tie_word_embeddings=model.config.tie_word_embeddings,
    )
    with torch.device("meta"):
        paused = PauseForCausalLM(config)
    embeddings: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    paused.base = model
    paused.pause = nn.Parameter(torch.randn_like(embeddings[0]) * embeddings.detach().std())
    return paused


AutoConfig.register(PauseConfig.model_type, PauseConfig)
AutoModelForCausalLM.register(PauseConfig, PauseForCausalLM)
