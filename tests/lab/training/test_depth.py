"""Training recurrent-depth models by recipe: native and looped, with schedules, gates, monitors and
resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tokens, unhosted
from tiny import equal, interrupt, losses, recipe, weights

import undertow
from undertow.depth import LearnedGate, Steps
from undertow.depth.monitors import StateMonitor
from undertow.errors import ConfigError
from undertow.host.attachment import find_attachment
from undertow.lab.runs.depth import DepthSection
from undertow.lab.runs.loading import load
from undertow.lab.runs.log import read_log
from undertow.lab.training.depth import gated_loss
from undertow.lab.training.run import train
from undertow.models import HuginnForCausalLM

SCHEDULE = {"kind": "sampled", "mean": 3, "backward": 2}
NATIVE: dict[str, Any] = {"shape": [1, 1, 1], "schedule": SCHEDULE}
LOOPED: dict[str, Any] = {"looped": {"prelude": [], "core": [0], "coda": [1]}, "schedule": SCHEDULE}
GATED: dict[str, Any] = {"looped": {"whole": 2}, "schedule": {"kind": "fixed", "depth": 3}}


def entries(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / "log.jsonl")


@pytest.mark.parametrize("depth", [NATIVE, LOOPED], ids=["native", "looped"])
def test_trains_measures_and_saves(tmp_path: Path, depth: dict[str, Any]) -> None:
    folder = train(recipe(tmp_path, depth=depth, training={"steps": 12}), 0)
    found = losses(folder)
    assert len(found) == 12
    logged = [entry for entry in entries(folder) if "loss" in entry]
    assert all(-1 <= entry["token_correlation"] <= 1.0001 for entry in logged)
    assert (
        logged[-1]["relative_residual"] > 0
    )  # an adapter that starts by passing e through does not look at the state yet
    at_depths = {
        key
        for entry in entries(folder)
        for key in entry
        if key.startswith("eval_depth_") and key.endswith("_loss")
    }
    assert at_depths == {f"eval_depth_{r}_loss" for r in (1, 2, 3, 6, 12)}
    model, _ = load(str(folder / "model"))
    if depth is NATIVE:
        assert isinstance(model, HuginnForCausalLM) and model.config.mean_recurrence == 3
    else:
        assert find_attachment(model).looped.depth == 3
    assert len({entry["seconds_per_step"] for entry in logged}) > 1


@pytest.mark.parametrize("objective", ["loop-lm", "gate"])
def test_gate_objectives(tmp_path: Path, objective: str) -> None:
    folder = train(
        recipe(tmp_path, depth=GATED | {"objective": objective}, training={"weight_decay": 0.0}), 0
    )
    after, _ = load(str(folder / "model"))
    shallow = train(
        recipe(
            tmp_path,
            name="start",
            depth=GATED | {"objective": objective},
            training={"steps": 1, "learning_rate": 1e-12, "weight_decay": 0.0},
        ),
        0,
    )
    before, _ = load(str(shallow / "model"))
    moved = {
        name
        for name, p in after.named_parameters()
        if float((p - before.get_parameter(name)).detach().abs().max()) > 1e-6
    }
    assert any("loop.gate" in name for name in moved)
    assert any("mlp" in name for name in moved) == (objective == "loop-lm")


@pytest.mark.parametrize("objective", ["last", "loop-lm", "gate"])
def test_accumulating_changes_no_loss(tmp_path: Path, objective: str) -> None:
    """One batch of eight and four of two are the same step: same loss, same gradient."""
    depth = GATED | {"objective": objective}
    logged = []
    for batch, accumulate in ((8, 1), (2, 4)):
        training = {"steps": 1, "batch": batch, "accumulate": accumulate, "bucket_by_length": False}
        folder = train(recipe(tmp_path, name=f"by-{batch}", depth=depth, training=training), 0)
        logged.append(next(entry for entry in entries(folder) if "loss" in entry))
    assert logged[1]["loss"] == pytest.approx(logged[0]["loss"], rel=1e-4)
    assert logged[1]["grad_norm"] == pytest.approx(logged[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    "solver", [{"kind": "sequential"}, {"kind": "chunked", "chunk": 4}, {"kind": "scan"}]
)
def test_beside_a_recurrence_in_time_there_are_no_monitors(
    tmp_path: Path, solver: dict[str, Any]
) -> None:
    """A solver runs the loop on some tokens, or again and again: what a monitor saw would be no
    state of the sequence."""
    both = {"recurrence": {"kind": "t2mlr", "first_layer": 0, "last_layer": 1}, "solver": solver}
    folder = train(recipe(tmp_path, depth=LOOPED, training={"steps": 2}, **both), 0)
    assert len(losses(folder)) == 2 and not any(
        "token_correlation" in entry for entry in entries(folder)
    )
    with pytest.raises(
        ConfigError, match=r"objective gate weighs the loss of every iteration.*use objective last"
    ):
        train(recipe(tmp_path, name="gated", depth=GATED | {"objective": "gate"}, **both), 0)
    assert not (tmp_path / "gated").exists(), (
        "it left a folder, which would refuse the mended recipe"
    )


def test_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(recipe(tmp_path / "whole", depth=NATIVE), 0)
    with monkeypatch.context() as patch:
        interrupt(patch, step=5)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(tmp_path / "cut", depth=NATIVE), 0)
    resumed = train(recipe(tmp_path / "cut", depth=NATIVE), 0)
    assert losses(resumed) == losses(whole)
    assert equal(weights(resumed / "model"), weights(whole / "model"))


def test_depths_follow_the_seed_and_differ_between_seeds() -> None:
    section = recipe(Path("x"), depth=NATIVE | {"schedule": {"kind": "sampled", "mean": 16}}).depth
    draws = [[section.draw(step, seed).total for step in range(20)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_evaluation_does_not_depend_on_the_step(tmp_path: Path) -> None:
    """The same weights have the same held-out loss at a depth, whenever it is measured."""
    folder = train(
        recipe(
            tmp_path,
            depth=NATIVE,
            training={"steps": 2, "learning_rate": 1e-12, "evaluate_every": 1},
        ),
        0,
    )
    values = [
        entry["eval_depth_3_loss"] for entry in entries(folder) if "eval_depth_3_loss" in entry
    ]
    assert len(values) >= 2 and max(values) - min(values) < 1e-5
    means = [entry["eval_loss"] for entry in entries(folder) if "eval_loss" in entry]
    assert means == values  # 3 is the trained mean
    keys = {key for entry in entries(folder) for key in entry}
    assert "eval_depth_6_runtime" in keys and "eval_depth_3_runtime" not in keys, (
        "the mean is measured once"
    )


@pytest.mark.parametrize(
    "depth, match",
    [
        ({"schedule": SCHEDULE}, "says nothing of what to loop"),
        (LOOPED | {"shape": [1, 1, 1]}, "both set"),
        ({"shape": [1, 0, 1]}, "the core needs 1 layer"),
        (LOOPED | {"objective": "loop-lm"}, "needs a loop with a gate"),
        (NATIVE | {"schedule": {"kind": "sampled", "mean": 0}}, "mean is 0"),
        (NATIVE | {"evaluate_depths": [0]}, "evaluate_depths holds 0"),
        ({"looped": {"prelude": [0], "core": [1], "coda": [2]}}, "layer 2 is picked"),
        ({"looped": {"preset": "gpt-5"}}, "there is no preset 'gpt-5'"),
    ],
)
def test_mistakes(tmp_path: Path, depth: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        train(recipe(tmp_path, depth=depth), 0)


def test_native_model_takes_no_recurrence_in_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no recurrence in time"):
        recipe(
            tmp_path, depth=NATIVE, recurrence={"kind": "t2mlr", "first_layer": 0, "last_layer": 1}
        )


def test_both_axes_train(tmp_path: Path) -> None:
    both = recipe(
        tmp_path, depth=LOOPED, recurrence={"kind": "t2mlr", "first_layer": 0, "last_layer": 1}
    )
    folder = train(both, 0)
    model, _ = load(str(folder / "model"))
    attachment = find_attachment(model)
    assert attachment.loop is not None and attachment.pathway is not None
    assert all(torch.isfinite(torch.tensor(list(losses(folder).values()))))


@pytest.mark.parametrize("norm", [True, False])
def test_an_exit_gate_is_trained_on_what_it_sees_when_decoding(norm: bool) -> None:
    loop = undertow.Looped.whole(4, depth=3, norm=norm)
    model, text = undertow.attach(unhosted("llama"), loop), tokens(2, 5)
    seen: list[torch.Tensor] = []
    gate = find_attachment(model).loop.gate
    gate.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    inputs = {"input_ids": text, "labels": text, "depth": Steps(0, 3), "watch": StateMonitor()}
    gated_loss(model, inputs, DepthSection(looped=loop, objective="loop-lm"))
    trained = torch.stack(seen[:2])
    seen.clear()
    with torch.no_grad():
        model(input_ids=text, depth=3, exit_rule=LearnedGate(1.0))
    assert torch.allclose(torch.stack(seen), trained, atol=1e-5)
