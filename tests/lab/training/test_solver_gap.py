"""How far a solver is from the rollout: what is measured, what a run logs of it, when it warns, and
what a resume keeps."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from helpers import hosted, tokens
from torch import nn
from transformers import Trainer, TrainingArguments

import undertow
from undertow import Auto, Chunked, Jacobi, Scan, Sequential
from undertow.errors import ConfigError
from undertow.host.attachment import find_attachment
from undertow.host.state import PRESENT, StateLayer
from undertow.lab.runs.checkpoints import last_checkpoint
from undertow.lab.runs.log import read_log
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.runs.run import Run
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training import solver_gap, train
from undertow.lab.training.build import build
from undertow.lab.training.from_scratch import from_scratch
from undertow.lab.training.solver_gap import Gap, SolverGap, measure_gap
from undertow.manifest import write_manifest
from undertow.solvers import Plan, Solver
from undertow.solvers.base import RecurrentBlock

IDS = tokens(3, 14)
BATCH: dict[str, Any] = {"input_ids": IDS, "labels": IDS}
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
PADDED = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}
PACKED = BATCH | {
    "position_ids": torch.tensor([[*range(5), *range(9)], [*range(11), 0, 1, 2], list(range(14))])
}
SCAN = {"kind": "scan", "sweeps": 1, "backward": 0}
AUTO = {"kind": "auto", "tolerance": 0.05, "rollout_cost": 3.0}


def model_for(pathway: str, solver: Solver) -> Any:
    return hosted(
        "gpt_neox" if pathway == "soft-token" else "llama", pathway, solver=solver
    ).train()


def forward(model: nn.Module, batch: dict[str, Any], solver: Solver) -> tuple[float, torch.Tensor]:
    """The loss of a forward without gradients, and the states that it leaves in the cache, as
    tokens receive them."""
    training = model.training
    undertow.set_solver(model, prefill=solver)
    with torch.no_grad():
        output = model.eval()(**batch, use_cache=True)
    undertow.set_solver(model.train(training), prefill=Sequential())
    (layer,) = [layer for layer in output.past_key_values.layers if isinstance(layer, StateLayer)]
    lag = find_attachment(model).pathway.lag
    states, there = (
        layer.keys[:, 0, : layer.seen],
        (layer.values[:, 0, : layer.seen] == PRESENT).float(),
    )
    return output.loss.item(), states[:, :-lag] * there[:, :-lag] * there[:, lag:]


def by_hand(model: nn.Module, batch: dict[str, Any], solver: Solver, before: Solver) -> Gap:
    """The gap of a solver; the one with a sweep fewer leaves behind, in its last pass, the states
    that this one takes."""
    exact_loss, exact = forward(model, batch, Sequential())
    states = forward(model, batch, before)[1]
    return Gap(
        float((states - exact).norm() / exact.norm()), forward(model, batch, solver)[0] - exact_loss
    )


# --- the measurement


@pytest.mark.parametrize("batch", [BATCH, PADDED], ids=["plain", "padded"])
@pytest.mark.parametrize(
    ("solver", "before"),
    [(Scan(2, 0), Scan(1, 0)), (Jacobi(3, 1), Jacobi(2, 1)), (Chunked(64, Scan(2)), Scan(1, 0))],
    ids=["scan", "jacobi", "chunked"],
)
@pytest.mark.parametrize("pathway", ["turboconn-1", "turboconn-3", "t2mlr-whole", "soft-token"])
def test_the_gap_is_what_forwards_by_hand_give(
    pathway: str, solver: Solver, before: Solver, batch: dict[str, Any]
) -> None:
    model = model_for(pathway, solver)
    gap, want = measure_gap(model, batch), by_hand(model, batch, solver, before)
    assert gap.loss is not None and want.loss is not None
    if not (
        pathway == "t2mlr-whole" and isinstance(solver, Jacobi)
    ):  # its last pass scans, the sweeps before it do not
        assert gap.states == pytest.approx(want.states, rel=1e-3)
    assert gap.states > 1e-3
    assert gap.loss == pytest.approx(want.loss, rel=0.02, abs=2e-6)
    other = measure_gap(model_for(pathway, before), batch).states
    assert other != pytest.approx(gap.states, rel=0.02), "the control: one sweep fewer is seen"


def test_chunks_are_measured_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for("turboconn-1", Chunked(4, Scan(1, 0)))
    pathway, seen = find_attachment(model).pathway, []
    site = min(pathway.writes)

    written = pathway.written_where

    def spy(at: int, hidden: Any, received: torch.Tensor, *rest: Any) -> torch.Tensor:
        if at == site:
            seen.append(received)
        return written(at, hidden, received, *rest)

    _, exact = forward(model, BATCH, Sequential())
    with monkeypatch.context() as patch:
        patch.setattr(pathway, "written_where", spy)
        forward(model, BATCH, Chunked(4, Scan(1, 0)))
    # Of each chunk the first guess, the sweep from it, and the pass that gives the output.
    assert [states.shape[1] for states in seen] == [*[4] * 9, *[2] * 3]
    received = torch.cat(seen[2::3], dim=1)[:, 1:]
    want = float((received - exact).norm() / exact.norm())
    assert measure_gap(model, BATCH).states == pytest.approx(want, rel=1e-4)
    assert 1e-3 < want < 0.9 * measure_gap(model_for("turboconn-1", Scan(1, 0)), BATCH).states


@pytest.mark.parametrize(
    "solver", [Sequential(), Sequential("adjoint(1)"), Scan(14, 0), Chunked(5, Sequential())]
)
def test_what_is_exact_has_no_gap(solver: Solver) -> None:
    for pathway in ("turboconn-3", "t2mlr-whole"):
        gap = measure_gap(model_for(pathway, solver), PADDED)
        assert gap.loss is not None
        assert gap.states < 1e-5 and abs(gap.loss) < 1e-5


def test_packed_documents_are_measured_as_they_are_trained() -> None:
    """With a cache, transformers would let each document attend to those before it."""
    model = model_for("t2mlr-whole", Scan(1, 0))
    losses = []
    for solver in (Scan(1, 0), Sequential()):
        undertow.set_solver(model, solver)
        losses.append(model(**PACKED, use_cache=False).loss.item())
    undertow.set_solver(model, Scan(1, 0))
    assert measure_gap(model, PACKED | {"use_cache": False}).loss == pytest.approx(
        losses[0] - losses[1], rel=0.02
    )
    cached = forward(model, PACKED, Scan(1, 0))[0] - forward(model, PACKED, Sequential())[0]
    assert cached != pytest.approx(losses[0] - losses[1], rel=0.1), "the control: a cache is seen"


def test_the_loss_is_left_out_where_a_batch_has_no_labels() -> None:
    model = model_for("t2mlr-whole", Scan(1, 0))
    gap = measure_gap(model, {"input_ids": IDS})
    assert gap == Gap(measure_gap(model, BATCH).states, None)


@pytest.mark.parametrize("training", [False, True])
def test_all_is_as_before_a_measurement(training: bool) -> None:
    model = model_for("turboconn-1", Scan(1, 0)).train(training)
    undertow.set_solver(model, prefill=Scan(3, 0))
    model.config.attention_dropout = 0.9
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    first, second = measure_gap(model, BATCH), measure_gap(model, BATCH)
    assert first == second, "there was dropout"
    assert model.training == training and model.model.layers[0].training == training
    attachment = find_attachment(model)
    assert (attachment.solver, attachment.prefill) == (Scan(1, 0), Scan(3, 0))
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(TypeError):
        measure_gap(model, {"input_ids": IDS, "no_such_input": 1, "position_ids": "wrong"})
    assert model.training == training and attachment.prefill == Scan(3, 0), (
        "not even after an error"
    )


def test_who_cannot_be_measured() -> None:
    model = model_for("turboconn-1", Auto())
    with pytest.raises(
        ConfigError,
        match=r"^Auto measures its own distance to the exact rollout; its plans tell it$",
    ):
        measure_gap(model, BATCH)
    with pytest.raises(ConfigError, match="the model has no recurrence"):
        measure_gap(undertow.detach(model), BATCH)
    with pytest.raises(ConfigError, match=r"^the solver is compared every 0 steps; use 1 or more$"):
        SolverGap(every=0)


# --- the warning


def test_it_warns_of_a_large_gap_and_again_when_it_has_doubled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, warned_at = model_for("turboconn-1", Scan(1, 0)), []
    gaps = [0.01, 0.049, 0.05, 0.06, 0.099, 0.1, 0.1, 0.199, 0.05, float("nan"), 0.21]
    watch, every = SolverGap(every=2), iter(gaps)
    monkeypatch.setattr(solver_gap, "measure_gap", lambda *_: Gap(next(every), -0.25))
    for step in range(1, 2 * len(gaps) + 1):
        watch.inputs = {"input_ids": IDS}
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="undertow"):
            watch.on_step_end(None, SimpleNamespace(global_step=step), None, model=model)
        assert not watch.inputs, "it holds a batch longer than it needs it"
        for record in caplog.records:
            assert record.name == "undertow"
            text = record.getMessage()
            assert text.startswith(f"step {step}: the states that Scan(sweeps=1, ")
            assert (
                "% off the exact rollout's and its loss differs by -0.2500;" in text
                and "\n" not in text
            )
            warned_at.append(gaps[step // 2 - 1])
    assert warned_at == [0.05, 0.1, 0.21]
    assert next(every, None) is None, "it measured at every second step"


def test_the_warning_without_a_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = SolverGap(every=1)
    watch.inputs = {"input_ids": IDS}
    with caplog.at_level(logging.WARNING, logger="undertow"):
        watch.on_step_end(
            None, SimpleNamespace(global_step=1), None, model=model_for("turboconn-1", Scan(1, 0))
        )
    (record,) = caplog.records
    assert "off the exact rollout's; generation is exact" in record.getMessage()
    assert set(watch.found) == {"solver_gap"}


# --- in a run of a recipe


def entries(folder: Path) -> dict[int, dict[str, float]]:
    """What the log says of the solver, by step."""
    return {
        entry["step"]: {key: value for key, value in entry.items() if key.startswith("solver_")}
        for entry in read_log(folder / "log.jsonl")
        if "loss" in entry
    }


def test_a_run_logs_the_gap_every_so_many_steps(tmp_path: Path) -> None:
    recipe = tiny.recipe(
        tmp_path, recurrence=tiny.TURBOCONN, solver=SCAN, training={"compare_every": 3}
    )
    logged = entries(train(recipe, seed=0))
    assert {step: set(found) for step, found in logged.items()} == {
        step: {"solver_gap", "solver_loss_gap"} if step in (3, 6) else set() for step in range(1, 7)
    }
    assert 0 < logged[3]["solver_gap"] < logged[6]["solver_gap"], "the recurrence opens"
    assert logged[6]["solver_loss_gap"] != 0


def test_a_run_with_auto_logs_its_sweeps(tmp_path: Path) -> None:
    logged = entries(train(tiny.recipe(tmp_path, recurrence=tiny.TURBOCONN, solver=AUTO), seed=0))
    assert list(logged) == [1, 2, 3, 4, 5, 6]
    for found in logged.values():
        assert set(found) == {"solver_gap", "solver_sweeps", "solver_products"}
        assert found["solver_products"] in (1, 2, 3, 4)
        assert found["solver_sweeps"] in (0, 1, 2, 3)
        assert found["solver_sweeps"] == 0 or found["solver_gap"] <= 0.05


@pytest.mark.parametrize("recurrence", [tiny.TURBOCONN, None], ids=["exact", "plain"])
def test_a_run_that_is_exact_logs_nothing_of_it(recurrence: Any, tmp_path: Path) -> None:
    solver = (
        {"kind": "sequential"} if recurrence else SCAN
    )  # there is nothing to solve for the plain model
    recipe = tiny.recipe(
        tmp_path, recurrence=recurrence, solver=solver, training={"compare_every": 1, "steps": 2}
    )
    assert list(entries(train(recipe, seed=0)).values()) == [{}, {}]


def test_watching_changes_nothing_of_the_training(tmp_path: Path) -> None:
    folders = [
        train(
            tiny.recipe(
                tmp_path,
                name=f"{n}",
                recurrence=tiny.T2MLR,
                solver=SCAN,
                training={"compare_every": n},
            ),
            seed=0,
        )
        for n in (1, 100)
    ]
    assert len(entries(folders[0])[1]) == 2 and not entries(folders[1])[1]
    assert tiny.losses(folders[0]) == tiny.losses(folders[1])
    assert tiny.equal(*(tiny.weights(folder / "model") for folder in folders))


# --- a resumed run


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of every training forward with `Auto` the tokens and whether it was measured."""
    found: list[tuple[int, bool]] = []
    solve, measure = Auto.solve, Auto.measure

    def solving(self: Auto, block: RecurrentBlock) -> Any:
        found.append((block.tokens, False))
        return solve(self, block)

    def measuring(self: Auto, block: RecurrentBlock, plan: Plan, tokens: int) -> torch.Tensor:
        found[-1] = (block.tokens, True)
        return measure(self, block, plan, tokens)

    monkeypatch.setattr(Auto, "solve", solving)
    monkeypatch.setattr(Auto, "measure", measuring)
    return found


@pytest.mark.parametrize("plans", ["kept", "lost"])
def test_a_resumed_run_goes_on_with_the_plans_of_its_checkpoint(
    plans: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forwards: list[tuple[int, bool]]
) -> None:
    fixed = {
        "kind": "parity",
        "template": "bare",
        "min_length": 6,
        "max_length": 6,
    }  # one length, and so one plan
    changes: dict[str, Any] = {
        "recurrence": tiny.TURBOCONN,
        "solver": AUTO,
        "task": fixed,
        "training": {"steps": 8},
    }
    whole = train(tiny.recipe(tmp_path, name="whole", **changes), seed=0)
    uninterrupted = list(forwards)
    assert [measured for _, measured in uninterrupted] == [
        True,
        True,
        False,
        True,
        False,
        False,
        False,
        True,
    ]

    wanted = tiny.recipe(tmp_path, **changes)
    with monkeypatch.context() as patch:
        tiny.interrupt(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            train(wanted, seed=0)
    checkpoint = last_checkpoint(Run.of(wanted, 0).folder)
    assert checkpoint is not None and checkpoint.name == "checkpoint-6"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (plan,) = state["stateful_callbacks"]["SolverGap"]["attributes"]["memory"].values()
    assert (plan["forwards"], plan["next_measurement"]) == (6, 8)
    if plans == "lost":
        state["stateful_callbacks"].pop("SolverGap")
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        write_manifest(checkpoint)
    forwards.clear()
    folder = train(wanted, seed=0)
    same = tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))
    if plans == "kept":
        assert forwards == uninterrupted[6:] and same
        assert entries(folder) == entries(whole)
    else:
        assert [measured for _, measured in forwards] == [True, True], (
            "the control: without its plans it measures at once"
        )


# --- with the libraries' own tools


def trainer_for(model: Any, folder: Path, callback: SolverGap, **settings: Any) -> Trainer:
    items: Any = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=3,
        learning_rate=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    return Trainer(model=model, args=arguments, train_dataset=items, callbacks=[callback])


def test_a_plain_trainer(tmp_path: Path) -> None:
    model = model_for("turboconn-1", Scan(1, 0))
    hooks = len(model._forward_pre_hooks)
    trainer = trainer_for(model, tmp_path, SolverGap(every=1))
    trainer.train()
    want = measure_gap(model, BATCH)  # of the same examples; the weights do not move
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(lines) == 3
    for entry in lines:
        assert entry["solver_gap"] == pytest.approx(want.states, rel=1e-3)
        assert entry["solver_loss_gap"] == pytest.approx(want.loss, rel=0.02)
    assert want.states > 0.01
    assert len(model._forward_pre_hooks) == hooks, "a hook was left behind"


def test_a_plain_trainer_with_auto(tmp_path: Path) -> None:
    trainer = trainer_for(
        model_for("turboconn-1", Auto(0.1, rollout_cost=5.0)), tmp_path, SolverGap(every=1)
    )
    trainer.train()
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["solver_sweeps"] for entry in lines] == [2, 2, 2]
    assert all(0 < entry["solver_gap"] < 0.1 for entry in lines)


def test_a_trainer_that_takes_the_labels_for_itself(tmp_path: Path) -> None:
    trainer = trainer_for(
        model_for("turboconn-1", Scan(1, 0)),
        tmp_path,
        SolverGap(every=1),
        label_smoothing_factor=0.1,
    )
    trainer.train()
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(lines) == 3
    assert all(entry["solver_gap"] > 0.01 and "solver_loss_gap" not in entry for entry in lines)


def test_an_interrupted_training_leaves_no_second_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, watch = model_for("turboconn-1", Scan(1, 0)), SolverGap(every=1)
    before = len(model._forward_pre_hooks)
    with monkeypatch.context() as patch:
        patch.setattr(
            SolverGap, "on_step_end", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            trainer_for(model, tmp_path, watch).train()
    trainer_for(model, tmp_path, watch).train()
    assert len(model._forward_pre_hooks) == before
    assert not watch.inputs


def test_a_model_that_peft_wraps(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("01=")
    from_scratch(ModelSection(width=16, heads=2, positions=64), tokenizer).save_pretrained(
        tmp_path / "base"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    changes: dict[str, Any] = {
        "model": {"path": str(tmp_path / "base")},
        "recurrence": tiny.TURBOCONN,
        "lora": {"rank": 4},
    }
    recipe = tiny.recipe(
        tmp_path, solver=SCAN, training={"compare_every": 2, "save_every": None}, **changes
    )
    model, _ = build(recipe, seed=0)
    batch = {"input_ids": IDS % 5 + 1, "labels": IDS % 5 + 1}
    assert measure_gap(model, batch).states < 1e-5, "the recurrence starts closed"
    with torch.no_grad():
        for name, parameter in find_attachment(model).pathway.named_parameters():
            if "up" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    undertow.set_solver(model, Scan(2, 0))
    gap, want = measure_gap(model, batch), by_hand(model, batch, Scan(2, 0), Scan(1, 0))
    assert gap.states == pytest.approx(want.states, rel=1e-3) and gap.loss == pytest.approx(
        want.loss, rel=0.02, abs=2e-6
    )
    assert gap.states > 1e-3
    assert find_attachment(model).prefill == Sequential()

    logged = entries(train(recipe, seed=0))
    assert [step for step, found in logged.items() if found] == [2, 4, 6]
    auto = tiny.recipe(tmp_path, name="auto", solver=AUTO, training={"save_every": None}, **changes)
    assert all("solver_sweeps" in found for found in entries(train(auto, seed=0)).values())
