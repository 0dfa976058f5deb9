"""Recurrence in depth: a block of layers that runs several times for each token.

The layers are a model's; here are the loop, the depth of a training step, the rules by which a
token stops, the cache by layer and iteration, and generation.
"""

from undertow.depth.cache import CacheMemory, DepthCache, cache_memory, ledger_of
from undertow.depth.exits import (
    EXIT_RULES,
    ArgmaxStability,
    Cosine,
    EntropyDifference,
    Evidence,
    ExitRule,
    KLDivergence,
    LatentDifference,
    LearnedGate,
    MinPKL,
    Scripted,
)
from undertow.depth.handle import at_depth, depth_handle, depths_of, get_depth, set_depth
from undertow.depth.loop import Steps
from undertow.depth.looped import Looped
from undertow.depth.policy import Anchor, Budget, CachePolicy, Full, Last
from undertow.depth.sampler import FixedDepth, SampledDepth
from undertow.depth.speculative import Speculation, generate_speculative

__all__ = [
    "EXIT_RULES",
    "Anchor",
    "ArgmaxStability",
    "Budget",
    "CacheMemory",
    "CachePolicy",
    "Cosine",
    "DepthCache",
    "EntropyDifference",
    "Evidence",
    "ExitRule",
    "FixedDepth",
    "Full",
    "KLDivergence",
    "Last",
    "LatentDifference",
    "LearnedGate",
    "Looped",
    "MinPKL",
    "SampledDepth",
    "Scripted",
    "Speculation",
    "Steps",
    "at_depth",
    "cache_memory",
    "depth_handle",
    "depths_of",
    "generate_speculative",
    "get_depth",
    "ledger_of",
    "set_depth",
]
