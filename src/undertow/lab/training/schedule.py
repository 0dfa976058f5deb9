"""Learning rates that transformers has no schedule for."""

from __future__ import annotations

import math


def cosine_restarts(step: int, warmup: int, period: int) -> float:
    """The share of the peak learning rate at a step, from 0 on, with TurboConn's schedule (arXiv
    2602.17993, section 4.2).

    Every `period` steps begin anew: `warmup` steps from zero to the peak, then half a cosine down
    to zero.
    """
    position = step % period
    if position < warmup:
        return position / warmup
    return 0.5 * (1 + math.cos(math.pi * (position - warmup) / (period - warmup)))
