"""Tiny hosted models whose recurrence has weights, and how far apart two tensors are."""

import copy
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
import zoo
from transformers import LlamaForCausalLM, PreTrainedModel

import undertow
from undertow import T2MLR, SoftToken, TurboConn
from undertow.pathways import Recurrence
from undertow.solvers import Solver

# What each pathway is tested with, on models of four layers.
CONNECTIONS = ((3, 0), (2, 1), (2, 2), (3, 2))
PATHWAYS: dict[str, Recurrence] = {
    "turboconn-1": TurboConn(CONNECTIONS, lag=1, alpha=0.5, rank=6),
    "turboconn-3": TurboConn(CONNECTIONS, lag=3, alpha=0.5, rank=6),
    "t2mlr-middle": T2MLR(1, 2),
    "t2mlr-whole": T2MLR(0, 3),
    "soft-token": SoftToken(0.2),
}

# Architectures of every kind of layer call, mask, cache, embedding and head that the zoo knows (see
# `zoo.py`).
ARCHITECTURES = [
    "llama",
    "qwen3_swa",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "granite",
    "llama4",
    "mistral",
    "mixtral",
    "gpt_oss",
    "gemma2",
    "gemma3",
    "olmo3",
    "nanochat",
    "opt",
    "gpt_neox",
    "falcon",
    "falcon_alibi",
    "bloom",
    "gpt_neo",
    "mpt",
    "gpt2",
    "gpt_bigcode",
    "xglm",
]
# Their first layer sees more than the token embeddings, which soft tokens replace.
WITHOUT_SOFT_TOKENS = {"gpt2", "opt", "bloom", "gpt_neo", "gpt_bigcode", "xglm", "nanochat", "mpt"}

# Differences relative to the spread of what is compared: the same numbers through the same
# operations, whose last bits may still differ with where a tensor lies in memory; the same up to
# rounding; and not the same at all.
ROUNDING, SAME, CHANGED = 1e-5, 5e-4, 1e-2
# The keyword of the cache: `past_key_values` up to transformers 5.23.
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def some(names: Iterable[str] = ARCHITECTURES, each: int = 1) -> list[tuple[str, str]]:
    """`each` pathways for each architecture, taking turns, so that each pathway meets many of
    them."""
    pairs = []
    for index, name in enumerate(names):
        fitting = [p for p in PATHWAYS if not (p == "soft-token" and name in WITHOUT_SOFT_TOKENS)]
        pairs += [(name, fitting[(index + turn * 2) % len(fitting)]) for turn in range(each)]
    return pairs


def taking_turns(
    pairs: list[tuple[str, str]], options: Iterable[str], each: int
) -> list[tuple[str, str, str]]:
    """Every pair with `each` of the options; the two pairs of one architecture (`some(each=2)`)
    have different ones."""
    names = list(options)
    return [
        (name, pathway, names[(index * each + turn) % len(names)])
        for index, (name, pathway) in enumerate(pairs)
        for turn in range(each)
    ]


@functools.cache
def _unhosted(name: str, seed: int) -> PreTrainedModel:
    return zoo.build(name, seed)


@functools.cache
def _hosted(name: str, recurrence: Recurrence, seed: int) -> PreTrainedModel:
    return randomize(undertow.attach(unhosted(name, seed), recurrence, undertow.Sequential()))


def unhosted(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model without a recurrence. (Copying one is much faster than building it.)"""
    return copy.deepcopy(_unhosted(name, seed))


def hosted(
    name: str, pathway: str | Recurrence, seed: int = 0, solver: Solver | None = None
) -> PreTrainedModel:
    """A tiny model with a recurrence whose weights are far from zero."""
    recurrence = PATHWAYS[pathway] if isinstance(pathway, str) else pathway
    model = copy.deepcopy(_hosted(name, recurrence, seed))
    if solver is not None:
        undertow.set_solver(model, solver)
    return model


def randomize(model: PreTrainedModel, seed: int = 3) -> PreTrainedModel:
    """Give the recurrence random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in recurrent_parameters(model).items():
            if "gamma" in name:
                parameter.fill_(0.5 if "recurrent" in name else -0.3)
            else:
                # Small enough not to make a chaotic map, in which rounding grows with each token.
                size = 0.01 if name == "project.weight" else 0.1
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model


def recurrent_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The pathway's parameters by their names within it."""
    return {
        name.rpartition("recurrence.pathway.")[2]: parameter
        for name, parameter in model.named_parameters()
        if "recurrence.pathway." in name
    }


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids, none of them padding."""
    return torch.randint(
        2, zoo.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The logits of one forward, without a cache unless asked for one."""
    output: torch.Tensor = model(input_ids=ids, **({"use_cache": False} | inputs)).logits
    return output


def generate(
    model: PreTrainedModel, ids: torch.Tensor, new: int = 8, **settings: Any
) -> torch.Tensor:
    """Greedy text of `new` more tokens."""
    out: torch.Tensor = model.generate(ids, max_new_tokens=new, **({"do_sample": False} | settings))
    return out


def steps(
    model: PreTrainedModel, ids: torch.Tensor, new: int = 8, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of a greedy `generate` and the logits ``[B, new, V]`` of its steps."""
    wanted: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    out: Any = generate(model, ids, new, **wanted, **settings)
    return out.sequences, torch.stack(out.logits, dim=1)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the spread of `want`."""
    assert got.shape == want.shape, f"shapes differ: {list(got.shape)} and {list(want.shape)}"
    return float((got - want).abs().max() / want.std())
