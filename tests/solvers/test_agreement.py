"""Processes of a distributed run, whose batches differ, take the same decisions: two of them, over
gloo."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from helpers import hosted, tokens
from torch import distributed, multiprocessing

import undertow
from undertow import Auto
from undertow.host.attachment import find_attachment
from undertow.solvers import Plan
from undertow.solvers.agreement import largest

LENGTHS = (9, 17)  # of the two processes' batches: in two classes of lengths
UNBOUNDED = 1e6
SWEEPS = 4


def alone(ids: torch.Tensor, solver: Auto) -> Plan:
    """The plan that one process by itself would make for a batch."""
    model = hosted("gpt2", "turboconn-1").double().train()
    undertow.set_solver(model, solver)
    model(input_ids=ids, use_cache=False)
    (plan,) = find_attachment(model).plans.by_length.values()
    return plan


def work(rank: int, folder: str) -> None:
    """One of the two processes. What it finds is left in a file."""
    torch.set_num_threads(1)
    batches = [tokens(2, length, seed=length) for length in LENGTHS]
    gaps = [
        alone(ids, Auto(1e-6, rollout_cost=SWEEPS)).gap for ids in batches
    ]  # after so many sweeps
    between = (gaps[0] * gaps[1]) ** 0.5
    own = [alone(ids, Auto(between, rollout_cost=UNBOUNDED)).sweeps for ids in batches]

    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    model = hosted("gpt2", "turboconn-1").double().train()
    found: dict[str, Any] = {"own": own, "largest": largest(float(rank), on_cuda=False)}
    undertow.set_solver(model, Auto(between, rollout_cost=UNBOUNDED))
    plans = find_attachment(model).plans
    model(input_ids=batches[rank], use_cache=False)
    found["measured"] = plans.to_mapping()

    # They fit one process's batch and not the other's, which both find out in the pass that gives
    # the output.
    undertow.set_solver(model, Auto(between / 3, rollout_cost=UNBOUNDED))
    plans = find_attachment(model).plans
    plans.by_length[32] = Plan(
        SWEEPS, allowed=between / 3, tokens=32, forwards=4, next_measurement=100
    )
    model(input_ids=batches[rank], use_cache=False)
    report = undertow.report(model)
    assert report is not None
    found["outgrown"], found["residual"], found["limit"] = (
        dataclasses.asdict(plans.by_length[32]),
        report.residual,
        between,
    )
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_with_different_batches_have_the_same_plans(tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["largest"] == second["largest"] == 1.0
    assert first["own"] == second["own"] and first["own"][0] != first["own"][1], (
        "the control: alone they differ"
    )
    assert first["measured"] == second["measured"]
    assert {length: plan["sweeps"] for length, plan in first["measured"].items()} == {
        "32": max(first["own"])
    }
    low, high = sorted(found["residual"] for found in (first, second))
    assert low < first["limit"] < high, "the control: alone only one of them would measure"
    assert first["outgrown"] == second["outgrown"]
    assert first["outgrown"]["next_measurement"] == 6


def test_one_process_asks_nobody() -> None:
    assert largest(0.25, on_cuda=False) == 0.25
