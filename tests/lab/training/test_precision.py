"""`training.precision`, and the cosine's floor: what they do in a run, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from undertow.errors import ConfigError
from undertow.lab.runs.log import read_log
from undertow.lab.training import train

LOOPED: dict[str, Any] = {
    "looped": {"prelude": [], "core": [0], "coda": [1]},
    "schedule": {"kind": "sampled", "mean": 2},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"recurrence": tiny.T2MLR},
        {"recurrence": tiny.TURBOCONN, "solver": {"kind": "scan", "sweeps": 2, "backward": 1}},
        {"depth": LOOPED},
        {"depth": {"shape": [1, 1, 1], "schedule": {"kind": "sampled", "mean": 2}}},
        {"model": {"architecture": "lstm"}},
        {"model": {"pauses": 1}},
    ],
    ids=["t2mlr", "turboconn", "looped", "huginn", "lstm", "pauses"],
)
def test_bf16_trains_as_fp32_does_and_saves_fp32(tmp_path: Path, changes: dict[str, Any]) -> None:
    exact = train(tiny.recipe(tmp_path / "fp32", **changes), seed=0)
    rounded = train(
        tiny.recipe(tmp_path / "bf16", **changes | {"training": {"precision": "bf16"}}), seed=0
    )
    for step, loss in tiny.losses(exact).items():
        assert tiny.losses(rounded)[step] == pytest.approx(loss, rel=0.05)
    assert tiny.losses(rounded) != tiny.losses(exact)
    assert {tensor.dtype for tensor in tiny.weights(rounded / "model").values()} == {torch.float32}


def test_arithmetic_that_the_machine_lacks_is_refused_before_a_folder_is_made(
    tmp_path: Path,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(
        ConfigError, match=r"training.precision is tf32, which takes a GPU since Ampere.* use fp32"
    ):
        train(tiny.recipe(tmp_path, training={"precision": "tf32"}), seed=0)
    assert not list(tmp_path.iterdir())


def test_a_cosine_ends_at_its_floor(tmp_path: Path) -> None:
    rates = {}
    for floor in (0.0, 0.25):
        changes = {"schedule": "cosine", "warmup_steps": 1, "floor": floor, "steps": 20}
        folder = train(tiny.recipe(tmp_path / str(floor), training=changes), seed=0)
        rates[floor] = [
            entry["learning_rate"]
            for entry in read_log(folder / "log.jsonl")
            if "learning_rate" in entry
        ]
    assert max(rates[0.25]) == pytest.approx(1e-2) and min(rates[0.25][1:]) == rates[0.25][-1]
    assert rates[0.25][-1] == pytest.approx(0.25e-2, rel=0.05) and rates[0.0][-1] < 0.2e-3


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"schedule": "cosine", "floor": 1.0}, "floor is 1.0; use 0 or more, and less than 1"),
        (
            {"schedule": "linear", "floor": 0.1},
            "floor is 0.1, but schedule is linear, and only cosine has one; leave it out",
        ),
        ({"precision": "bf6"}, "did you mean 'bf16'?"),
    ],
)
def test_mistakes(tmp_path: Path, training: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny.recipe(tmp_path, training=training)
    assert expected in str(error.value)
