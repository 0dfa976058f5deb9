"""`Auto`: which states it takes, when it measures, what it remembers, and that it never touches
what must be exact.

In float64 on architectures without casts of their own, so that "equal" means to rounding.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from helpers import PATHWAYS, hosted, tokens
from torch import nn

import undertow
from undertow import Auto, Scan, Sequential
from undertow.errors import ConfigError
from undertow.host.attachment import find_attachment, find_pathway
from undertow.host.state import PRESENT, StateLayer
from undertow.pathways import Recurrence
from undertow.solvers import Plan, Plans, Solver, auto
from undertow.solvers.base import RecurrentBlock

TOKENS = 14
KINDS = ["plain", "left-padded", "right-padded", "packed", "cached"]
# A tolerance for each recurrence that takes three sweeps or more, and fewer than there are groups
# of `lag` tokens.
TOLERANCES = {
    "turboconn-1": 0.02,
    "turboconn-3": 0.01,
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
def test_between_measurements_it_is_the_scan_with_an_adjoint(pathway: str, kind: str) -> None:
    model = model_for(pathway)
    sweeps = swept(model, Auto(TOLERANCES[pathway], gradient="adjoint(1)", rollout_cost=ALWAYS))
    assert sweeps >= 3
    logits, found = run(model, kind=kind)
    report = undertow.report(model)
    assert report is not None and (report.solver, report.sweeps) == ("auto", sweeps)
    want_logits, want = run(model, Scan(sweeps, 0, gradient="adjoint(1)"), kind)
    assert apart(logits, want_logits) < 1e-12
    assert apart(found, want) < 1e-10
    other_logits, other = run(model, Scan(sweeps - 1, 0, gradient="adjoint(1)"), kind)
    assert min(apart(logits, other_logits), apart(found, other)) > 1e-8, (
        "the control: one sweep fewer is seen"
    )
    assert apart(found, run(model, Scan(sweeps, 0, gradient="adjoint(2)"), kind)[1]) > 1e-8


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
        run(model, Auto(rollout_cost=NEVER))
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
    # After its k sweeps a scan makes one more pass, and leaves the states of that one behind.
    gaps = {k + 1: apart(states_received(model, Scan(k, 0), kind), exact) for k in range(1, TOKENS)}
    assert plan.sweeps is not None and plan.sweeps >= 3
    assert plan.sweeps == min(k for k, gap in gaps.items() if gap <= plan.allowed)
    assert gaps[plan.sweeps - 1] > plan.allowed
    assert plan.gap == pytest.approx(gaps[plan.sweeps], rel=1e-6, abs=1e-12)


def test_what_is_allowed_follows_the_error_after_one_sweep() -> None:
    """A tenth of it, but no more than the tolerance and no less than its square."""
    model = model_for("t2mlr-whole")

    def allowed(tolerance: float) -> float:
        undertow.set_solver(model, Auto(tolerance, rollout_cost=NEVER))  # leaves one sweep
        forward(model)
        return plan_of(model).allowed

    allowed(0.5)
    first = plan_of(model).gap
    assert first > 0.01
    for tolerance, wanted in (
        (0.05 * first, 0.05 * first),
        (0.2 * first, 0.1 * first),
        (0.9, 0.81),
    ):
        assert allowed(tolerance) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("weights", "autocast", "wanted"),
    [
        (torch.bfloat16, False, torch.finfo(torch.bfloat16).eps),
        (torch.float32, True, torch.finfo(torch.bfloat16).eps),
        (torch.float32, False, 0.05**2),
    ],
)
def test_rounding_is_allowed(weights: torch.dtype, autocast: bool, wanted: float) -> None:
    """In half precision sweeps and rollout differ by it, whatever the number of sweeps."""
    model = hosted("gpt2", "t2mlr-whole").to(weights).train()
    pathway = find_pathway(model)
    with torch.no_grad():
        for gamma in (pathway.gamma_recurrent, pathway.gamma_current):
            gamma.fill_(1e-4)  # a recurrence that is hardly there
    undertow.set_solver(model, Auto(0.05, rollout_cost=NEVER))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        forward(model)
    assert plan_of(model).gap < 0.02
    assert plan_of(model).allowed == pytest.approx(wanted)


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_the_cost_of_a_rollout_bounds_the_sweeps(pathway: str) -> None:
    model, tolerance = model_for(pathway), TOLERANCES[pathway]
    needed = swept(model, Auto(tolerance, rollout_cost=ALWAYS))
    assert swept(model, Auto(tolerance, rollout_cost=needed)) == needed
    undertow.set_solver(model, Auto(tolerance, rollout_cost=needed - 0.5))
    forward(model)
    assert plan_of(model).sweeps is None
    assert plan_of(model).gap > plan_of(model).allowed


@pytest.mark.parametrize(("seconds", "expected"), [(0.2, 3), (0.3, 3), (0.35, None), (0.9, None)])
def test_the_times_are_compared_if_no_cost_is_given(
    seconds: float, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now = model_for("t2mlr-whole"), [0.0]
    step, sweep = auto.roll_out, auto.sweep

    def roll_out(block: RecurrentBlock) -> Any:
        now[0] += 1.0
        return step(block)

    def timed(block: RecurrentBlock, states: torch.Tensor | None) -> torch.Tensor:
        now[0] += seconds
        return sweep(block, states)

    monkeypatch.setattr(auto, "roll_out", roll_out)
    monkeypatch.setattr(auto, "sweep", timed)
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
    [(1, [1, 2, 3, 4, 5, 6, 7]), (4, [1, 2, 4, 8, 12, 16, 20]), (32, [1, 2, 4, 8, 16, 32, 64, 96])],
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
    assert report is not None and report.residual > 2 * tolerance and not measured
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
        assert 0 < report.residual < 2 * tolerance
        return
    # After its k sweeps a scan makes one more pass, and leaves the states of that one behind.
    before, after = (states_received(model, Scan(k, 0), kind) for k in (sweeps - 1, sweeps))
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


def test_it_is_no_solver_for_prefill() -> None:
    model = model_for("turboconn-1")
    with pytest.raises(
        ConfigError,
        match=r"^Auto adapts while a model is trained; choose a fixed solver for prefill",
    ):
        undertow.set_solver(model, prefill=Auto())
    assert find_attachment(model).prefill == Sequential()
