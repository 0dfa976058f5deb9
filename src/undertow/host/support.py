"""Which models can be hosted, and where their layers are."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from undertow.errors import UnsupportedArchitectureError
from undertow.host.arguments import Call, leaves

# Architectures whose layers hand each other something besides the residual stream in a way that the
# checks below cannot see. A recurrence would change one path and not the other.
SIDE_STATE = {
    "deepseek_v4": "a stream of several hidden states",
    "gemma3n": "a stream of several hidden states",
    "gemma3n_text": "a stream of several hidden states",
    "gemma4": "keys and values that layers share",
    "gemma4_text": "keys and values that layers share",
    "glm_moe_dsa": "the token indices that sparse attention picked",
    "hrm_text": "two stacks that run several times each",
    "hy_v4": "the token indices that sparse attention picked",
    "inkling2": "the states of earlier blocks",
    "inkling2_loop": "the states of earlier blocks",
    "rwkv": "recurrent states",
    "xlstm": "recurrent states",
    "zamba2": "the embeddings, again at every shared block",
    "zaya": "router states",
}
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def refuse(model: PreTrainedModel, reason: str) -> UnsupportedArchitectureError:
    name = f"{type(model).__name__} (model_type {model.config.model_type!r})"
    return UnsupportedArchitectureError(f"{name} cannot carry a recurrence: {reason}")


def find_stack(model: PreTrainedModel) -> str:
    """The name of the model's list of decoder layers: its decoder's longest `ModuleList` of nothing
    but decoder layers.

    Raises:
        UnsupportedArchitectureError: there is none, or there are several.
    """
    decoder = model.get_decoder()  # not the encoder of images, which may have as many layers
    within = next(
        (f"{name}." for name, module in model.named_modules() if module is decoder and name), ""
    )
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if name.startswith(within)
        and isinstance(module, nn.ModuleList)
        and len(module)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    }
    longest = [name for name, length in lists.items() if length == max(lists.values())]
    if len(longest) != 1:
        raise refuse(
            model, f"it has {len(longest) or 'no'} lists of decoder layers where there must be one"
        )
    return longest[0]


def check_config(model: PreTrainedModel) -> None:
    """Refuse what the configuration alone tells to be unsupported."""
    config = model.config.get_text_config()
    for kind in (model.config.model_type, config.model_type):
        if kind in SIDE_STATE:
            raise refuse(
                model, f"its layers pass on {SIDE_STATE[kind]} besides the residual stream"
            )
    if model.config.is_encoder_decoder:
        raise refuse(model, "it is an encoder-decoder; use a decoder-only model")
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        raise refuse(
            model,
            f"it has {', '.join(sorted(others))} layers, whose own states cannot follow a rollout",
        )


def check_calls(
    model: PreTrainedModel, hidden: torch.Tensor, calls: list[Call], cache: Cache | None
) -> None:
    """Refuse what one recorded forward shows to be unsupported."""
    if hidden.ndim != 3:
        raise refuse(
            model,
            f"its residual stream has shape {list(hidden.shape)} where [batch, tokens, width] is "
            "needed",
        )
    if cache is None:
        raise refuse(model, "its layers take no key-value cache")
    for layer in cache.layers[: len(calls)]:
        if (
            not hasattr(layer, "keys")
            or hasattr(layer, "conv_states")
            or hasattr(layer, "recurrent_states")
        ):
            raise refuse(
                model,
                f"its cache has {type(layer).__name__} entries, whose states cannot follow a "
                "rollout",
            )
    for args, kwargs in calls:
        if any(isinstance(value, dict) for value in (*args, *kwargs.values())):
            raise refuse(model, "its layers pass on a dictionary besides the residual stream")
        for path, value in leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.ndim == 2 and "mask" in str(path[-1]):
                kernel = model.config.get_text_config()._attn_implementation
                if kernel not in ("sdpa", "eager"):
                    raise refuse(
                        model,
                        f"its attention, {kernel}, takes a mask of tokens, not of queries and "
                        "keys, which a group of tokens needs; load the model with "
                        'attn_implementation="sdpa"',
                    )
                raise refuse(
                    model,
                    "some of its layers take a token mask, as recurrent layers do, for their "
                    "attention mask",
                )


# --- Causality. A recurrence from token to token needs a model in which no token attends to a later
# one. Text is causal. Images often are not: the tokens of one see each other, and a rollout would
# show each of them only those before it. Some models say so in their configuration, others in the
# masks of an input.


def check_kernels(model: PreTrainedModel, stack: nn.ModuleList) -> None:
    """Refuse a model whose attention sees later tokens without a mask that says so."""
    if any(getattr(module, "is_causal", True) is False for module in stack.modules()):
        raise refuse(
            model,
            "its attention is bidirectional: tokens see later ones, and so would the states "
            "carried to them",
        )


def check_masks(model: PreTrainedModel, masks: list[torch.Tensor], tokens: int, past: int) -> None:
    """Refuse an input in which a token attends to a later one.

    The last keys of `masks` ``[B, 1, T, keys]``, or those from the `past`-th on where they reach as
    far as a static cache, are the new tokens' own.
    """
    if tokens == 1 or torch.compiler.is_compiling():  # what is traced may hold no decision
        return
    for mask in masks:
        if mask.triu(min(past, mask.shape[-1] - tokens) + 1).any():
            raise refuse(
                model,
                "this input lets tokens attend to later ones, as the tokens of an image often do, "
                "and then no state can be carried from one to the next; give it text, or take the "
                "recurrence off with undertow.detach(model)",
            )
