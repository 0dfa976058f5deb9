"""When a token may stop iterating: exit rules, per token and per row.

A rule is settings. After each iteration from `minimum` on it is shown the evidence and answers
which tokens are done. Thresholds are those of arXiv 2502.05171's released code unless noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch.nn import functional as F

from undertow.depth.loop import Iterations
from undertow.errors import ConfigError
from undertow.registry import family, kinds, register
from undertow.settings import Share, settings


@dataclass
class Evidence:
    """What a rule may look at after an iteration, for the b rows that still run.

    Attributes:
        depth: iterations done.
        before, after: the state ``[b, T, D]`` before and after the iteration.
        logits: the logits ``[b, T, V]`` that the state gives, if the rule asked for them.
        positions: absolute positions ``[b, T]``.
        gate: the exit probability ``[b, T]`` that a learned gate gives a state, if the model has
            one.
    """

    depth: int
    before: torch.Tensor
    after: torch.Tensor
    logits: torch.Tensor | None
    positions: torch.Tensor
    gate: Callable[[torch.Tensor], torch.Tensor] | None


@family
@settings
class ExitRule:
    """The base of all rules: settings, and `decide`.

    Attributes:
        needs_logits: whether it looks at `evidence.logits`, for which coda and head run at every
            iteration that it is shown.
        needs_gate: whether it looks at `evidence.gate`.
    """

    kind: ClassVar[str] = ""
    needs_logits: ClassVar[bool] = False
    needs_gate: ClassVar[bool] = False

    minimum: Iterations = field(default=1, kw_only=True)
    """Iterations before the first check: no token stops earlier."""

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        """Which tokens may stop after this iteration, ``[b, T]`` of bools.

        `memory` is the rule's own for this forward, empty at its first iteration: tensors by name,
        with a row for each of the b rows that run.
        """
        raise NotImplementedError


@settings
class _Threshold(ExitRule):
    threshold: PositiveFloat = 1e-3
    """Stop when the quantity is below this."""


@register
class LatentDifference(_Threshold):
    """Stop when the state hardly changes: ‖s_i - s_{i-1}‖ / ‖s_i‖."""

    kind: ClassVar[str] = "latent-difference"
    threshold: PositiveFloat = 1e-33
    """Stop when the relative change is below this."""

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        change = (evidence.after - evidence.before).float().norm(dim=-1)
        return change < self.threshold * evidence.after.float().norm(dim=-1)


@register
class Cosine(_Threshold):
    """Stop when the state hardly turns: 1 - cos(s_i, s_{i-1})."""

    kind: ClassVar[str] = "cosine"
    threshold: PositiveFloat = 1e-3
    """Stop when the distance is below this."""

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        return (
            1 - F.cosine_similarity(evidence.after.float(), evidence.before.float(), dim=-1)
            < self.threshold
        )


@register
class KLDivergence(_Threshold):
    """Stop when the prediction hardly changes: KL(p_{i-1} ‖ p_i). The paper's threshold."""

    kind: ClassVar[str] = "kl"
    needs_logits: ClassVar[bool] = True
    threshold: PositiveFloat = 5e-4
    """Stop when the divergence is below this."""

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(logits.float(), dim=-1)

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        now, before = self.distribution(_logits(evidence)), memory.get("log_probabilities")
        memory["log_probabilities"] = now
        if before is None:
            return torch.zeros_like(evidence.positions, dtype=torch.bool)
        return (before.exp() * (before - now)).sum(-1) < self.threshold


@register
class MinPKL(KLDivergence):
    """KL after every probability below `share` of the largest becomes 1/V: the tail's noise does
    not count."""

    kind: ClassVar[str] = "min-p-kl"
    threshold: PositiveFloat = 1e-5
    """Stop when the divergence is below this."""
    share: Share = 0.1
    """Probabilities below this share of the largest are levelled."""

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        probabilities = F.softmax(logits.float(), dim=-1)
        low = probabilities < self.share * probabilities.amax(-1, keepdim=True)
        levelled = probabilities.masked_fill(low, 1 / logits.shape[-1])
        return (levelled / levelled.sum(-1, keepdim=True)).log()


@register
class EntropyDifference(_Threshold):
    """Stop when the prediction's entropy hardly changes: |H_i - H_{i-1}|."""

    kind: ClassVar[str] = "entropy-difference"
    needs_logits: ClassVar[bool] = True
    threshold: PositiveFloat = 1e-3
    """Stop when the difference is below this, in nats."""

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        logs = F.log_softmax(_logits(evidence).float(), dim=-1)
        now, before = -(logs.exp() * logs).sum(-1), memory.get("entropy")
        memory["entropy"] = now
        if before is None:
            return torch.zeros_like(evidence.positions, dtype=torch.bool)
        return (now - before).abs() < self.threshold


@register
class ArgmaxStability(ExitRule):
    """Stop when the likeliest token stays the same."""

    kind: ClassVar[str] = "argmax-stability"
    needs_logits: ClassVar[bool] = True
    times: Iterations = 5
    """Iterations in a row that must each confirm the one before."""

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        now, before = _logits(evidence).argmax(-1), memory.get("argmax")
        count = torch.zeros_like(now)
        if before is not None:
            count = torch.where(now == before, memory["count"] + 1, 0)
        memory["argmax"], memory["count"] = now, count
        return count >= self.times


@register
class Scripted(ExitRule):
    """A depth for each absolute position, given beforehand."""

    kind: ClassVar[str] = "scripted"
    depths: tuple[Iterations, ...] = (1,)
    """Iterations of the tokens at positions 0, 1, 2, ...; the last one holds for all further
    positions."""

    def __post_init__(self) -> None:
        if not self.depths:
            raise ConfigError("depths is empty; give at least one depth")

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        depths = torch.tensor(self.depths, device=evidence.positions.device)
        return evidence.depth >= depths[evidence.positions.clamp(0, len(self.depths) - 1)]


@register
class LearnedGate(ExitRule):
    """Stop where the model's own gate has given away a share of the probability of stopping (arXiv
    2510.25741).

    With λ_i = gate(s_i), the probability of having stopped by iteration i is 1 - ∏_{j<=i} (1 -
    λ_j).
    """

    kind: ClassVar[str] = "learned-gate"
    needs_gate: ClassVar[bool] = True
    quantile: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Stop at the first iteration by which the gate would have stopped with this probability."""

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        if evidence.gate is None:
            raise ConfigError(
                "the exit rule learned-gate needs an exit gate, and this model has none"
            )
        going = memory.get("going", 1.0) * (1 - evidence.gate(evidence.after).float())
        memory["going"] = going
        return 1 - going >= self.quantile


def _logits(evidence: Evidence) -> torch.Tensor:
    if evidence.logits is None:
        raise ConfigError(
            "this exit rule looks at logits, but none are computed here; use one that looks at the "
            "state"
        )
    return evidence.logits


EXIT_RULES: Mapping[str, type[ExitRule]] = kinds(ExitRule)
"""Every registered exit rule by its kind."""
