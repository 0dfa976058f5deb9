"""States that stop being finite are told with their token, whatever the solver; padding does not
count."""

from typing import Any

import pytest
import torch
from helpers import PATHWAYS, generate, hosted, logits, recurrent_parameters, tokens

import undertow
from undertow import DivergedError, finite
from undertow.finite import check_finite
from undertow.host import forward
from undertow.solvers import Solver

IDS = tokens(2, 40)


def growing(normalize: bool = False) -> Any:
    """TurboConn whose states grow a millionfold a token, or would."""
    model = hosted(
        "llama", undertow.TurboConn(((3, 0),), lag=1, alpha=100.0, rank=8, normalize=normalize)
    )
    with torch.no_grad():
        for parameter in recurrent_parameters(model).values():
            parameter.mul_(300)
    return model


def first_broken(model: Any) -> int:
    """The token whose state is the first that is not finite, by a rollout that nothing looks at."""
    seen: list[torch.Tensor] = []
    update = model.model.recurrence.pathway.update
    model.model.recurrence.pathway.update = lambda *given: seen.append(update(*given)) or seen[-1]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(forward, "check_finite", lambda *given: None)
        logits(model, IDS)
    del model.model.recurrence.pathway.update
    return next(index for index, state in enumerate(seen) if not bool(torch.isfinite(state).all()))


SOLVERS: list[Solver] = [
    undertow.Sequential(),
    undertow.Sequential("adjoint(1)"),
    undertow.Auto(),
    undertow.Scan(39, 1),
    undertow.Chunked(16, undertow.Sequential()),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_training_says_so(solver: Solver) -> None:
    model = growing()
    undertow.set_solver(model, solver)
    with pytest.raises(
        DivergedError, match=f"state of token {first_broken(model)} in row .*normalize=True"
    ):
        model(IDS, labels=IDS, use_cache=False)


def test_prefill_and_generation_say_so() -> None:
    model = growing()
    token = first_broken(model)
    assert token > 3
    for call in (
        lambda: logits(model, IDS, use_cache=True),
        lambda: generate(model, IDS[:, :2], new=40),
    ):
        with pytest.raises(DivergedError, match=r"state of token \d+ in row .*normalize=True"):
            call()


def test_control_with_the_remedy_all_is_finite() -> None:
    model = growing(normalize=True)
    assert torch.isfinite(logits(model, IDS)).all()
    generate(model, IDS[:, :2], new=40)


def test_control_without_the_check_numbers_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "check_finite", lambda *given: None)
    assert not torch.isfinite(logits(growing(), IDS)).all()


def test_padding_does_not_count() -> None:
    states = torch.ones(2, 3, 4)
    states[1, 0, 2] = torch.nan
    real = torch.tensor([[1, 1, 1], [0, 1, 1]]).bool()
    check_finite(states, real, 5, "mend")
    with pytest.raises(DivergedError, match=r"state of token 5 in row 1 .*; mend"):
        check_finite(states, None, 5, "mend")
    with pytest.raises(DivergedError, match="state of token 5 in row 1"):
        check_finite(states, ~real, 5, "mend")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_the_earliest_token_is_named(value: float) -> None:
    states = torch.zeros(2, 6, 3)
    states[0, 4], states[1, 2, 0] = value, value
    with pytest.raises(DivergedError, match="token 2 in row 1"):
        check_finite(states, None, 0, "mend")


def test_large_numbers_whose_sum_overflows_pass() -> None:
    check_finite(torch.full((2, 3, 4), 6e4, dtype=torch.float16), None, 0, "mend")
    check_finite(torch.full((2, 3, 4), 3e38), None, 0, "mend")


def test_a_loop_and_a_pathway_beside_it_are_looked_at() -> None:
    model = undertow.attach(
        hosted("llama", PATHWAYS["turboconn-1"]), undertow.Looped((0,), (1,), (2, 3))
    )  # wide apart
    undertow.detach(model)
    undertow.attach(model, undertow.Looped((0,), (1, 2), (3,)))
    with torch.no_grad():
        model.model.recurrence.loop.adapter.weight.fill_(torch.inf)
    with pytest.raises(DivergedError, match="smaller depth"):
        logits(model, IDS)


def test_nothing_is_looked_at_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite.torch.compiler, "is_compiling", lambda: True)
    check_finite(torch.full((1, 1, 1), torch.nan), None, 0, "mend")
