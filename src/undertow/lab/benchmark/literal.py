"""The exact rollout as the papers write it down: all layers in the loop over tokens, the cache
grown by concatenation.

TurboConn's Algorithm 1, and T²MLR's recurrence token by token. It is the baseline that the solvers
are measured against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from undertow.host import detach
from undertow.host.attachment import find_pathway


class LiteralRollout(nn.Module):
    """A hosted model's weights, run group by group through the whole backbone with an ordinary
    growing cache."""

    def __init__(self, hosted: Any) -> None:
        super().__init__()
        self.pathway = find_pathway(hosted)
        self.model = detach(hosted)
        layers = list(self.model.model.layers)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(index))
            layer.register_forward_hook(self._after(index))
        self.received: torch.Tensor | None = None
        self.readings: list[torch.Tensor] = []

    def _before(self, index: int) -> Any:
        def write(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return (self._site(index, args[0]), *args[1:])

        return write

    def _after(self, index: int) -> Any:
        def read(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
            last = index + 1 == self.model.config.num_hidden_layers
            return self._site(index + 1, output) if last else output

        return read

    def _site(self, site: int, hidden: torch.Tensor) -> torch.Tensor:
        received = self.received
        if received is None and self.pathway.writes_without_state:
            received = hidden.new_zeros(*hidden.shape[:2], self.pathway.state_width)
        if site in self.pathway.writes and received is not None:
            hidden = hidden + self.pathway.write(site, hidden, received)
        if site in self.pathway.reads:
            self.readings.append(self.pathway.read(site, hidden))
        return hidden

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        cache = DynamicCache(config=self.model.config)
        outputs = []
        state: torch.Tensor | None = None
        lag = self.pathway.lag
        for start in range(0, input_ids.shape[1], lag):
            ids = input_ids[:, start : start + lag]
            self.received = None if state is None else state[:, : ids.shape[1]]
            self.readings = []
            # The cache goes by position, whatever its keyword is called.
            outputs.append(self.model.model(ids, None, None, cache, use_cache=True)[0])
            state = self.pathway.update(self.readings, self.received)
        self.received, self.readings = None, []
        logits = self.model.lm_head(torch.cat(outputs, dim=1))
        loss = None
        if labels is not None:
            loss = self.model.loss_function(logits, labels, vocab_size=self.model.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)
