"""Invariants 2 and 3: k sweeps make the first k·lag states exact, and a solver run to its end has
the exact gradient.

In float64 on architectures without casts of their own, so that "equal" means to rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import PATHWAYS, hosted, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

import undertow
from undertow import T2MLR, Chunked, Jacobi, Scan, Sequential, TurboConn
from undertow.host.attachment import find_attachment
from undertow.pathways import Recurrence
from undertow.solvers import Solver

TOKENS = 11
RECURRENCES: dict[str, Recurrence] = {
    **{
        name: PATHWAYS[name]
        for name in ("turboconn-1", "turboconn-3", "t2mlr-middle", "t2mlr-whole")
    },
    "t2mlr-clamped": T2MLR(0, 3, norm="clamped"),
    "t2mlr-detached": T2MLR(0, 3, detach_residual=True),
    "turboconn-lag-5": TurboConn(((3, 1), (2, 2)), lag=5, alpha=0.5, rank=6, normalize=True),
}
KINDS = ["plain", "left-padded", "packed", "limited", "cached"]


def inputs(kind: str) -> dict[str, Any]:
    if kind == "left-padded":
        mask = torch.ones(3, TOKENS, dtype=torch.long)
        mask[0, :3] = mask[2, :1] = 0
        return {"attention_mask": mask, "use_cache": False}
    if kind == "packed":
        positions = torch.tensor([[*range(4), *range(7)], [*range(9), 0, 1], list(range(11))])
        return {"position_ids": positions, "use_cache": False}
    if kind == "limited":
        return {
            "recurrent_mask": torch.arange(TOKENS)[None].ge(torch.tensor([[4], [0], [2]])),
            "use_cache": False,
        }
    return {"use_cache": kind == "cached"}


def run(model: torch.nn.Module, solver: Solver, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of real tokens and the gradient of a function of them, over all parameters."""
    undertow.set_solver(model, solver)
    model.zero_grad()
    given = inputs(kind)
    logits = model(input_ids=tokens(3, TOKENS), **given).logits
    if "attention_mask" in given:
        logits = logits * given["attention_mask"][..., None]
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits.softmax(-1) * weights).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def model_for(recurrence: str) -> torch.nn.Module:
    return hosted("gpt2", RECURRENCES[recurrence]).double().train()


def to_the_end(lag: int) -> dict[str, Solver]:
    groups = -(-TOKENS // lag)
    return {
        "scan": Scan(groups, groups),
        "scan-full": Scan(groups, 1, gradient="full"),
        "jacobi": Jacobi(groups + 1, groups + 1),
        "adjoint of the rollout": Sequential(f"adjoint({groups})"),
        "adjoint of the scan": Scan(groups, 0, gradient=f"adjoint({groups})"),
        "chunks of rollouts": Chunked(4, Sequential()),
        "one chunk": Chunked(64, Sequential()),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_run_to_its_end_every_solver_is_the_rollout_with_its_gradient(
    recurrence: str, kind: str
) -> None:
    model = model_for(recurrence)
    exact, gradient = run(model, Sequential(), kind)
    for name, solver in to_the_end(find_attachment(model).pathway.lag).items():
        logits, found = run(model, solver, kind)
        assert apart(logits, exact) < 1e-10, name
        assert apart(found, gradient) < 1e-8, name


@pytest.mark.parametrize("recurrence", ["turboconn-1", "turboconn-3", "t2mlr-whole"])
def test_short_of_its_end_it_is_not(recurrence: str) -> None:
    """Negative control: fewer sweeps or products are seen by the comparison."""
    model = model_for(recurrence)
    exact, gradient = run(model, Sequential(), "plain")
    for solver in (Scan(1, 1), Jacobi(2, 2)):
        assert apart(run(model, solver, "plain")[0], exact) > 1e-5
    for solver in (Sequential("adjoint(1)"), Sequential("truncated(1)"), Scan(11, 1)):
        logits, found = run(model, solver, "plain")
        assert apart(logits, exact) < 1e-10
        assert apart(found, gradient) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_after_k_sweeps_a_prefix_is_exact(recurrence: str, kind: str) -> None:
    model = model_for(recurrence)
    lag = find_attachment(model).pathway.lag
    with torch.no_grad():
        given = inputs(kind)
        exact = model(input_ids=tokens(3, TOKENS), **given).logits
        for sweeps in (1, 2, 3):
            for solver in (Scan(sweeps, 0), Jacobi(sweeps, 0), Chunked(3, Scan(sweeps, 0))):
                undertow.set_solver(model, prefill=solver)
                found = model(input_ids=tokens(3, TOKENS), **given).logits
                report = undertow.report(model)
                assert report is not None
                prefix = report.exact_prefix
                assert prefix >= min(TOKENS, sweeps * lag)
                real = given.get("attention_mask", torch.ones(3, TOKENS))[..., None]
                assert ((found - exact) * real)[:, :prefix].abs().max() < 1e-10, solver


@given(
    lag=st.integers(1, 6),
    tokens_=st.integers(1, 13),
    chunk=st.integers(1, 14),
    pairs=st.sets(
        st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda p: (max(p), min(p))),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=25, deadline=None)
def test_any_wiring_lag_length_and_chunk(
    lag: int, tokens_: int, chunk: int, pairs: set[tuple[int, int]]
) -> None:
    model = hosted("gpt2", TurboConn(tuple(pairs), lag=lag, alpha=0.5, rank=3)).double()
    ids = tokens(2, tokens_)
    groups = -(-tokens_ // lag)
    with torch.no_grad():
        exact = model(input_ids=ids, use_cache=False).logits
        for solver in (
            Scan(groups, 0),
            Jacobi(groups, 0),
            Chunked(chunk, Sequential()),
            Chunked(chunk, Scan(groups, 0)),
        ):
            undertow.set_solver(model, prefill=solver)
            assert (model(input_ids=ids, use_cache=False).logits - exact).abs().max() < 1e-9, solver


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3_swa", "gemma3", "mistral", "bloom", "falcon_alibi", "gpt_oss", "deepseek_v3"],
)
@pytest.mark.parametrize(
    "solver", [Scan(6, 0), Jacobi(13, 0), Chunked(4, Scan(4, 0))], ids=["scan", "jacobi", "chunked"]
)
def test_a_parallel_prefill_generates_what_the_exact_one_does(name: str, solver: Solver) -> None:
    model = hosted(name, "t2mlr-middle")
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    wanted: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    exact = model.generate(ids, **wanted)
    undertow.set_solver(model, prefill=solver)
    assert torch.equal(model.generate(ids, **wanted), exact)


@pytest.mark.parametrize(
    "solver",
    [Scan(2, 1), Jacobi(3, 2), Sequential("adjoint(1)"), Scan(2, 0, gradient="adjoint(2)")],
)
def test_activation_checkpointing_changes_no_gradient(solver: Solver) -> None:
    model = model_for("t2mlr-middle")
    _, gradient = run(model, solver, "plain")
    model.gradient_checkpointing_enable()
    assert apart(run(model, solver, "plain")[1], gradient) < 1e-12


def test_the_gradient_does_not_depend_on_the_mode() -> None:
    model = model_for("t2mlr-middle")
    _, gradient = run(model, Scan(2, 1), "plain")
    assert torch.equal(run(model.eval(), Scan(2, 1), "plain")[1], gradient)


def test_a_tolerance_stops_the_sweeps() -> None:
    model = model_for("t2mlr-middle")
    run(model, Scan(11, 1, tolerance=0.5), "plain")
    few = undertow.report(model)
    run(model, Scan(11, 1, tolerance=1e-12), "plain")
    many = undertow.report(model)
    assert few is not None and many is not None and few.sweeps < many.sweeps
    assert many.residual < 1e-9 < few.residual
