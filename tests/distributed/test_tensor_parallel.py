"""Tensor parallelism (`tp_plan="auto"`): each process holds a part of every layer and the whole
recurrence, and both have the outputs and gradients of one process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PATHWAYS, hosted, tokens, unhosted
from sharded import error, gradients, loss
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from two import run

import undertow
from undertow.host import attachment
from undertow.host.attachment import find_pathway
from undertow.solvers import Scan, Sequential, Solver

SOLVERS: dict[str, Solver] = {"sequential": Sequential(), "scan": Scan(2, 1)}
CASES = [(kind, name) for kind in ("t2mlr-middle", "turboconn-3") for name in SOLVERS]


def loaded(folder: Path, rank: int) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").train()


def spread(model: Any) -> float:
    """How far the recurrence's weights of the two processes are apart."""
    apart = 0.0
    for parameter in find_pathway(model).parameters():
        own = parameter.detach().clone()
        distributed.all_reduce(own)
        apart = max(apart, float((own / 2 - parameter.detach()).abs().max()))
    return apart


def compare(model: Any, alone: Any, solver: Solver) -> dict[str, Any]:
    ids = tokens(2, 8)
    losses = []
    for each in (model, alone):
        undertow.set_solver(each, solver)
        losses.append(loss(each, ids))
        losses[-1].backward()
    return {
        "loss": float((losses[0] - losses[1]).detach().abs()),
        "error": error(gradients(model), gradients(alone)),
        "parts": any(isinstance(each, DTensor) for each in model.parameters()),
    }


def from_folder(rank: int, folder: Path, solver: Solver) -> Any:
    alone = AutoModelForCausalLM.from_pretrained(folder).train()
    return compare(loaded(folder, rank), alone, solver)


def attached(rank: int, folder: Path, solver: Solver, kind: str) -> Any:
    """Each process draws other weights at first."""
    model = loaded(folder, rank)
    torch.manual_seed(rank)
    undertow.attach(model, PATHWAYS[kind])
    alone = AutoModelForCausalLM.from_pretrained(folder).train()
    undertow.attach(alone, PATHWAYS[kind])
    weights = find_pathway(model).state_dict()
    find_pathway(alone).load_state_dict(weights)
    return compare(model, alone, solver) | {"spread": spread(model)}


def apart(rank: int, folder: Path) -> Any:
    """The control: what each process drew by itself."""
    model = loaded(folder, rank)
    torch.manual_seed(rank)
    with mock.patch.object(attachment, "same_everywhere", lambda module, layers: None):
        undertow.attach(model, PATHWAYS["t2mlr-middle"])
    return {"spread": spread(model)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    base = tmp_path_factory.mktemp("base")
    unhosted("llama").save_pretrained(base)
    trials: dict[str, Any] = {"apart": functools.partial(apart, folder=base)}
    for kind, name in CASES:
        folder = tmp_path_factory.mktemp(kind)
        hosted("llama", kind).save_pretrained(folder)
        solver = SOLVERS[name]
        trials[f"folder {kind} {name}"] = functools.partial(
            from_folder, folder=folder, solver=solver
        )
        trials[f"attached {kind} {name}"] = functools.partial(
            attached, folder=base, solver=solver, kind=kind
        )
    return run(trials, tmp_path_factory.mktemp("two"), seconds=90)


@pytest.mark.parametrize("how", ["folder", "attached"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_outputs_and_gradients_are_those_of_one_process(
    how: str, kind: str, name: str, outcomes: dict[str, list[Any]]
) -> None:
    found = outcomes.get(f"{how} {kind} {name}", [])
    assert len(found) == 2 and not any(isinstance(each, str) for each in found), found
    for each in found:
        assert each["parts"] and each["loss"] < 1e-5 and each["error"] < 1e-4
        assert each.get("spread", 0.0) == 0.0


def test_control_each_process_draws_weights_of_its_own(outcomes: dict[str, list[Any]]) -> None:
    assert all(each["spread"] > 0 for each in outcomes["apart"])
