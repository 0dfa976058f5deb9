"""`Auto` as a prefill: as many passes as bring the states of a prompt within its tolerance, else
the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis
import pytest
import torch
from helpers import (
    PATHWAYS,
    ROUNDING,
    SAME,
    difference,
    hosted,
    recurrent_parameters,
    some,
    steps,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from small_looped import looped
from torch import nn
from transformers import PreTrainedModel

import undertow
from undertow import T2MLR, Auto, Jacobi, Sequential
from undertow.host.attachment import find_attachment
from undertow.solvers import RecurrentBlock, Solution, Solver, SolverReport
from undertow.solvers.adjoint import relative_change
from undertow.solvers.auto import largest_change

LENGTH = 40
SWEPT = [(name, pathway) for name, pathway in some() if pathway != "soft-token"]


def calm(name: str, pathway: str, by: float = 0.1) -> PreTrainedModel:
    """A model whose recurrence is as weak as a trained language model's, so that sweeps settle."""
    model = hosted(name, pathway).eval()
    with torch.no_grad():
        for key, parameter in recurrent_parameters(model).items():
            if "up." in key or "gamma" in key:
                parameter.mul_(by)
    return model


def reported(model: nn.Module) -> SolverReport:
    report = undertow.report(model)
    assert report is not None
    return report


@torch.no_grad()
def read(model: nn.Module, prefill: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    undertow.set_solver(model, prefill=prefill)
    logits: torch.Tensor = model(input_ids=ids, **({"use_cache": False} | inputs)).logits
    return logits


@pytest.mark.parametrize(("name", "pathway"), SWEPT)
def test_a_prompt_and_what_follows_equal_the_rollout(name: str, pathway: str) -> None:
    model, ids = calm(name, pathway, 0.5 if pathway == "t2mlr-middle" else 0.1), tokens(2, LENGTH)
    undertow.set_solver(model, prefill=Sequential())
    text, wanted = steps(model, ids, 4)
    undertow.set_solver(model, prefill=Auto(1e-5))
    found_text, found = steps(model, ids, 4)
    assert torch.equal(found_text, text) and difference(found, wanted) < SAME
    read(model, Auto(1e-5), ids)
    report = reported(model)
    if name != "mixtral":  # tiny changes route a token to another expert: its states never settle
        assert report.exact_prefix < LENGTH, "it swept"
    exact = read(model, Sequential(), ids)
    error = difference(read(model, Auto(1e-5), ids), exact)
    assert difference(read(model, Jacobi(1, 0), ids), exact) > 2 * error, "the control: one sweep"


@pytest.mark.parametrize("kind", ["left-padded", "right-padded", "packed"])
@pytest.mark.parametrize("pathway", ["turboconn-3", "t2mlr-middle", "t2mlr-whole"])
def test_padding_and_packed_documents(pathway: str, kind: str) -> None:
    model, ids = calm("llama", pathway, by=0.2), tokens(2, LENGTH)
    given: dict[str, Any]
    real = torch.ones(2, LENGTH, dtype=torch.long)
    if kind == "packed":
        given = {"position_ids": torch.tensor([[*range(15), *range(25)], [*range(LENGTH)]])}
    else:
        real[0, :7] = 0
        real = real if kind == "left-padded" else real.flip(1)
        given = {"attention_mask": real}
    exact, found = (read(model, each, ids, **given) for each in (Sequential(), Auto(1e-5)))
    assert reported(model).exact_prefix < LENGTH
    error = difference(found[real.bool()], exact[real.bool()])
    assert error < SAME
    far = read(model, Jacobi(1, 0), ids, **given)
    assert difference(far[real.bool()], exact[real.bool()]) > error, "the control: one sweep"


def test_a_static_cache_is_filled_by_the_last_pass() -> None:
    model, ids = calm("llama", "t2mlr-whole"), tokens(2, LENGTH)
    undertow.set_solver(model, prefill=Sequential())
    text, wanted = steps(model, ids, 4, cache_implementation="static")
    undertow.set_solver(model, prefill=Auto(1e-5))
    found_text, found = steps(model, ids, 4, cache_implementation="static")
    assert torch.equal(found_text, text) and difference(found, wanted) < SAME
    undertow.set_solver(model, prefill=Auto(0.9))
    assert difference(steps(model, ids, 4, cache_implementation="static")[1], wanted) > SAME


def test_beside_a_recurrence_in_depth() -> None:
    model = looped("llama", "adapter")
    torch.manual_seed(1)  # after what may be made here or before
    model = undertow.attach(model, T2MLR(0, 3)).eval()
    with torch.no_grad():
        pathway = find_attachment(model).pathway
        pathway.gamma_recurrent.fill_(0.02)
        pathway.gamma_current.fill_(-0.02)
    ids = tokens(2, LENGTH)
    undertow.set_solver(model, prefill=Sequential())
    _, wanted = steps(model, ids, 4)
    read(model, Auto(0.05), ids)
    assert reported(model).exact_prefix < LENGTH
    errors = []
    for tolerance in (0.05, 0.9):
        undertow.set_solver(model, prefill=Auto(tolerance))
        errors.append(difference(steps(model, ids, 4)[1], wanted))
    assert errors[0] < 0.1 and errors[0] < errors[1]


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_what_does_not_settle_is_rolled_out(pathway: str) -> None:
    name = "gpt_neox" if pathway == "soft-token" else "llama"
    model, ids = hosted(name, pathway).eval(), tokens(2, LENGTH)
    exact = read(model, Sequential(), ids)
    found = read(model, Auto(1e-12), ids)
    report = reported(model)
    assert (report.sweeps, report.exact_prefix, report.residual) == (1, LENGTH, 0.0)
    assert difference(found, exact) < ROUNDING
    undertow.set_solver(model, prefill=Sequential())
    _, wanted = steps(model, ids, 4)
    undertow.set_solver(model, prefill=Auto(1e-12))
    assert difference(steps(model, ids, 4)[1], wanted) < ROUNDING, (
        "its cache holds nothing of the passes"
    )


def test_the_worst_row_counts() -> None:
    """One row that is far from settled is not lost among many that are."""
    changes: list[float] = []

    @dataclass(frozen=True)
    class Changing(Solver):
        kind: ClassVar[str] = "changing"

        def solve(self, block: RecurrentBlock) -> Solution:
            solution = Sequential().solve(block)
            other = solution.states.clone()
            other[-1] *= 1.25
            changes.append(float(largest_change(block, other, solution.states)))
            other[-1, :-1] /= 1.25  # the last state alone, which no token of the prompt receives
            changes.append(float(largest_change(block, other, solution.states)))
            changes.append(float(relative_change(other, solution.states)))
            return solution

    read(calm("llama", "t2mlr-whole"), Changing(), tokens(64, LENGTH))
    assert changes[:2] == pytest.approx([0.2, 0.2], rel=1e-4)
    assert changes[2] < 0.01, "the control: over all rows and tokens it is hardly seen"


@hypothesis.settings(max_examples=25, deadline=None)
@given(
    pathway=st.sampled_from(["turboconn-1", "turboconn-3", "t2mlr-middle", "t2mlr-whole"]),
    rows=st.integers(1, 3),
    length=st.integers(1, 48),
    exponent=st.floats(-5, -0.5),
    seed=st.integers(0, 9),
)
def test_the_states_are_within_the_tolerance(
    pathway: str, rows: int, length: int, exponent: float, seed: int
) -> None:
    model, ids, tolerance = calm("gpt2", pathway), tokens(rows, length, seed), 10**exponent
    model.double()
    exact = read(model, Sequential(), ids)
    found = read(model, Auto(tolerance), ids)
    prefix = reported(model).exact_prefix
    assert torch.allclose(found[:, :prefix], exact[:, :prefix], rtol=1e-9, atol=1e-9)
    assert difference(found, exact) <= 10 * tolerance


def test_a_prompt_leaves_no_plan_and_training_goes_on() -> None:
    model, ids = calm("llama", "t2mlr-whole"), tokens(2, LENGTH)
    undertow.set_solver(model, Auto(), Auto(1e-3))
    read(model, Auto(1e-3), ids)
    assert not find_attachment(model).plans.by_length
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert find_attachment(model).plans.by_length


def test_passes_that_do_not_shrink_are_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[bool] = []
    block: Any = RecurrentBlock.__subclasses__()[0]
    swept = block.swept

    def counting(self: Any, states: Any, last: bool = False) -> Any:
        passes.append(last)
        return swept(self, states, last)

    monkeypatch.setattr(block, "swept", counting)
    model = hosted("llama", "t2mlr-whole").eval()  # chaotic: changes do not shrink
    read(model, Auto(1e-6), tokens(1, LENGTH))
    assert reported(model).exact_prefix == LENGTH and len(passes) < 8
    passes.clear()
    read(calm("llama", "t2mlr-whole"), Auto(1e-6), tokens(1, LENGTH))
    assert len(passes) > 2, "the control: those that shrink go on"
