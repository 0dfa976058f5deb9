"""A recipe's section on recurrence in depth."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Literal

from pydantic import PositiveInt

from undertow.depth.initial import mix
from undertow.depth.loop import Steps
from undertow.depth.looped import Looped
from undertow.depth.sampler import FixedDepth, SampledDepth
from undertow.errors import ConfigError
from undertow.settings import settings

# What `schedule` is measured at on held-out examples: these shares of its mean.
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)


@settings
class DepthSection:
    """Recurrence in depth: what is looped, and how deep each training step goes."""

    looped: Looped | None = None
    """Loop these layers of the model; leave it out for a model that loops already."""
    shape: tuple[int, int, int] | None = None
    """Build a native recurrent-depth model instead of model.architecture: its layers in prelude,
    core and coda."""
    schedule: SampledDepth | FixedDepth = field(default_factory=SampledDepth)
    """The depth of each training step. Its mean is also the model's depth where nothing else is
    said."""
    objective: Literal["last", "loop-lm", "gate"] = "last"
    """last: the loss after the last iteration. loop-lm: the expected loss under the exit gate's
    distribution, less entropy times its entropy (a looped model with a gate and without a coda).
    gate: train the gate alone to go on while that lowers the loss."""
    entropy: float = 0.1
    """Weight of the exit distribution's entropy in loop-lm."""
    evaluate_depths: tuple[PositiveInt, ...] | None = None
    """Depths at which the held-out loss is measured after training; a quarter to four times the
    mean if left out."""

    def __post_init__(self) -> None:
        if self.looped is not None and self.shape is not None:
            raise ConfigError(
                "looped and shape are both set: loop a model's layers, or build a native one"
            )
        if self.shape is not None and sum(self.shape) > 10_000:
            raise ConfigError(f"shape is {list(self.shape)}; use 10,000 layers or fewer")
        if self.shape is not None and (self.shape[1] < 1 or min(self.shape) < 0):
            raise ConfigError(
                f"shape is {list(self.shape)}; the core needs 1 layer or more, prelude and coda 0 "
                "or more"
            )
        if (
            self.objective != "last"
            and self.looped is not None
            and (not self.looped.gate or self.looped.coda)
        ):
            raise ConfigError(
                f"objective {self.objective} needs a loop with a gate and without a coda, as "
                "Looped.whole has"
            )

    @property
    def mean(self) -> int:
        return (
            self.schedule.mean if isinstance(self.schedule, SampledDepth) else self.schedule.depth
        )

    def draw(self, step: int, seed: int) -> Steps:
        """The depth of a micro-batch in the run of a seed."""
        schedule = self.schedule
        if isinstance(schedule, SampledDepth):
            schedule = dataclasses.replace(schedule, seed=mix(schedule.seed, seed) % 2**31)
        return schedule.draw(step)

    @property
    def measured(self) -> tuple[int, ...]:
        """The depths of the held-out losses."""
        if self.evaluate_depths is not None:
            return self.evaluate_depths
        return tuple(sorted({max(1, round(share * self.mean)) for share in SHARES}))
