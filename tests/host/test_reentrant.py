"""Reentrant activation checkpointing gives every solver the gradients that it has without."""

import pytest
import torch
from helpers import ROUNDING, difference, hosted, tokens

import undertow
from undertow.host import modes
from undertow.solvers import Solver

IDS = tokens(2, 9)
SOLVERS: list[Solver] = [
    undertow.Sequential(),
    undertow.Sequential("adjoint(2)"),
    undertow.Scan(3, 3),
    undertow.Scan(3, 0, gradient="adjoint(2)"),
    undertow.Jacobi(4, 4),
    undertow.Auto(rollout_cost=1.0),
]


def gradient(pathway: str, solver: Solver, reentrant: bool | None) -> torch.Tensor:
    model = hosted("llama", pathway, solver=solver).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("pathway", ["t2mlr-middle", "turboconn-3"])
def test_gradients_are_the_same(pathway: str, solver: Solver) -> None:
    assert difference(gradient(pathway, solver, True), gradient(pathway, solver, None)) < ROUNDING


def test_control_the_librarys_own_fails_under_an_adjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "is_reentrant", lambda module: False)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        gradient("t2mlr-middle", undertow.Auto(), True)
