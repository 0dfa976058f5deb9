"""What a benchmark measures: a model's shape, a recurrence, and the numbers of repetitions."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

import torch
from pydantic import Field
from transformers.utils import is_flash_attn_2_available

from undertow.errors import ConfigError
from undertow.pathways import T2MLR, Recurrence
from undertow.settings import settings

Size = Annotated[int, Field(ge=1, le=2**20)]
Decoding = Literal["dynamic", "compiled"]
Measure = Literal["train", "prefill", "decode", "memory"]


@settings
class Bench:
    """One benchmark. The default shape is SmolLM2-135M's depth at a third of its width, with T²MLR
    on layers 13 to 18."""

    recurrence: Recurrence = field(default_factory=lambda: T2MLR(12, 17))
    """The recurrence to measure."""
    measures: tuple[Measure, ...] = ("train", "prefill", "decode", "memory")
    """What to measure: a training step, a prefill, a generated token, the peak memory of a training
    step."""
    layers: Annotated[int, Field(ge=1, le=10_000)] = 30
    """Decoder layers of the Llama-like model."""
    width: Size = 192
    """Hidden size."""
    heads: Size = 4
    """Attention heads."""
    key_value_heads: Size = 2
    """Key-value heads."""
    head_width: Size = 48
    """Width of a head."""
    vocabulary: Annotated[int, Field(ge=1, le=2**31 - 1)] = 512
    """Tokens of the vocabulary."""
    tokens: Size = 256
    """Length of the training sequences."""
    batch: Size = 4
    """Training sequences in a step."""
    prompt: Size = 2048
    """Length of the prompt to prefill, one row."""
    generated: Annotated[int, Field(ge=2, le=2**20)] = 64
    """Tokens to generate after a prompt of 16; the time from one to the next is measured."""
    rows: Annotated[tuple[Size, ...], Field(min_length=1)] = (1, 8, 32)
    """How many rows to decode at once: each of these is measured."""
    decoding: Annotated[tuple[Decoding, ...], Field(min_length=1)] = ("dynamic",)
    """How to decode: dynamic is what generate does by itself; compiled is a static cache and
    torch.compile, which takes about a minute a candidate and number of rows on a CPU."""
    compile: Literal["none", "regional"] = "none"
    """regional trains with compiled layers, and an exact rollout with compiled groups, all but the
    paper's loop; compiling takes about a minute a candidate on a CPU."""
    only: tuple[str, ...] = ()
    """Train only these schemes beside the Transformers, by name, such as [exact, "scan(2,1)"]; all
    if left out."""
    rounds: Annotated[int, Field(ge=1, le=10_000)] = 5
    """How often each candidate is timed; they take turns, and the first round only warms up."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads; the machine's default if left out."""
    device: str = "cpu"
    """Device, such as cpu or cuda."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations; a CPU computes bfloat16 far more slowly."""
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    """Attention of transformers. flash_attention_2 needs a GPU, bfloat16, and the package
    flash-attn."""
    seed: int = 0
    """Seed of weights and tokens."""

    def __post_init__(self) -> None:
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
        if self.attention == "flash_attention_2":
            if not self.device.startswith("cuda") or self.precision != "bfloat16":
                raise ConfigError(
                    "bench's attention is 'flash_attention_2', which needs --device cuda and "
                    "--precision bfloat16; give both, or use sdpa"
                )
            if not is_flash_attn_2_available():
                raise ConfigError(
                    "bench's attention is 'flash_attention_2', but flash-attn cannot be used here; "
                    "install flash-attn, or use sdpa"
                )
