"""`Auto`: which states it takes, when it measures, what it remembers, and that it never touches
what must be exact.

In float64 on architectures without casts of their own, so that "equal" means to rounding.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import pytest
import torch
from helpers import PATHWAYS, hosted, tokens
from torch import nn

import undertow
from undertow import Auto, Scan, Sequential
from undertow.errors import ConfigError
from undertow.host.attachment import find_attachment
from undertow.host.block import HostedBlock
from undertow.host.state import PRESENT, StateLayer
from undertow.pathways import Recurrence
from undertow.solvers import Adjoint, Plan, Plans, RecurrentBlock, Solution, Solver, auto
from undertow.solvers.adjoint import last_pass

TOKENS = 14
KINDS = ["plain", "left-padded", "right-padded", "packed", "cached"]
# A tolerance for each recurrence that takes three sweeps or more, and fewer than there are groups
# of `lag` tokens.
TOLERANCES = {
    "turboconn-1": 0.003,
    "turboconn-3": 0.002,
    "t2mlr-middle": 1e-4,
    "t2mlr-whole": 1e-3,
    "soft-token": 0.1,
}
NEVER, ALWAYS = 1.0, 1e6  # rollout costs that leave one sweep, and as many as are exact
IDS = tokens(3, TOKENS)


def model_for(pathway: str | Recurrence) -> nn.Module:
    name = "gpt_neox" if pathway == "soft-token" else "gpt2"
    return hosted(name, pathway).double().train()


def inputs(kind: str) -> dict[str, Any]:
    if kind == "packed":
        positions = torch.tensor([[*range(4), *range(10)], [*range(12), 0, 1], list(range(14))])
        return {"position_ids": positions, "use_cache": False}
    if kind.endswith("padded"):
        mask = torch.ones(3, TOKENS, dtype=torch.long)
        mask[0, :3] = mask[2, :1] = 0
        return {
            "attention_mask": mask if kind == "left-padded" else mask.flip(1),
            "use_cache": False,
        }
    return {"use_cache": kind == "cached"}


def forward(model: nn.Module, ids: torch.Tensor = IDS, kind: str = "plain") -> torch.Tensor:
    """Logits of real tokens, with a graph."""
    given = inputs(kind)
    logits: torch.Tensor = model(input_ids=ids, **given).logits
    return logits * given["attention_mask"][..., None] if "attention_mask" in given else logits


def gradient(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """The gradient of a function of the logits, over all parameters."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits.softmax(-1) * weights).sum().backward()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )


def run(
    model: nn.Module, solver: Solver | None = None, kind: str = "plain"
) -> tuple[torch.Tensor, torch.Tensor]:
    if solver is not None:
        undertow.set_solver(model, solver)
    logits = forward(model, kind=kind)
    return logits.detach(), gradient(model, logits)


@dataclasses.dataclass(frozen=True)
class Swept(Solver):
    """So many sweeps, each followed, and an adjoint: `Auto`'s forward, written out."""

    kind: ClassVar[str] = "swept"

    sweeps: int
    products: int = 1

    def solve(self, block: RecurrentBlock) -> Solution:
        with torch.no_grad():
            states = block.initial_states()
            for _ in range(self.sweeps):
                states, _ = block.swept(states).followed()
        return last_pass(block, states, Adjoint(self.products))


@dataclasses.dataclass(frozen=True)
class Leaving(Solver):
    """Leaves the states behind that so many sweeps, each followed, found."""

    kind: ClassVar[str] = "leaving"

    sweeps: int

    def solve(self, block: RecurrentBlock) -> Solution:
        states = block.initial_states()
        for _ in range(self.sweeps):
            states, output = block.swept(states, last=True).followed()
        return Solution(output, states, 1)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def plan_of(model: nn.Module, length: int = 16) -> Plan:
    return find_attachment(model).plans.by_length[length]


def swept(model: nn.Module, solver: Auto) -> int:
    """Let `Auto` measure once; the sweeps that it will take from then on."""
    undertow.set_solver(model, solver)
    forward(model)
    sweeps = plan_of(model).sweeps
    assert sweeps is not None
    plan_of(model).next_measurement = 100
    return sweeps


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the forwards that were measured."""
    found: list[int] = []
    measure = Auto.measure

    def spy(self: Auto, block: RecurrentBlock, plan: Plan, tokens: int) -> torch.Tensor:
        found.append(block.tokens)
        return measure(self, block, plan, tokens)

    monkeypatch.setattr(Auto, "measure", spy)
    return found


# --- what a forward computes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_a_measured_forward_is_the_rollout_with_an_adjoint(pathway: str, kind: str) -> None:
    """However loose the tolerance is."""
    model = model_for(pathway)
    exact, want = run(model, Sequential("adjoint(1)"), kind)
    logits, found = run(
        model, Auto(tolerance=0.9, gradient="adjoint(1)", rollout_cost=ALWAYS), kind
    )
    assert plan_of(model).sweeps is not None, "the next forward would take sweeps"
    assert apart(logits, exact) < 1e-12
    assert apart(found, want) < 1e-10
    plan_of(model).next_measurement = 100
    assert apart(run(model, kind=kind)[0], exact) > 1e-7, (
        "the control: sweeps of that tolerance are seen"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_between_measurements_it_is_sweeps_with_an_adjoint(pathway: str, kind: str) -> None:
    model = model_for(pathway)
    sweeps = swept(model, Auto(TOLERANCES[pathway], gradient="adjoint(1)", rollout_cost=ALWAYS))
    assert sweeps >= 3
    logits, found = run(model, kind=kind)
    report = undertow.report(model)
    assert report is not None and (report.solver, report.sweeps) == ("auto", sweeps)
    want_logits, want = run(model, Swept(sweeps, 1), kind)
    assert apart(logits, want_logits) < 1e-12
    assert apart(found, want) < 1e-10
    other_logits, other = run(model, Swept(sweeps - 1, 1), kind)
    assert min(apart(logits, other_logits), apart(found, other)) > 1e-8, (
        "the control: one sweep fewer is seen"
    )
    assert apart(found, run(model, Swept(sweeps, 2), kind)[1]) > 1e-8


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_where_sweeps_would_cost_more_it_rolls_out(pathway: str) -> None:
    model = model_for(pathway)
    exact, want = run(model, Sequential("adjoint(1)"))
    undertow.set_solver(model, Auto(1e-9, gradient="adjoint(1)", rollout_cost=NEVER))
    forward(model)
    assert plan_of(model).sweeps is None
    plan_of(model).next_measurement = 100
    logits, found = run(model)
    report = undertow.report(model)
    assert report is not None and (report.sweeps, report.exact_prefix) == (1, TOKENS)
    assert apart(logits, exact) < 1e-12
    assert apart(found, want) < 1e-10


@pytest.mark.parametrize("products", ["adjoint(0)", "adjoint(2)"])
def test_its_gradient_is_the_one_it_is_given(products: str) -> None:
    model = model_for("t2mlr-whole")
    _, want = run(model, Sequential(products))
    _, found = run(model, Auto(gradient=products))
    assert apart(found, want) < 1e-10
    assert apart(run(model, Auto(gradient="adjoint(1)"))[1], want) > 1e-8
    assert plan_of(model).products is None


@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("tolerance", [0.9, 0.01, 1e-9])
def test_products_are_as_many_as_the_measurement_took(pathway: str, tolerance: float) -> None:
    model = model_for(pathway)
    undertow.set_solver(model, Auto(gradient=f"adjoint({tolerance})", rollout_cost=NEVER))
    _, measured = run(model)
    plan = plan_of(model)
    exact = [run(model, Sequential(f"adjoint({n})"))[1] for n in range(1, 6)]
    assert plan.products is not None and 1 <= plan.products <= 4
    # The last product, which changes less than the tolerance, is in the measured gradient and not
    # in the next ones.
    tried = min(plan.products + 1, 4)
    assert apart(measured, exact[tried - 1]) < 1e-10
    undertow.set_solver(model, Auto(gradient=f"adjoint({tolerance})", rollout_cost=NEVER))
    find_attachment(model).plans.by_length[16] = dataclasses.replace(
        plan, sweeps=None, next_measurement=100
    )
    _, found = run(model)
    assert apart(found, exact[plan.products - 1]) < 1e-10
    assert (
        apart(found, exact[plan.products]) > 1e-8
        or apart(exact[plan.products - 1], exact[plan.products]) < 1e-8
    )


def test_products_grow_as_the_gates_open() -> None:
    counts = []
    for gate in (0.0, 0.05, 3.0):
        model = model_for("t2mlr-whole")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("gamma_recurrent"):
                    parameter.fill_(gate)
        run(model, Auto(gradient="adjoint(0.1)", rollout_cost=NEVER))
        counts.append(plan_of(model).products)
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] > 1


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_the_prefix_that_it_reports_is_exact(pathway: str) -> None:
    model = model_for(pathway)
    exact, _ = run(model, Sequential())
    swept(model, Auto(0.9, rollout_cost=ALWAYS))
    logits = forward(model).detach()
    report = undertow.report(model)
    assert report is not None
    prefix = report.exact_prefix
    assert prefix == min(TOKENS, (report.sweeps + 1) * find_attachment(model).pathway.lag) < TOKENS
    assert apart(logits[:, :prefix], exact[:, :prefix]) < 1e-12
    assert apart(logits[:, prefix:], exact[:, prefix:]) > 1e-7


@pytest.mark.parametrize("rollout_cost", [NEVER, ALWAYS])
def test_activation_checkpointing_and_the_mode_change_nothing(rollout_cost: float) -> None:
    model = model_for("t2mlr-whole")
    solver = Auto(1e-3, rollout_cost=rollout_cost)
    wanted = [run(model, solver), run(model), run(model)]  # measured, measured, not measured
    plans = find_attachment(model).plans
    model.eval()
    undertow.set_solver(model, Sequential())
    in_eval = [run(model, solver), run(model), run(model)]
    assert find_attachment(model).plans == plans
    assert all(
        torch.equal(got, want)
        for pair in zip(in_eval, wanted, strict=True)
        for got, want in zip(*pair, strict=True)
    )

    model.train()
    undertow.set_solver(model, Sequential())
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    layers = []
    hook = model.transformer.h[2].register_forward_hook(lambda *_: layers.append(1))  # type: ignore[union-attr, index]
    checkpointed = [run(model, solver), run(model), run(model)]
    hook.remove()
    assert find_attachment(model).plans == plans, (
        "what runs again in the backward pass is no new forward"
    )
    assert len(layers) > 3 * 2
    for (logits, found), (want_logits, want) in zip(checkpointed, wanted, strict=True):
        assert apart(logits, want_logits) < 1e-12
        assert apart(found, want) < 1e-10


@pytest.mark.parametrize("length", [1, 2, 3])
def test_one_group_is_one_exact_step(length: int, measured: list[int]) -> None:
    model = model_for("turboconn-3")
    ids = tokens(2, length)
    exact = forward(model, ids)
    want = gradient(model, exact)
    undertow.set_solver(model, Auto())
    logits = forward(model, ids)
    assert torch.equal(logits, exact)
    assert torch.equal(gradient(model, logits), want)
    assert not measured and not find_attachment(model).plans.by_length
    forward(model, tokens(2, 4))
    assert measured == [4], "the control: two groups are measured"


# --- how many sweeps it takes


def states_received(model: nn.Module, solver: Solver, kind: str) -> torch.Tensor:
    """What each token receives of the states that a forward leaves behind, read off the cache and
    shifted by hand."""
    undertow.set_solver(model, prefill=solver)
    with torch.no_grad():
        cache = model(input_ids=IDS, **{**inputs(kind), "use_cache": True}).past_key_values
    undertow.set_solver(model, prefill=Sequential())
    (layer,) = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    lag = find_attachment(model).pathway.lag
    states, there = (
        layer.keys[:, 0, : layer.seen],
        (layer.values[:, 0, : layer.seen] == PRESENT).float(),
    )
    return states[:, :-lag] * there[:, :-lag] * there[:, lag:]


@pytest.mark.parametrize("kind", ["plain", "left-padded", "right-padded"])
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_it_takes_the_fewest_sweeps_within_the_tolerance(pathway: str, kind: str) -> None:
    model, tolerance = model_for(pathway), TOLERANCES[pathway]
    undertow.set_solver(model, Auto(tolerance, rollout_cost=ALWAYS))
    forward(model, kind=kind)
    plan = plan_of(model)
    exact = states_received(model, Sequential(), kind)
    gaps = [apart(states_received(model, Leaving(k), kind), exact) for k in range(1, TOKENS)]
    gaps += [0.0, 0.0]
    enough = [
        k
        for k in range(1, TOKENS)
        if gaps[k - 1] <= tolerance
        and (
            gaps[k - 1] <= 1e-4 or all(gaps[j] <= max(0.3 * gaps[j - 1], 1e-4) for j in (k, k + 1))
        )
    ]
    assert plan.sweeps == enough[0] >= 3
    assert plan.gap == pytest.approx(gaps[plan.sweeps - 1], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([0.04], None),  # nothing is known of what further sweeps do
        ([0.04, 0.01], None),
        ([0.04, 0.01, 0.002], 1),
        ([0.2, 0.04, 0.01, 0.002], 2),
        ([0.04, 0.01, 0.009], None),  # what is left is a chain, which no sweep follows
        ([0.04, 0.02, 0.01, 0.009, 0.008], None),
        ([0.04, 0.02, 0.005, 0.001], 2),
        ([5e-5], 1),  # too little to tell
        ([0.02, 9e-5, 9e-5], 1),
        ([0.02, 9e-5], 1),
        ([0.2, 0.1, 0.06], None),
    ],
)
def test_sweeps_are_enough_where_further_ones_go_on_shrinking_the_error(
    gaps: list[float], expected: int | None
) -> None:
    assert Auto(0.05).enough(gaps, rounding=1e-7) == expected


def test_rounding_is_allowed() -> None:
    """In half precision sweeps and rollout differ by it, whatever the number of sweeps."""
    assert Auto(0.05).enough([0.02, 0.008], rounding=0.0078125) is None
    assert Auto(0.05).enough([0.02, 0.0078], rounding=0.0078125) == 1
    assert Auto(0.001).enough([0.02, 0.0078], rounding=0.0078125) is None


@pytest.mark.parametrize(
    ("weights", "autocast", "wanted"),
    [(torch.bfloat16, False, 2**-7), (torch.float32, True, 2**-7), (torch.float32, False, 2**-23)],
)
def test_the_rounding_is_that_of_the_layers(
    weights: torch.dtype, autocast: bool, wanted: float
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert auto.rounding(torch.zeros(1, dtype=weights)) == wanted


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_the_cost_of_a_rollout_bounds_the_sweeps(pathway: str) -> None:
    model, tolerance = model_for(pathway), TOLERANCES[pathway]
    needed = swept(model, Auto(tolerance, rollout_cost=ALWAYS))
    assert swept(model, Auto(tolerance, rollout_cost=needed)) == needed
    undertow.set_solver(model, Auto(tolerance, rollout_cost=needed - 0.5))
    forward(model)
    assert plan_of(model).sweeps is None


@pytest.mark.parametrize(("seconds", "expected"), [(0.2, 3), (0.3, 3), (0.35, None), (0.9, None)])
def test_the_times_are_compared_if_no_cost_is_given(
    seconds: float, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now = model_for("t2mlr-whole"), [0.0]
    step, sweep = auto.roll_out, HostedBlock.swept

    def roll_out(block: RecurrentBlock) -> Any:
        now[0] += 1.0
        return step(block)

    def timed(block: Any, *given: Any, **named: Any) -> Any:
        now[0] += seconds
        return sweep(block, *given, **named)

    monkeypatch.setattr(auto, "roll_out", roll_out)
    monkeypatch.setattr(HostedBlock, "swept", timed)
    monkeypatch.setattr(auto, "clock", lambda block: now[0])
    undertow.set_solver(model, Auto(1e-3))
    forward(model)
    assert plan_of(model).sweeps == expected


@pytest.mark.parametrize("kind", ["left-padded", "right-padded"])
@pytest.mark.parametrize("pathway", ["turboconn-1", "turboconn-3", "t2mlr-whole", "soft-token"])
def test_padding_does_not_enter_the_gap(pathway: str, kind: str) -> None:
    model, found = model_for(pathway), []
    mask = inputs(kind)["attention_mask"]
    wrong = IDS.clone()
    wrong[1, 4] += 1
    for ids in (IDS, torch.where(mask == 0, tokens(3, TOKENS, seed=9), IDS), wrong):
        undertow.set_solver(model, Sequential())
        undertow.set_solver(model, Auto(TOLERANCES[pathway], rollout_cost=ALWAYS))
        logits = forward(model, ids, kind)
        found.append(
            (plan_of(model).sweeps, plan_of(model).gap, logits.detach(), gradient(model, logits))
        )
    (sweeps, gap, logits, grown), (sweeps_, gap_, logits_, grown_), (_, other, _, _) = found
    assert (sweeps, gap) == (sweeps_, pytest.approx(gap_, rel=1e-9, abs=1e-12))
    assert torch.equal(logits, logits_)
    padded = (mask == 0).any()
    assert padded and apart(grown, grown_) < 1e-12
    assert other != pytest.approx(gap, rel=1e-6, abs=1e-14), "the control: a real token enters it"


# --- when it measures, and what it remembers


@pytest.mark.parametrize(
    ("every", "expected"),
    [(1, [1, 2, 4, 8, 16, 24]), (2, [1, 2, 4, 8, 16, 32, 48]), (32, [1, 2, 4, 8, 16, 32, 64, 128])],
)
def test_it_measures_more_and_more_rarely(every: int, expected: list[int]) -> None:
    model, found = hosted("gpt2", "turboconn-3").train(), []
    ids = tokens(1, 4)
    undertow.set_solver(model, Auto(0.9, every, rollout_cost=ALWAYS))
    for number in range(1, expected[-1] + 1):
        before = find_attachment(model).plans.plan(4).next_measurement
        model(input_ids=ids)
        if plan_of(model, 4).next_measurement != before:
            found.append(number)
    assert found == expected
    assert plan_of(model, 4).forwards == expected[-1]


def test_a_plan_that_changes_is_measured_sooner_again() -> None:
    model = model_for("turboconn-1")
    undertow.set_solver(model, Auto(0.9, 4, rollout_cost=ALWAYS))
    forward(model)
    plan = plan_of(model)
    changes: list[dict[str, Any]] = [{"sweeps": 9}, {"gap": plan.gap / 2}, {}]
    for change in changes:
        found = dataclasses.replace(plan, forwards=100, interval=16, next_measurement=101, **change)
        find_attachment(model).plans.by_length[16] = found
        forward(model)
        assert found.next_measurement == 101 + (4 if change else 32), "the control: a steady one"


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_a_model_that_outgrows_its_plan_is_measured_in_the_next_forward(
    pathway: str, measured: list[int]
) -> None:
    model, tolerance = model_for(pathway), TOLERANCES[pathway]
    enough = swept(model, Auto(tolerance, rollout_cost=ALWAYS))
    measured.clear()
    forward(model)
    forward(model)
    assert not measured, "the control: a plan that fits waits for its time"
    plan_of(model).sweeps = 1
    logits = forward(model).detach()
    report = undertow.report(model)
    assert report is not None and report.residual > 3 * tolerance and not measured
    assert plan_of(model).next_measurement == plan_of(model).forwards + 1
    exact = forward(model).detach()
    assert measured == [TOKENS] and plan_of(model).sweeps == enough
    assert apart(logits, exact) > 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_watches_is_the_change_by_one_more_sweep(kind: str) -> None:
    """Of what tokens receive, so that padding and the last tokens do not enter."""
    model, tolerance = model_for("turboconn-3"), TOLERANCES["turboconn-3"]
    sweeps = swept(model, Auto(tolerance, rollout_cost=ALWAYS))
    forward(model, kind=kind)
    report = undertow.report(model)
    assert report is not None
    if kind in ("packed", "cached"):
        assert 0 < report.residual < 3 * tolerance
        return
    before, after = (states_received(model, s(sweeps), kind) for s in (Leaving, Swept))
    assert report.residual == pytest.approx(apart(before, after), rel=1e-6)


def test_a_longer_sequence_than_measured_is_measured_at_once(measured: list[int]) -> None:
    model = model_for("turboconn-1")
    undertow.set_solver(model, Auto(0.1, rollout_cost=ALWAYS))
    for length in (9, 9, 9, 12, 12, 10, 13):
        forward(model, tokens(2, length))
    # The first two by the schedule, then what is longer; after the measurement in forward 4 the
    # next would be in 8.
    assert measured == [9, 9, 12, 13]


def test_each_power_of_two_has_a_plan_of_its_own(measured: list[int]) -> None:
    model = model_for("turboconn-1")
    undertow.set_solver(model, Auto(0.02, rollout_cost=4))
    for length in (2, 3, 4, 5, 8, 9, 16, 17):
        forward(model, tokens(2, length))
    plans = find_attachment(model).plans.by_length
    assert {length: plan.forwards for length, plan in plans.items()} == {
        2: 1,
        4: 2,
        8: 2,
        16: 2,
        32: 1,
    }
    assert plans[2].sweeps == 1
    before = json.dumps(find_attachment(model).plans.to_mapping()["8"])
    forward(model, tokens(2, 16))
    assert json.dumps(find_attachment(model).plans.to_mapping()["8"]) == before


def test_the_memory_goes_through_json(measured: list[int]) -> None:
    model = model_for("turboconn-1")
    solver = Auto(0.02, rollout_cost=ALWAYS)
    undertow.set_solver(model, solver)
    for length in (9, 9, 9, 5):
        forward(model, tokens(2, length))
    plans = find_attachment(model).plans
    read = Plans.from_mapping(json.loads(json.dumps(plans.to_mapping())))
    assert read == plans and read is not plans
    assert read.plan(9) == Plan(
        plans.plan(9).sweeps,
        plans.plan(9).gap,
        plans.plan(9).allowed,
        tokens=9,
        forwards=3,
        interval=2,
        next_measurement=4,
    )
    assert read != Plans({16: plans.plan(9)})

    other = model_for("turboconn-1")
    undertow.set_solver(other, solver)
    find_attachment(other).plans = read
    measured.clear()
    assert torch.equal(forward(other, IDS[:2, :8]), forward(model, IDS[:2, :8]))
    assert measured == [8, 8]  # both are longer than the 5 tokens that were measured
    assert read == plans


def test_another_solver_forgets_and_an_equal_one_keeps() -> None:
    model = model_for("turboconn-1")
    undertow.set_solver(model, Auto(0.02))
    forward(model)
    plans = find_attachment(model).plans
    assert plans.by_length
    undertow.set_solver(model, Auto(0.02))
    undertow.set_solver(model, prefill=Scan())
    assert find_attachment(model).plans is plans
    undertow.set_solver(model, Auto(0.03))
    assert not find_attachment(model).plans.by_length


def test_without_gradients_all_is_exact_and_nothing_is_remembered(measured: list[int]) -> None:
    model = model_for("turboconn-1")
    with torch.no_grad():
        exact = forward(model)
    undertow.set_solver(model, Auto(0.9, rollout_cost=ALWAYS))
    forward(model)
    forward(model)
    plans = find_attachment(model).plans
    before = json.dumps(plans.to_mapping())
    measured.clear()
    for training in (False, True):
        model.train(training)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(forward(model), exact)
                report = undertow.report(model)
                assert report is not None and report.solver == "sequential"
    assert json.dumps(find_attachment(model).plans.to_mapping()) == before and not measured
    assert apart(forward(model).detach(), exact) > 1e-7, (
        "the control: with gradients it takes sweeps"
    )
    assert json.dumps(plans.to_mapping()) != before


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tolerance": 0.0}, "tolerance is 0.0; use more than 0, and less than 1"),
        ({"tolerance": 1.0}, "tolerance is 1.0; use more than 0, and less than 1"),
        ({"tolerance": -0.1}, "tolerance is -0.1; use more than 0, and less than 1"),
        ({"every": 0}, "Auto: every is 0; use 1 or more"),
        ({"rollout_cost": 0.0}, "Auto: rollout_cost is 0.0; use 1 or more"),
        ({"rollout_cost": 0.5}, "Auto: rollout_cost is 0.5; use 1 or more"),
        ({"rollout_cost": -1.0}, "Auto: rollout_cost is -1.0; use 1 or more"),
        ({"gradient": "full"}, "auto's gradient is 'full'; its states have no graph"),
        (
            {"gradient": "truncated(2)"},
            "auto's gradient is 'truncated(2)'; its states have no graph",
        ),
        (
            {"gradient": "adjoint(1.5)"},
            "gradient is 'adjoint(1.5)'; the number of steps must be whole",
        ),
        ({"gradient": "whole"}, "gradient is 'whole'; write"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Auto(**settings)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
