"""Training in bf16 by autocast, as `training.precision: bf16` does: every weight gets the gradient
that it gets in fp32."""

from __future__ import annotations

import pytest
import torch
from helpers import hosted, some, taking_turns, tokens

import undertow
from undertow import Auto, Chunked, Jacobi, Scan, Sequential
from undertow.solvers import Solver

SOLVERS: dict[str, Solver] = {
    "rollout": Sequential(),
    "adjoint of the rollout": Sequential("adjoint(1)"),
    "scan": Scan(2, 1),
    "adjoint of the scan": Scan(2, 0, gradient="adjoint(1)"),
    "jacobi": Jacobi(4, 2),
    "auto": Auto(rollout_cost=10.0),
    "chunks": Chunked(4, Scan(1, 1)),
}


# Their routers may choose other experts when their input is rounded.
EXPERTS = {"mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4"}


def gradients(
    model: torch.nn.Module, autocast: bool, seed: int = 1
) -> tuple[float, dict[str, torch.Tensor]]:
    ids = tokens(2, 10, seed)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def cosine(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    flat = [
        torch.cat([gradients[name].flatten() for name in sorted(one)]) for gradients in (one, other)
    ]
    return float(torch.nn.functional.cosine_similarity(*flat, dim=0))


@pytest.mark.parametrize(("architecture", "pathway", "solver"), taking_turns(some(), SOLVERS, 2))
def test_autocast_keeps_losses_and_gradients(architecture: str, pathway: str, solver: str) -> None:
    model = hosted(architecture, pathway).train()
    undertow.set_solver(model, SOLVERS[solver])
    loss, exact = gradients(model, autocast=False)
    other, rounded = gradients(model, autocast=True)
    assert (
        exact.keys() == rounded.keys()
    )  # weights cast without a graph, in a sweep, must not be taken for those of a pass
    assert all(gradient.dtype == torch.float32 for gradient in rounded.values())
    if architecture not in EXPERTS:
        assert abs(other - loss) < 0.01 * loss
        assert cosine(rounded, exact) > 0.98
        assert cosine(gradients(model, autocast=True, seed=2)[1], exact) < 0.9
