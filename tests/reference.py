"""The definition of a recurrence in time, written out naively: one token after another through the
whole plain model.

Shares no code with the library. The model is an ordinary one with its ordinary growing cache,
through which gradients flow; hooks on its layers apply the pathway's equations to the parameters of
a hosted model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from undertow import T2MLR, SoftToken, TurboConn
from undertow.pathways import Recurrence

Weights = Mapping[str, torch.Tensor]
PLACES = (
    "model.layers",
    "transformer.h",
    "transformer.blocks",
    "gpt_neox.layers",
    "model.decoder.layers",
)


def rollout(
    model: PreTrainedModel,
    settings: Recurrence,
    weights: Weights,
    ids: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    truncate: int | None = None,
) -> torch.Tensor:
    """The logits ``[B, T, V]`` of the plain `model` with a recurrence of these settings and
    weights.

    `mask` says which tokens carry and receive a state. With `truncate` the states that enter each
    `truncate`-th group of lag tokens are detached.
    """
    equations = EQUATIONS[type(settings)](model, settings, weights)
    lag = getattr(settings, "lag", 1)
    mask = torch.ones_like(ids) if mask is None else mask
    cache = DynamicCache(config=model.config)
    states: list[Any] = []
    logits = []
    for t in range(ids.shape[1]):
        state = states[t - lag] if t >= lag else None
        if truncate is not None and state is not None and t // lag % truncate == 0:
            state = {name: value.detach() for name, value in state.items()}
        receives = (mask[:, t] * (mask[:, t - lag] if t >= lag else 0))[:, None, None].to(
            model.dtype
        )
        equations.begin(state, receives, active=mask[:, t, None, None].to(model.dtype))
        with equations.hooked():
            output = model(ids[:, t : t + 1], use_cache=True, **{equations.cache_keyword: cache})
        states.append(equations.end(output.logits))
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


class Equations:
    """What happens to the residual stream of one token at the input and at the output of each
    layer."""

    cache_keyword = "cache"

    def __init__(self, model: PreTrainedModel, settings: Any, weights: Weights) -> None:
        self.model, self.settings, self.weights = model, settings, weights
        place = next(name for name in PLACES if _has(model, name))
        stack: Any = model.get_submodule(place)
        self.layers: list[torch.nn.Module] = list(stack)

    def begin(
        self, state: dict[Any, torch.Tensor] | None, receives: torch.Tensor, active: torch.Tensor
    ) -> None:
        """Take the state of the token lag back, and for each row whether this token receives it and
        is active."""
        self.state, self.receives, self.active = state, receives, active
        self.new: dict[Any, torch.Tensor] = {}

    def before(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        return h

    def after(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        return h

    def end(self, logits: torch.Tensor) -> dict[Any, torch.Tensor]:
        """The state of this token."""
        return self.new

    @contextmanager
    def hooked(self) -> Iterator[None]:
        def before(layer: int) -> Any:
            return lambda module, args: (self.before(layer, args[0]), *args[1:])

        def after(layer: int) -> Any:
            def change(module: Any, args: Any, output: Any) -> Any:
                if isinstance(output, tuple):
                    return (self.after(layer, output[0]), *output[1:])
                return self.after(layer, output)

            return change

        handles = [m.register_forward_pre_hook(before(i)) for i, m in enumerate(self.layers)]
        handles += [m.register_forward_hook(after(i)) for i, m in enumerate(self.layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class TurboConnEquations(Equations):
    """Algorithm 1 of the paper: after a layer ran, first what enters its output, then what leaves
    it."""

    def after(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        connections, rank = sorted(self.settings.connections), self.settings.rank
        for source, destination in connections:
            if destination == layer and self.state is not None:
                entering = [s for s, d in connections if d == destination]
                k = entering.index(source)
                up = self.weights[f"up.{destination}.weight"][:, k * rank : (k + 1) * rank]
                bias = self.weights[f"up.{destination}.bias"][k]
                added = self.state[source, destination] @ up.T + bias
                h = h + self.receives * self.settings.alpha * added
        for source, destination in connections:
            if source == layer:
                leaving = [d for s, d in connections if s == source]
                k = leaving.index(destination)
                down = self.weights[f"down.{source}.weight"][k * rank : (k + 1) * rank]
                bias = self.weights[f"down.{source}.bias"][k * rank : (k + 1) * rank]
                size = h.pow(2).mean(-1, keepdim=True).sqrt() if self.settings.normalize else 1.0
                self.new[source, destination] = (h / size) @ down.T + bias
        return h


class T2MLREquations(Equations):
    def received(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(like) if self.state is None else self.receives * self.state["R"]

    def before(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        if layer != self.settings.first_layer:
            return h
        d = h.shape[-1]
        f, bias = self.weights["gates.weight"], self.weights["gates.bias"]
        p = self.received(h) @ self.weights["project.weight"].T
        both = torch.cat([h, p], dim=-1)
        recurrent = torch.sigmoid(both @ f[:d].T + bias[:d])
        current = torch.sigmoid(both @ f[d:].T + bias[d:])
        gamma_recurrent = torch.tanh(self.weights["gamma_recurrent"])
        gamma_current = torch.tanh(self.weights["gamma_current"])
        return h + self.active * (gamma_recurrent * recurrent * p + gamma_current * current * h)

    def after(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        if layer == self.settings.last_layer:
            residual = self.received(h)
            total = h + (residual.detach() if self.settings.detach_residual else residual)
            mean_square = (total**2).mean(-1, keepdim=True) + 1e-6
            if self.settings.norm == "rms":
                self.new["R"] = total / mean_square.sqrt()
            else:
                self.new["R"] = total * (1 / mean_square.sqrt()).clamp(0.2, 5).detach()
        return h


class SoftTokenEquations(Equations):
    """The embeddings are those that the first layer gets for each token of the vocabulary, the
    padding token included."""

    def __init__(self, model: PreTrainedModel, settings: Any, weights: Weights) -> None:
        super().__init__(model, settings, weights)
        seen: list[torch.Tensor] = []
        handle = self.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        table: Any = model.get_input_embeddings()
        padding, table.padding_idx = table.padding_idx, None  # or its row would get no gradient
        model(torch.arange(model.config.get_text_config().vocab_size)[:, None], use_cache=False)
        table.padding_idx = padding
        handle.remove()
        self.embeddings = seen[0][:, 0]

    def before(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        if layer > 0 or self.state is None:
            return h
        weight = self.settings.weight
        return h + self.receives * ((1 - weight) * h + weight * self.state["E"] - h)

    def end(self, logits: torch.Tensor) -> dict[Any, torch.Tensor]:
        return {"E": torch.softmax(logits, dim=-1) @ self.embeddings}


EQUATIONS: dict[type[Recurrence], type[Equations]] = {
    TurboConn: TurboConnEquations,
    T2MLR: T2MLREquations,
    SoftToken: SoftTokenEquations,
}


def _has(model: PreTrainedModel, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
