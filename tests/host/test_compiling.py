"""Compiled layers give the same, for any length without compiling again, and only where they
may."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CACHE, SAME, difference, hosted, tokens
from torch import nn
from torch._dynamo.utils import counters
from transformers import DynamicCache

import undertow
from undertow import Scan, Sequential
from undertow.errors import ConfigError
from undertow.host import compiling
from undertow.host.attachment import find_attachment
from undertow.solvers import Solver

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
SOLVERS: dict[str, Solver] = {
    "adjoint": Scan(1, 0, gradient="adjoint(2)"),
    "scan": Scan(2, 1),
    "exact": Sequential(),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """One as it is, and one compiled, with a cache of its own on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("torch._functorch.config.donated_buffer", True)
        plain = hosted("llama", "t2mlr-middle").train()
        yield plain, undertow.compile_layers(copy.deepcopy(plain))
        torch._dynamo.reset()


def gradients(model: Any, length: int, solver: Solver) -> list[torch.Tensor]:
    ids = tokens(2, length)
    undertow.set_solver(model, solver)
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("solver", SOLVERS)
def test_gradients_are_the_same_and_no_length_is_compiled_anew(
    solver: str, models: tuple[Any, Any]
) -> None:
    plain, compiled = models
    graphs = []
    for length in (9, 14, 12, 21):
        found = gradients(compiled, length, SOLVERS[solver])
        wanted = gradients(plain, length, SOLVERS[solver])
        for own, other in zip(found, wanted, strict=True):
            assert float((own - other).norm()) < SAME * float(other.norm()) + 1e-6
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "the control: something was compiled"
    # A rollout's groups are compiled for one length, and once more for any.
    assert len(set(graphs[1:] if solver == "exact" else graphs)) == 1
    assert find_attachment(compiled).stack not in compiling._without_groups


@torch.no_grad()
def test_with_a_cache_the_layers_run_as_they_are(models: tuple[Any, Any]) -> None:
    before = counters["stats"]["unique_graphs"]
    logits = []
    for model in models:
        cache = DynamicCache(config=model.config)
        for part in (tokens(2, 6), tokens(2, 1)):
            logits.append(model(input_ids=part, use_cache=True, **{CACHE: cache}).logits)
    assert difference(logits[0], logits[2]) < SAME and difference(logits[1], logits[3]) < SAME
    assert torch.equal(
        *(m.generate(tokens(1, 4), max_new_tokens=3, do_sample=False) for m in models)
    )
    assert counters["stats"]["unique_graphs"] == before


def test_names_and_copies_stay(models: tuple[Any, Any], tmp_path: Path) -> None:
    plain, compiled = models
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    compiled.save_pretrained(tmp_path)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a transformers model, not a Linear"):
        undertow.compile_layers(nn.Linear(2, 2))


def test_a_model_that_is_wrapped_is_compiled_inside() -> None:
    model: Any = hosted("llama", "t2mlr-middle")
    undertow.compile_layers(nn.Sequential(model))
    stack = find_attachment(model).stack
    assert stack in compiling._compiled
