"""On a GPU compiled and captured steps give what the eager ones give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import difference, generate, hosted, tokens
from torch._dynamo.utils import counters
from transformers import CompileConfig

import undertow
from undertow import Scan, Sequential

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = "cuda"
# Triton's sums are ordered otherwise than cuBLAS's.
CLOSE = 1e-3
RECURRENCES = ["t2mlr-middle", "turboconn-3"]


def trained(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("solver", [Sequential(), Scan(1, 0, gradient="adjoint(2)")])
@pytest.mark.parametrize("pathway", RECURRENCES)
def test_compiled_training_steps(pathway: str, solver: undertow.solvers.Solver) -> None:
    model = hosted("llama", pathway, solver=solver).to(DEVICE).train()
    compiled = undertow.compile_layers(copy.deepcopy(model))
    for length in (11, 14, 23):
        ids = tokens(2, length).to(DEVICE)
        wanted, found = trained(model, ids), trained(compiled, ids)
        scale = max(float(each.norm()) for each in wanted.values())
        assert found.keys() == wanted.keys()
        worst = max(float((found[name] - wanted[name]).norm()) for name in wanted)
        assert worst < CLOSE * scale
    assert counters["stats"]["unique_graphs"] > 0, "the control: something was compiled"
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])  # the latter captures CUDA graphs
@pytest.mark.parametrize("pathway", RECURRENCES)
def test_compiled_and_captured_tokens(pathway: str, mode: str) -> None:
    model, ids = hosted("llama", pathway).to(DEVICE).eval(), tokens(2, 7).to(DEVICE)
    settings: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    wanted: Any = generate(model, ids, 12, **settings)
    compiling = CompileConfig(fullgraph=True, dynamic=False, mode=mode)
    vars(compiling)["_compile_all_devices"] = True
    settings |= {"cache_implementation": "static", "compile_config": compiling}
    found: Any = generate(model, ids, 12, **settings)
    assert difference(torch.stack(found.logits), torch.stack(wanted.logits)) < CLOSE
    assert torch.equal(found.sequences, wanted.sequences)
    torch._dynamo.reset()
