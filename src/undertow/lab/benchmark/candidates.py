"""The models that a benchmark compares: a Transformer, a wider one with as many parameters, the
paper's scheme, and ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from undertow.errors import ConfigError, nearest
from undertow.host import attach, compile_layers, set_solver
from undertow.host.attachment import find_pathway
from undertow.lab.benchmark.literal import LiteralRollout
from undertow.lab.benchmark.settings import Bench
from undertow.pathways import T2MLR
from undertow.solvers import Adjoint, Auto, Chunked, Jacobi, Scan, Sequential, Solver

T = TypeVar("T")
MATCHED = "transformer, as many parameters"
# What a recurrence's paper trains with, by the recurrence's kind.
PAPERS: dict[str, dict[str, Solver]] = {T2MLR.kind: {"jacobi(16,4), the paper's": Jacobi(16, 4)}}


def transformer(bench: Bench, width: int | None = None, device: str | None = None) -> Any:
    """A Llama-like model in the benchmark's shape, or of another width or on another device."""
    width = width or bench.width
    torch.manual_seed(bench.seed)
    config = LlamaConfig(
        vocab_size=bench.vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 8 * 8,
        num_hidden_layers=bench.layers,
        num_attention_heads=bench.heads,
        num_key_value_heads=bench.key_value_heads,
        head_dim=bench.head_width,
        max_position_embeddings=2 * max(bench.tokens, bench.prompt + bench.generated),
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device or bench.device):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=bench.attention, dtype=getattr(torch, bench.precision)
        )


def recurrent(bench: Bench, solver: Solver | None = None, prefill: Solver | None = None) -> Any:
    """The model with the recurrence, its weights off zero so that every branch has work to do."""
    model = attach(transformer(bench), bench.recurrence, solver)
    set_solver(model, prefill=prefill)
    find_pathway(model).open()
    return model


def compiled(bench: Bench, model: Any) -> Any:
    """A model for training, compiled if that is asked for; the paper's loop stays as it is."""
    if bench.compile == "regional" and isinstance(model, PreTrainedModel):
        compile_layers(model)
    return model


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def matched(bench: Bench) -> Any:
    """The least wide Transformer, in steps of its number of heads, with as many parameters as the
    recurrent model."""
    with torch.device("meta"):  # counted without memory
        pathway = bench.recurrence.build(bench.layers, bench.width, lambda hidden: hidden)
    width = bench.width
    wanted = count(transformer(bench, width, "meta")) + count(pathway)
    while count(transformer(bench, width, "meta")) < wanted:
        width += bench.heads
    return transformer(bench, width)


def training_solvers(bench: Bench) -> dict[str, Solver]:
    """Our training schemes, and the recurrence's paper's own."""
    ours: dict[str, Solver] = {
        "auto": Auto(),
        "exact": Sequential(),
        "exact states, adjoint(1)": Sequential(Adjoint(1)),
        "scan(2,1)": Scan(2, 1),
        "scan(1,1)": Scan(1, 1),
        "scan(1), adjoint(1)": Scan(1, 0, gradient=Adjoint(1)),
        "scan(2), adjoint(1)": Scan(2, 0, gradient=Adjoint(1)),
    }
    return ours | PAPERS.get(bench.recurrence.kind, {})


def prefill_solvers() -> dict[str, Solver]:
    return {
        "exact": Sequential(),
        "jacobi(16)": Jacobi(16, 0),
        "scan(4)": Scan(4, 0),
        "chunked(256, scan(4))": Chunked(256, Scan(4, 0)),
        "chunked(64, scan(3))": Chunked(64, Scan(3, 0)),
    }


def training_candidates(bench: Bench) -> dict[str, Callable[[], Any]]:
    """What makes each candidate for a training step: a Transformer, one with as many parameters,
    ours and the papers'."""
    makers: dict[str, Callable[[], Any]] = {
        "transformer": lambda: transformer(bench),
        MATCHED: lambda: matched(bench),
        **{
            name: partial(recurrent, bench, solver)
            for name, solver in training_solvers(bench).items()
        },
        "exact, the paper's loop taken literally": lambda: LiteralRollout(recurrent(bench)),
    }
    return chosen(bench, makers)


def chosen(bench: Bench, makers: dict[str, T]) -> dict[str, T]:
    """Those of the candidates that are asked for, and the Transformers.

    Raises:
        ConfigError: there is none of a name.
    """
    for name in bench.only:
        if name not in makers:
            raise ConfigError(
                f"only names {name!r}{nearest(name, makers)}; there are {', '.join(makers)}"
            )
    return {
        name: make
        for name, make in makers.items()
        if not bench.only or "transformer" in name or name in bench.only
    }
