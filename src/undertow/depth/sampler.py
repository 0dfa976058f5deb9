"""How deep a training step goes: a pure function of a seed and the step's number, so every rank
draws the same."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from undertow.depth.loop import Iterations, Steps
from undertow.errors import ConfigError
from undertow.settings import settings

# Keeps the seeds of a sampler's steps apart from those of other uses of the same seed.
_STREAM = 0x9E3779B97F4A7C15


@settings
class SampledDepth:
    """The depth of each training step drawn from a log-normal Poisson distribution (arXiv
    2502.05171, section 3.3).

    With μ = ln(mean) - spread²/2: rate ~ LogNormal(μ, spread), depth = 1 + Poisson(rate), whose
    mean is mean + 1. The last `backward` iterations carry the gradient, or all of them where there
    are fewer.
    """

    kind: ClassVar[str] = "sampled"

    mean: Iterations = 32
    """Mean of the Poisson rate; the mean depth is one more."""
    backward: Iterations = 8
    """Iterations that carry gradient. While the mean is smaller, the mean: the distribution must
    not be pushed up."""
    # Beyond 3, single draws are thousands of times the mean.
    spread: Annotated[float, Field(ge=0, le=3)] = 0.5
    """Standard deviation of the rate's logarithm."""
    seed: int = 0
    """Seed of the draws."""
    curriculum: Literal["none", "linear", "1-sqrt"] = "none"
    """How the mean rises to its value: not at all, ⌈mean t/W⌉, or ⌈mean (1 - √(1 - t/W))⌉ (arXiv
    2511.07384)."""
    curriculum_steps: int = 0
    """W: the micro-batches over which it rises: training.accumulate of them make a step."""

    def __post_init__(self) -> None:
        if self.curriculum == "none" and self.curriculum_steps:
            raise ConfigError(
                f"curriculum_steps is {self.curriculum_steps}, but curriculum is none; set linear "
                "or 1-sqrt"
            )
        if self.curriculum != "none" and self.curriculum_steps < 1:
            raise ConfigError(
                f"curriculum_steps is {self.curriculum_steps}, but a curriculum takes at least 1 "
                "step"
            )

    def mean_at(self, step: int) -> int:
        """The mean that the curriculum has reached at a step, counted from 0."""
        share = (step + 1) / self.curriculum_steps if self.curriculum_steps else 1.0
        if share >= 1:
            return self.mean
        if self.curriculum == "1-sqrt":
            share = 1 - math.sqrt(1 - share)
        return max(1, math.ceil(self.mean * share - 1e-9))

    def draw(self, step: int) -> Steps:
        """The iterations of a step; a step is one forward of one batch (a micro-batch), counted
        from 0."""
        mean = self.mean_at(step)
        generator = torch.Generator().manual_seed(
            (_STREAM * (2 * self.seed + 1) + step * 7919) % 2**63
        )
        location = math.log(mean) - self.spread**2 / 2
        normal = torch.randn((), generator=generator, dtype=torch.float64)
        rate = torch.exp(location + self.spread * normal)
        depth = 1 + int(torch.poisson(rate, generator=generator))
        return Steps.of(depth, min(self.backward, mean))


@settings
class FixedDepth:
    """The same depth at every training step."""

    kind: ClassVar[str] = "fixed"

    depth: Iterations = 1
    """Iterations."""
    backward: Iterations = 8
    """Iterations that carry gradient, the last ones."""

    def mean_at(self, step: int) -> int:
        return self.depth

    def draw(self, step: int) -> Steps:
        return Steps.of(self.depth, self.backward)


DepthSchedule = SampledDepth | FixedDepth
