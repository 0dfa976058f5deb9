"""Timing candidates against each other: they take turns, so that a machine's drift falls on all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm


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


def interleaved(steps: Mapping[str, Callable[[], Any]], reference: str, rounds: int, device: str) -> dict[str, Timing]:
    """Time each step `rounds` times, in turns, after a round that only warms up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in tqdm(range(rounds + 1), desc="timing", unit="round", leave=False):
        for name, step in steps.items():
            gc.collect()
            started = clock(device)
            step()
            taken = clock(device) - started
            if round_:
                times[name].append(taken)
    ratios = {name: [a / b for a, b in zip(own, times[reference], strict=True)] for name, own in times.items()}
    return {
        name: Timing(statistics.median(times[name]), statistics.median(own), min(own), max(own))
        for name, own in ratios.items()
    }


def clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
