"""What the iterations of a recurrent-depth model do: loss and predictions at each, exits,
convergence, trajectories.

Works on native and looped models alike. A batch is what the model is called with: input_ids,
attention_mask, labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from undertow.depth.exits import Evidence, ExitRule
from undertow.depth.handle import depths_of
from undertow.errors import ConfigError

Batch = Mapping[str, torch.Tensor]

# A token whose relative change has fallen below this has come to rest; one whose way is this many
# times as long as what it has gained by it goes round.
AT_REST, ROUND = 0.02, 3.0


def _inputs(batch: Batch) -> dict[str, Any]:
    return {
        **{name: tensor for name, tensor in batch.items() if name != "labels"},
        "use_cache": False,
    }


def _loss(logits: torch.Tensor, batch: Batch) -> float:
    labels = batch["labels"]
    if "attention_mask" in batch:  # what padding predicts is no prediction
        labels = labels.clone()
        labels[:, 1:][batch["attention_mask"][:, :-1] == 0] = -100
    return float(
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
        )
    )


@torch.no_grad()
def loss_by_depth(model: Any, batch: Batch, depths: Sequence[int]) -> dict[int, float]:
    """The loss of the batch when every token runs so many iterations."""
    return {depth: _loss(model(**_inputs(batch), depth=depth).logits, batch) for depth in depths}


@dataclass(frozen=True)
class Lens(ExitRule):
    """Keeps the logits after every iteration but the last, and lets every token go on."""

    kind: ClassVar[str] = "lens"
    needs_logits: ClassVar[bool] = True
    seen: list[torch.Tensor | None] = field(default_factory=list)

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(evidence.logits)
        return torch.zeros_like(evidence.positions, dtype=torch.bool)


@torch.no_grad()
def iteration_logits(model: Any, batch: Batch, depth: int) -> torch.Tensor:
    """The logits ``[depth, B, T, V]`` that each iteration's state would give: coda and head at
    every one (logit lens)."""
    lens = Lens()
    last = model(**_inputs(batch), depth=depth, exit_rule=lens).logits
    return torch.stack([*lens.seen, last])  # type: ignore[list-item]


@torch.no_grad()
def iteration_states(model: Any, batch: Batch, depth: int, seed: int | None = None) -> torch.Tensor:
    """The state before the first iteration and after each, ``[depth + 1, B, T, D]``.

    Raises:
        ConfigError: the model has a recurrence in time besides, whose solvers run the loop again
            and again.
    """
    states: list[torch.Tensor] = []

    def collect(index: int, before: torch.Tensor, after: torch.Tensor) -> None:
        if not states:
            states.append(before.expand_as(after))
        states.append(after)

    model(
        **_inputs(batch),
        depth=depth,
        watch=collect,
        **({} if seed is None else {"state_seed": seed}),
    )
    return torch.stack(states).float()


@dataclass(frozen=True)
class ExitResult:
    """One exit rule on a batch.

    Attributes:
        rule: what was used.
        mean_depth: iterations a token.
        loss: of the batch.
        histogram: tokens by depth, from 1 to the limit.
    """

    rule: ExitRule
    mean_depth: float
    loss: float
    histogram: tuple[int, ...]


@torch.no_grad()
def measure_exits(
    model: Any, batch: Batch, rules: Sequence[ExitRule], limit: int
) -> list[ExitResult]:
    """Depth and loss under each rule, every token for itself."""
    found = []
    for rule in rules:
        output = model(**_inputs(batch), depth=limit, exit_rule=rule)
        depths = depths_of(model, output)
        ran = depths[depths > 0]
        histogram = torch.bincount(ran, minlength=limit + 1)[1:]
        loss = _loss(output.logits, batch)
        found.append(ExitResult(rule, float(ran.float().mean()), loss, tuple(histogram.tolist())))
    return found


def convergence(states: torch.Tensor, limit: torch.Tensor | None = None) -> torch.Tensor:
    """Relative distance ``[depth, B, T]`` of each iteration's state to where the token ends up.

    `states` ``[depth + 1, B, T, D]`` are those of `iteration_states`; `limit` ``[B, T, D]`` is the
    end, by default the last.
    """
    end = states[-1] if limit is None else limit
    return (states[1:] - end).norm(dim=-1) / end.norm(dim=-1).clamp(min=1e-12)


def path_independence(
    model: Any, batch: Batch, depth: int, seeds: Sequence[int] = (0, 1, 2, 3)
) -> list[float]:
    """How far apart two first states still lie after each iteration, from 0 (before the first) to
    `depth`.

    The distance of the same token's states between two seeds, relative to their norm, averaged over
    tokens and pairs: it goes to 0 where the end does not depend on the start.

    Raises:
        ConfigError: there are fewer than two seeds.
    """
    if len(seeds) < 2:
        raise ConfigError(
            f"path independence compares seeds, and there is {len(seeds)}; give two or more"
        )
    runs = torch.stack([iteration_states(model, batch, depth, seed) for seed in seeds])
    real = batch.get("attention_mask")
    chosen = torch.ones(runs.shape[2:4], dtype=torch.bool) if real is None else real.bool()
    found = torch.zeros(depth + 1)
    pairs = [(i, j) for i in range(len(seeds)) for j in range(i)]
    for i, j in pairs:
        size = (runs[i].norm(dim=-1) + runs[j].norm(dim=-1)) / 2
        found += ((runs[i] - runs[j]).norm(dim=-1) / size.clamp(min=1e-12))[:, chosen].mean(-1)
    return [float(value) for value in found / len(pairs)]


def principal_components(states: torch.Tensor, count: int = 6) -> torch.Tensor:
    """The states ``[depth + 1, B, T, D]`` along the `count` directions of largest variance,
    ``[depth + 1, B, T, count]``.

    The directions are those of all tokens at all iterations, about their mean. Fewer if there are
    not so many.
    """
    flat = states.flatten(0, 2)
    centred = flat - flat.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    return (centred @ directions[:count].T).unflatten(0, states.shape[:3])


def behaviours(states: torch.Tensor) -> list[list[str]]:
    """What each token's state does over the second half of its way: `fixed point`, `orbit` or
    `slider`, ``[B][T]``.

    It rests where the last iterations hardly change it; else it goes round where its way is much
    longer than the distance that it covers; else it drifts.
    """
    half = states[states.shape[0] // 2 :]
    steps = (half[1:] - half[:-1]).norm(dim=-1)
    resting = steps[-1] < AT_REST * half[-1].norm(dim=-1)
    going_round = steps.sum(0) > ROUND * (half[-1] - half[0]).norm(dim=-1)
    return [
        [
            "fixed point" if rests else "orbit" if turns else "slider"
            for rests, turns in zip(*row, strict=True)
        ]
        for row in zip(resting.tolist(), going_round.tolist(), strict=True)
    ]
