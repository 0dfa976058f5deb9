"""Small Huginn models with weights far from their initial ones."""

import functools

import torch

from undertow.models import HuginnConfig, HuginnForCausalLM

VOCAB = 61


@functools.cache
def _model(seed: int, **shape: int) -> HuginnForCausalLM:
    torch.manual_seed(seed)
    config = HuginnConfig(
        **{
            "n_embd": 32,
            "n_heads": 4,
            "intermediate_size": 48,
            "vocab_size": VOCAB,
            "block_size": 64,
            "n_layers_in_prelude": 1,
            "n_layers_in_recurrent_block": 2,
            "n_layers_in_coda": 1,
            "mean_recurrence": 6,
            "mean_backprop_depth": 3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        }
        | shape
    )
    model, width = HuginnForCausalLM(config).eval(), config.n_embd
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif "wte" not in name:
                parameter.normal_(0, 0.15)
        model.transformer["adapter"].weight[:, :width].mul_(
            0.5
        )  # states converge, at a pace of their own
    return model


def small(seed: int = 0, **shape: int) -> HuginnForCausalLM:
    """A model of (1, 2, 1) layers; treat it as read-only unless the seed is your own."""
    return _model(seed, **shape)


def ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
