"""Two processes, by FSDP2 and by DDP, have the gradients of one; with FSDP2 they make no more
collectives than the plain model, and none waits for good, whatever the solver and the lengths of
the rows."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from sharded import (
    batches,
    counted,
    error,
    gradients,
    half_precision,
    loss,
    model_of,
    shard,
    wanted,
    whole,
)
from torch.nn.parallel import DistributedDataParallel
from two import run

import undertow.distributed
from undertow import Auto, Jacobi, Scan, Sequential
from undertow.host.attachment import find_attachment
from undertow.solvers import Solver

SOLVERS: dict[str, Solver] = {
    "scan": Scan(2, 1),
    "jacobi": Jacobi(4, 2),
    "sequential": Sequential(),
    "truncated": Sequential("truncated(2)"),
    "adjoint": Sequential("adjoint(1)"),
    "exact adjoint": Sequential("adjoint(20)"),
    "auto": Auto(rollout_cost=4.0),
}
KINDS = ["t2mlr-middle", "turboconn-3", "soft-token"]
# Of the two processes' rows: others, one within the lag, and alike.
LENGTHS = [(8, 5), (13, 1), (6, 6)]
SAME = 1e-4
Learn = Callable[[], Any]


def trial(rank: int, kind: str, solver: Solver | None, lengths: tuple[int, int]) -> Any:
    """Two steps: the error of the first one's gradients, and both steps' collectives."""
    ids = batches(lengths)
    model = model_of(kind, solver)
    expected = wanted(model, ids)
    shard(model)
    counts = [counted(lambda: loss(model, ids[rank]).backward())]
    found = gradients(model)
    model.zero_grad()
    counts.append(counted(lambda: loss(model, ids[rank]).backward()))
    # Only a solver that plans otherwise for each process's lengths differs from one process.
    return {"error": error(found, expected), "counts": counts}


def step(rank: int, kind: str, what: Callable[[Any, torch.Tensor, Learn], None]) -> Any:
    """`what` happens, then an ordinary step: its gradients' error."""
    ids = batches((8, 5))
    model = model_of(kind, Sequential() if kind in KINDS else None)
    # Otherwise FSDP keeps the weights outside the layers, of the plain model too, past a step.
    shard(model, reshard_after_forward=True)
    # Large steps, by which weights that are not the newest would show.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    what(model, ids[rank], optimizer.step)
    optimizer.zero_grad()
    alone = copy.deepcopy(model_of(kind, Sequential() if kind in KINDS else None))
    weights = {name: whole(each.detach()) for name, each in model.state_dict().items()}
    alone.load_state_dict(weights, strict=False)
    loss(model, ids[rank]).backward()
    return {"error": error(gradients(model), wanted(alone, ids))}


def lost_forward(model: Any, ids: torch.Tensor, learn: Learn) -> None:
    """Gradients of one forward, then one whose backward pass never runs, then the weights move."""
    loss(model, ids).backward()
    loss(model, ids)
    learn()


def lost_but_kept(model: Any, ids: torch.Tensor, learn: Learn) -> None:
    """The same, but the graph is still there in the next step."""
    loss(model, ids).backward()
    model.lost = loss(model, ids)
    learn()


def failed_forward(model: Any, ids: torch.Tensor, learn: Learn) -> None:
    loss(model, ids).backward()
    solver = find_attachment(model).solver
    broken = mock.patch.object(type(solver), "solve", side_effect=ValueError("broken"))
    with broken, pytest.raises(ValueError, match="broken"):
        loss(model, ids)
    model.reset_iter_state()
    learn()


def without_gradients(model: Any, ids: torch.Tensor, learn: Learn) -> None:
    loss(model, ids).backward()
    with torch.no_grad():
        loss(model, ids)
    learn()


def kept_graph(model: Any, ids: torch.Tensor, learn: Learn) -> None:
    found = loss(model, ids)
    found.backward(retain_graph=True)
    found.backward()
    learn()


def generated(model: Any, ids: torch.Tensor, learn: Learn) -> None:
    loss(model, ids).backward()
    model.eval()
    model.generate(ids[:, :4], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    model.train()
    learn()


def short_rows(model: Any, ids: torch.Tensor, learn: Learn) -> None:
    loss(model, ids).backward()
    loss(model, ids)
    learn()
    loss(model, ids[:, :2]).backward()


BEFORE = {
    "a lost forward": lost_forward,
    "a lost forward that is kept": lost_but_kept,
    "a failed forward": failed_forward,
    "an evaluation": without_gradients,
    "a kept graph": kept_graph,
    "a generation": generated,
    "short rows": short_rows,
}


def accumulated(rank: int, kind: str) -> Any:
    """Two micro-batches, of which the first is not synchronised."""
    first, second = batches((8, 5)), batches((4, 9))
    model = model_of(kind, Sequential("adjoint(2)") if kind in KINDS else None)
    expected = wanted(model, [*first, *second])
    shard(model)
    model.set_requires_gradient_sync(False)
    (loss(model, first[rank]) / 2).backward()
    model.set_requires_gradient_sync(True)
    (loss(model, second[rank]) / 2).backward()
    return {"error": error(gradients(model), expected)}


def together(rank: int, kind: str) -> Any:
    """Two forwards, and one backward pass through both."""
    first, second = batches((8, 5)), batches((4, 9))
    model = model_of(kind, Sequential() if kind in KINDS else None)
    expected = wanted(model, [*first, *second])
    shard(model)
    ((loss(model, first[rank]) + loss(model, second[rank])) / 2).backward()
    return {"error": error(gradients(model), expected)}


def checkpointed(rank: int, kind: str) -> Any:
    ids = batches((8, 5))
    model = model_of(kind, Sequential() if kind in KINDS else None)
    expected = wanted(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shard(model)
    counts = [counted(lambda: loss(model, ids[rank]).backward())]
    return {"error": error(gradients(model), expected), "counts": counts}


def in_bfloat16(rank: int, kind: str) -> Any:
    """Weights are kept and reduced in fp32: a step far below bfloat16's spacing moves them."""
    ids = batches((8, 5))
    model = model_of(kind, Sequential("adjoint(1)") if kind in KINDS else None)
    expected = wanted(model, ids)
    shard(model, mp_policy=half_precision())
    loss(model, ids[rank]).backward()
    dtypes = {str(each.dtype) for each in model.parameters()}
    return {"error": error(gradients(model), expected), "dtypes": sorted(dtypes)}


def replicated(rank: int, kind: str, lengths: tuple[int, int]) -> Any:
    """By DDP, which refuses parameters that some process gave no gradient."""
    ids = batches(lengths)
    model = model_of(kind, Scan(2, 1) if kind in KINDS else None)
    expected = wanted(model, ids)
    copies = DistributedDataParallel(model)
    loss(copies, ids[rank]).backward()
    return {"error": error(gradients(copies), expected)}


def unheld(rank: int, solver: Solver) -> Any:
    """The control: FSDP left alone."""
    with mock.patch.object(undertow.distributed, "sharded", lambda modules: []):
        return trial(rank, "t2mlr-middle", solver, (6, 6))


def untouched(rank: int) -> Any:
    """The other control: parameters that nothing reached have no gradient."""
    model = model_of("turboconn-3", Sequential())
    ids = batches((2, 2))[rank]
    with mock.patch("undertow.host.forward.with_gradient", lambda output, module: output):
        loss(model, ids).backward()
    without = len(gradients(model))
    model.zero_grad()
    loss(model, ids).backward()
    return {"without": without, "with": len(gradients(model))}


TRIALS: dict[str, Callable[[int], Any]] = {
    "plain": functools.partial(trial, kind="plain", solver=None, lengths=(8, 5)),
    "untouched": untouched,
}
CASES = [(kind, name, lengths) for kind in KINDS for name in SOLVERS for lengths in LENGTHS]
CASES += [(kind, "", lengths) for kind in ("loop", "huginn") for lengths in LENGTHS]
for kind, name, lengths in CASES:
    TRIALS[f"{kind} {name} {lengths}"] = functools.partial(
        trial, kind=kind, solver=SOLVERS.get(name), lengths=lengths
    )
EVERY = [*KINDS, "loop", "huginn"]
for kind in EVERY:
    for name, special in (
        ("accumulated", accumulated),
        ("together", together),
        ("checkpointed", checkpointed),
        ("bfloat16", in_bfloat16),
    ):
        TRIALS[f"{kind} {name}"] = functools.partial(special, kind=kind)
    for lengths in LENGTHS:
        TRIALS[f"{kind} by DDP {lengths}"] = functools.partial(
            replicated, kind=kind, lengths=lengths
        )
for name, what in BEFORE.items():
    TRIALS[f"after {name}"] = functools.partial(step, kind="t2mlr-middle", what=what)
TRIALS["unheld rollout"] = functools.partial(unheld, solver=Sequential())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    gc.collect()
    return run(TRIALS, tmp_path_factory.mktemp("two"), seconds=150)


def outcome(outcomes: dict[str, list[Any]], name: str) -> list[dict[str, Any]]:
    """What both processes found."""
    found = outcomes.get(name, [])
    assert len(found) == 2 and not any(isinstance(each, str) for each in found), (
        f"{name}: {found or 'a trial before it failed or hung'}"
    )
    return found


@pytest.mark.parametrize(("kind", "name", "lengths"), CASES)
def test_gradients_are_those_of_one_process(
    kind: str, name: str, lengths: tuple[int, int], outcomes: dict[str, list[Any]]
) -> None:
    for found in outcome(outcomes, f"{kind} {name} {lengths}"):
        limit = 0.05 if name == "auto" else SAME  # whose plans are those of the longest rows
        assert found["error"] < limit


@pytest.mark.parametrize(("kind", "name", "lengths"), CASES)
def test_collectives_are_no_more_than_the_plain_models(
    kind: str, name: str, lengths: tuple[int, int], outcomes: dict[str, list[Any]]
) -> None:
    (plain, _) = outcome(outcomes, "plain")
    for found in outcome(outcomes, f"{kind} {name} {lengths}"):
        for counts in found["counts"]:
            assert counts["gathers"] <= plain["counts"][0]["gathers"]
            assert counts["reductions"] == plain["counts"][0]["reductions"]


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("name", ["accumulated", "together", "checkpointed"])
def test_other_ways_to_take_a_step(kind: str, name: str, outcomes: dict[str, list[Any]]) -> None:
    for found in outcome(outcomes, f"{kind} {name}"):
        assert found["error"] < SAME


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", EVERY)
def test_gradients_by_ddp(
    kind: str, lengths: tuple[int, int], outcomes: dict[str, list[Any]]
) -> None:
    for found in outcome(outcomes, f"{kind} by DDP {lengths}"):
        assert found["error"] < SAME


@pytest.mark.parametrize("before", BEFORE)
def test_a_step_after_others(before: str, outcomes: dict[str, list[Any]]) -> None:
    for found in outcome(outcomes, f"after {before}"):
        assert found["error"] < SAME


@pytest.mark.parametrize("kind", EVERY)
def test_mixed_precision_keeps_weights_in_fp32(kind: str, outcomes: dict[str, list[Any]]) -> None:
    for found in outcome(outcomes, f"{kind} bfloat16"):
        assert found["error"] < 0.2 and found["dtypes"] == ["torch.float32"]


def test_control_left_alone_a_rollout_gathers_for_every_group(
    outcomes: dict[str, list[Any]],
) -> None:
    (plain, _) = outcome(outcomes, "plain")
    for found in outcome(outcomes, "unheld rollout"):
        assert found["counts"][0]["gathers"] > 2 * plain["counts"][0]["gathers"]


def test_control_rows_within_the_lag_leave_parameters_without_gradient(
    outcomes: dict[str, list[Any]],
) -> None:
    for found in outcome(outcomes, "untouched"):
        assert found["without"] < found["with"]
