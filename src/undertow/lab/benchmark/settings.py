"""What a benchmark measures: a model's shape, a recurrence, and the numbers of repetitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from undertow.errors import ConfigError
from undertow.pathways import T2MLR, Recurrence

Measure = Literal["train", "prefill", "decode", "memory"]


@dataclass(frozen=True)
class Bench:
    """One benchmark. The default shape is SmolLM2-135M's depth at a third of its width, with T²MLR
    on layers 13 to 18."""

    recurrence: Recurrence = field(default_factory=lambda: T2MLR(12, 17))
    """The recurrence to measure."""
    measures: tuple[Measure, ...] = ("train", "prefill", "decode", "memory")
    """What to measure: a training step, a prefill, a generated token, the peak memory of a training
    step."""
    layers: int = 30
    """Decoder layers of the Llama-like model."""
    width: int = 192
    """Hidden size."""
    heads: int = 4
    """Attention heads."""
    key_value_heads: int = 2
    """Key-value heads."""
    head_width: int = 48
    """Width of a head."""
    vocabulary: int = 512
    """Tokens of the vocabulary."""
    tokens: int = 256
    """Length of the training sequences."""
    batch: int = 4
    """Training sequences in a step."""
    prompt: int = 2048
    """Length of the prompt to prefill, one row."""
    generated: int = 64
    """Tokens to generate after a prompt of 16, one row; the time from one to the next is
    measured."""
    only: tuple[str, ...] = ()
    """Train only these schemes beside the Transformers, by name, such as [exact, "scan(2,1)"]; all
    if left out."""
    rounds: int = 5
    """How often each candidate is timed; they take turns, and the first round only warms up."""
    threads: int | None = None
    """CPU threads; the machine's default if left out."""
    device: str = "cpu"
    """Device, such as cpu or cuda."""
    seed: int = 0
    """Seed of weights and tokens."""

    def __post_init__(self) -> None:
        positive = (
            "layers",
            "width",
            "heads",
            "key_value_heads",
            "head_width",
            "vocabulary",
            "tokens",
            "batch",
            "prompt",
        )
        least = dict.fromkeys((*positive, "rounds", "threads"), 1) | {"generated": 2}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"bench's {name} is {value}; use {smallest} or more")
            largest = {
                "layers": 10_000,
                "rounds": 10_000,
                "threads": 1024,
                "vocabulary": 2**31 - 1,
            }.get(name, 2**20)
            if value is not None and value > largest:
                raise ConfigError(f"bench's {name} is {value}; use {largest:,} or less")
        if self.heads % self.key_value_heads:
            raise ConfigError(
                f"bench's heads, {self.heads}, are no multiple of key_value_heads, "
                f"{self.key_value_heads}"
            )
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"bench's device is {self.device!r}; use cpu or cuda")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(
                f"bench's device is {self.device!r}, but PyTorch sees no CUDA device; use cpu"
            )
