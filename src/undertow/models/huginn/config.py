"""The shape of a Huginn model, in the names of the released checkpoint's `config.json`."""

from __future__ import annotations

import functools
import math
from typing import Any

from transformers import PreTrainedConfig

from undertow.depth.loop import check_depth
from undertow.depth.looped import Looped
from undertow.errors import ConfigError

# Keys of public configs that change what the model computes, and the one value of each that this
# code computes.
SUPPORTED: dict[str, Any] = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "bias": False,
    "init_strategy": "takase",  # it also sets the scale of embeddings and states
    "init_scale": 1.0,
    "state_init": "like-init",
    "injection_type": "linear",
    "test_time_noise": 0,
}
# What says which layers are looped, how deep and from where.
LOOP = (
    "n_layers_in_prelude",
    "n_layers_in_recurrent_block",
    "n_layers_in_coda",
    "mean_recurrence",
    "mean_backprop_depth",
    "state_seed",
    "n_embd",
)
# The least value of each whole number.
LEAST = {
    "n_embd": 1,
    "n_heads": 1,
    "n_layers_in_prelude": 0,
    "n_layers_in_recurrent_block": 1,
    "n_layers_in_coda": 0,
    "intermediate_size": 1,
    "vocab_size": 1,
    "block_size": 1,
}


class HuginnConfig(PreTrainedConfig):
    """A recurrent-depth model (arXiv 2502.05171): prelude, looped core and coda. The defaults are
    the released model's.

    Raises:
        ConfigError: a number of layers, a width or a depth makes no model, or a key asks for
            another kind of model.
    """

    model_type = "huginn_raven"
    attribute_map = {  # noqa: RUF012
        "num_attention_heads": "n_heads",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layers",
    }
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        n_embd: int = 5280,
        n_heads: int = 55,
        n_layers_in_prelude: int = 2,
        n_layers_in_recurrent_block: int = 4,
        n_layers_in_coda: int = 2,
        intermediate_size: int = 17920,
        vocab_size: int = 65536,
        block_size: int = 4096,
        qk_bias: bool = True,
        norm_eps: float = 1e-6,
        rope_base: float = 50_000.0,
        mean_recurrence: int = 32,
        mean_backprop_depth: int = 8,
        tie_embeddings: bool = True,
        state_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        """`state_seed` seeds the initial states; the other names are the checkpoint's own."""
        self.n_embd, self.n_heads = n_embd, kwargs.pop("num_attention_heads", n_heads)
        self.n_layers_in_prelude, self.n_layers_in_coda = n_layers_in_prelude, n_layers_in_coda
        self.n_layers_in_recurrent_block = n_layers_in_recurrent_block
        self.intermediate_size = intermediate_size
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.qk_bias = qk_bias
        self.norm_eps = norm_eps
        self.rope_base = rope_base
        self.mean_recurrence, self.mean_backprop_depth = mean_recurrence, mean_backprop_depth
        self.tie_embeddings, self.state_seed = tie_embeddings, state_seed
        for name in (
            "n_layers",
            "num_hidden_layers",
            "num_key_value_heads",
            "head_dim",
            "tie_word_embeddings",
        ):
            kwargs.pop(name, None)
        for name, supported in SUPPORTED.items():
            setattr(self, name, kwargs.pop(name, supported))
        self.check()
        self.n_layers = n_layers_in_prelude + n_layers_in_recurrent_block + n_layers_in_coda
        super().__init__(**{"tie_word_embeddings": tie_embeddings, **kwargs})

    def check(self) -> None:
        """Refuse what makes no model, or another one than this code computes."""
        for name, supported in SUPPORTED.items():
            value = getattr(self, name)
            if value != supported:
                raise ConfigError(
                    f"{name} is {value!r}, which this model does not compute; use {supported!r} or "
                    "leave it out"
                )
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; use a whole number, {least} or more")
        if self.n_embd % self.n_heads or (self.n_embd // self.n_heads) % 2:
            raise ConfigError(
                f"n_embd {self.n_embd} does not make {self.n_heads} heads of an even width, which "
                "rotary positions need"
            )
        check_depth("mean_recurrence", self.mean_recurrence)
        check_depth("mean_backprop_depth", self.mean_backprop_depth)

    @property
    def head_dim(self) -> int:
        return int(self.n_embd // self.n_heads)

    @property
    def num_key_value_heads(self) -> int:
        return int(self.n_heads)

    @property
    def expected_depth(self) -> int:
        """Layers that a token passes at the mean recurrence."""
        return int(
            self.n_layers_in_prelude
            + self.n_layers_in_coda
            + self.n_layers_in_recurrent_block * self.mean_recurrence
        )

    def loop(self) -> Looped:
        """What is looped, and how deep."""
        held = vars(self)  # a config's attributes are slow to read, and each forward asks
        return _loop(*(held[name] for name in LOOP))

    @property
    def std(self) -> float:
        """Standard deviation of the initial weights, and of the initial state before it is
        scaled."""
        return initial_std(self.n_embd)

    @property
    def embedding_scale(self) -> float:
        """What embeddings and initial states are multiplied by: √h."""
        return math.sqrt(self.n_embd)


@functools.lru_cache(64)
def _loop(
    prelude: int, core: int, coda: int, depth: int, backward: int, seed: int, width: int
) -> Looped:
    layers = tuple(range(prelude + core + coda))
    return Looped(
        layers[:prelude],
        layers[prelude : prelude + core],
        layers[prelude + core :],
        depth=depth,
        backward=backward,
        state_std=initial_std(width) * math.sqrt(width),
        state_seed=seed,
    )


def initial_std(width: int) -> float:
    """Standard deviation of the initial weights, and of the first states before they are scaled."""
    return math.sqrt(2 / (5 * width))
