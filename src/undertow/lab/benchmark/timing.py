"""Timing candidates against each other: they take turns, so that a machine's drift falls on all of
them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate, and its ratio to the reference.

    Attributes:
        seconds: the median.
        ratio: the median of the ratios to the reference, round by round.
        low, high: the smallest and the largest of these ratios.
        error: the largest difference of a prefill's logits to the exact rollout's.
    """

    seconds: float
    ratio: float
    low: float
    high: float
    error: float | None = None


def interleaved(
    steps: Mapping[str, Callable[[], float]], reference: str, rounds: int
) -> dict[str, Timing]:
    """Run each step `rounds` times, in turns, after a round that only warms up. A step returns the
    seconds that count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in tqdm(range(rounds + 1), desc="timing", unit="round", leave=False):
        for name, step in steps.items():
            gc.collect()
            taken = step()
            if round_:
                times[name].append(taken)
    ratios = {
        name: [a / b for a, b in zip(own, times[reference], strict=True)]
        for name, own in times.items()
    }
    return {
        name: Timing(statistics.median(times[name]), statistics.median(own), min(own), max(own))
        for name, own in ratios.items()
    }


def timed(work: Callable[[], Any], device: str) -> Callable[[], float]:
    """A step that counts all of its work."""

    def step() -> float:
        started = clock(device)
        work()
        return clock(device) - started

    return step


def clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


class TokenClock(BaseStreamer):
    """A streamer that notes when `generate` hands it the prompt and each token."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, list[float]()

    def put(self, value: torch.Tensor) -> None:
        self.times.append(clock(self.device))

    def end(self) -> None:
        pass

    @property
    def seconds_per_token(self) -> float:
        """The median time from a generated token to the next: the prompt's prefill, which gave the
        first, is left out."""
        return statistics.median(after - before for before, after in pairwise(self.times[1:]))
