"""A pathway of one's own: every solver equals the rollout with it, and one that breaks the contract
is refused by name."""

from typing import Any

import pytest
import torch
from helpers import PATHWAYS, SAME, difference, tokens, unhosted
from leaky import Leaky, LeakyPathway, leaky

import undertow
from undertow import ConfigError
from undertow.host import learning
from undertow.pathways.base import scan_by_update
from undertow.solvers import Solver

TOKENS = 11
TO_THE_END: list[Solver] = [
    undertow.Scan(TOKENS, TOKENS),
    undertow.Scan(TOKENS, 0, gradient=f"adjoint({TOKENS})"),
    undertow.Jacobi(TOKENS, TOKENS),
    undertow.Sequential(f"adjoint({TOKENS})"),
    undertow.Auto(gradient=f"adjoint({TOKENS})"),
]


def outcome(
    model: Any, solver: Solver, ids: torch.Tensor, **inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the pathway's gradients."""
    undertow.set_solver(model, solver)
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False, **inputs)
    out.loss.backward()
    parameters = list(model.model.recurrence.pathway.parameters())
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    return out.logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def gaps(lag: int, solver: Solver) -> tuple[float, float]:
    model, ids = leaky(lag), tokens(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    want, got = (
        outcome(model, each, ids, attention_mask=mask) for each in (undertow.Sequential(), solver)
    )
    seen = mask.bool()
    return difference(got[0][seen], want[0][seen]), difference(got[1], want[1])


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("solver", TO_THE_END, ids=str)
def test_every_solver_run_to_its_end_equals_the_rollout(solver: Solver, lag: int) -> None:
    logits, gradient = gaps(lag, solver)
    assert logits < SAME
    assert gradient < SAME


def test_control_a_scan_that_ignores_the_state_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = leaky()
    monkeypatch.setattr(
        LeakyPathway, "scan", lambda self, readings, initial, present: self.update(readings, None)
    )
    ids = tokens(2, TOKENS)
    want, got = (outcome(model, each, ids) for each in (undertow.Sequential(), TO_THE_END[0]))
    assert difference(got[0], want[0]) > 10 * SAME
    assert difference(got[1], want[1]) > 10 * SAME


def test_a_right_scan_of_its_own_is_taken() -> None:
    class Own(LeakyPathway):
        def scan(self, readings: Any, initial: Any, present: Any) -> torch.Tensor:
            return 1.0 * scan_by_update(self, readings, initial, present)

    undertow.attach(unhosted("llama"), Leaky(3, Own))


def altered(**methods: Any) -> Leaky:
    return Leaky(2, type("Altered", (LeakyPathway,), methods))


def without_initial(self: Any, readings: Any, initial: Any, present: Any) -> torch.Tensor:
    return scan_by_update(self, readings, None, present)


def without_gates(self: Any, readings: Any, initial: Any, present: Any) -> torch.Tensor:
    return scan_by_update(self, readings, initial, None)


def cut_from_the_past(self: Any, readings: Any, initial: Any, present: Any) -> torch.Tensor:
    return scan_by_update(self, readings, None if initial is None else initial.detach(), present)


def cut_from_the_rate(self: Any, readings: Any, initial: Any, present: Any) -> torch.Tensor:
    states = scan_by_update(self, readings, initial, present)
    return states - self.rate + self.rate.detach()


def averaged(self: Any, readings: Any, state: Any) -> torch.Tensor:
    mean = readings[0].mean(dim=1, keepdim=True)
    return readings[0] - mean if state is None else readings[0] - mean + self.rate * state


def across_rows(self: Any, readings: Any, state: Any) -> torch.Tensor:
    mean = readings[0].mean(dim=0, keepdim=True)
    return readings[0] - mean if state is None else readings[0] - mean + self.rate * state


def in_place(self: Any, readings: Any, state: Any) -> torch.Tensor:
    return readings[0] if state is None else readings[0].add_(self.rate * state)


def along_tokens(self: Any, site: int, hidden: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
    method: Any = LeakyPathway.write if state else LeakyPathway.read
    return method(self, site, hidden.cumsum(1), *(each.cumsum(1) for each in state))


def minus_mean_row(self: Any, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return LeakyPathway.write(self, site, hidden, state - state.mean(0, keepdim=True))


BROKEN = {
    "Altered.read gives a token something else alone": altered(read=along_tokens),
    "Altered.write gives a token something else alone": altered(write=along_tokens),
    "Altered.write gives a token something else alone than": altered(write=minus_mean_row),
    "Altered.update changes its readings in place": altered(update=in_place),
    "Altered.write changes the residual stream in place": altered(
        write=lambda self, site, hidden, state: hidden.mul_(0.9)
    ),
    "Altered.read gives a tuple": altered(read=lambda self, site, hidden: (hidden, hidden)),
    "Altered.write gives torch.float64": altered(
        write=lambda self, site, hidden, state: hidden.double()
    ),
    "Altered.scan gives other states than update": altered(
        scan=lambda self, r, i, p: self.update(r, None)
    ),
    "Altered.scan gives other states than update, .* beside initial": altered(scan=without_initial),
    "Altered.scan gives other states than .* padding": altered(scan=without_gates),
    "Altered.scan gives the initial states another gradient": altered(scan=cut_from_the_past),
    "Altered.scan gives the parameter rate another gradient": altered(scan=cut_from_the_rate),
    r"Altered.scan gives other states .* \(of shape": altered(
        scan=lambda self, r, i, p: scan_by_update(self, r, i, p)[:, :1]
    ),
    r"Altered.update gives other states for no state \(None\)": altered(
        update=lambda self, r, s: r[0] if s is None else 0.5 * r[0] + s
    ),
    "Altered.update gives other states for all tokens at once": altered(
        update=averaged, scan=scan_by_update
    ),
    "Altered.update gives a row other states beside another": altered(update=across_rows),
    r"Altered.update gives states of shape \[2, 7, 3\]": altered(
        update=lambda self, r, s: r[0][..., :3]
    ),
    r"Altered.guess gives states of shape \[2, 7, 3\]": altered(
        guess=lambda self, r: r[0][..., :3]
    ),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_pathway_that_breaks_the_contract_is_refused_by_what_differs(problem: str) -> None:
    model = unhosted("llama")
    with pytest.raises(ConfigError, match=problem):
        undertow.attach(model, BROKEN[problem])
    assert not hasattr(model.model, "recurrence")


@pytest.mark.parametrize("problem", [problem for problem in BROKEN if "shape" not in problem])
def test_control_without_the_trial_it_is_attached(
    problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "check_pathway", lambda *inputs: None)
    undertow.attach(unhosted("llama"), BROKEN[problem])


@pytest.mark.parametrize(
    ("reads", "writes", "problem"),
    [
        ({4}, {2, 5}, "uses site 5, but the model's sites are 0 to 4"),
        ({1, 3}, {2}, "reads at site 1, outside its recurrent block"),
        ({2}, {1, 3}, "writes at site 3, outside its recurrent block"),
        (set(), {1}, "reads nowhere"),
        ({2}, set(), "writes nowhere"),
    ],
)
def test_sites_that_no_solver_comes_by_are_refused(
    reads: set[int], writes: set[int], problem: str
) -> None:
    def __init__(self: Any, lag: int, width: int) -> None:
        LeakyPathway.__init__(self, lag, width)
        self.reads, self.writes = frozenset(reads), frozenset(writes)

    with pytest.raises(ConfigError, match=problem):
        undertow.attach(unhosted("llama"), altered(__init__=__init__))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PATHWAYS)
def test_what_is_built_in_keeps_the_contract(name: str, dtype: torch.dtype) -> None:
    undertow.attach(unhosted("llama").to(dtype), PATHWAYS[name])


@pytest.mark.parametrize("settings", [{"norm": "clamped"}, {"detach_residual": True}], ids=str)
def test_so_do_the_variants_of_t2mlr(settings: dict[str, Any]) -> None:
    undertow.attach(unhosted("llama"), undertow.T2MLR(1, 2, **settings))


def test_a_new_pathway_is_in_its_models_mode() -> None:
    """One that drops entries out in training must not do so in a model that is evaluated."""
    for mode in (True, False):
        model = undertow.attach(unhosted("llama").train(mode), PATHWAYS["t2mlr-middle"])
        assert model.model.recurrence.pathway.training is mode
