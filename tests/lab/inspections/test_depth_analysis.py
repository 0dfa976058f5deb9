"""What the iterations of a recurrent-depth model do: lens, exits, convergence, path independence,
trajectories."""

import json
import math
from pathlib import Path

import pytest
import torch
from small_huginn import ids, small
from small_looped import looped
from tiny import recipe

from undertow.depth import LatentDifference, Scripted
from undertow.depth.handle import at_depth, get_depth, set_depth
from undertow.errors import CheckpointError, ConfigError
from undertow.lab.inspections.depth import (
    behaviours,
    convergence,
    iteration_logits,
    iteration_states,
    loss_by_depth,
    measure_exits,
    path_independence,
    principal_components,
)
from undertow.lab.inspections.inspect_depth import inspect_depth
from undertow.lab.training.run import train

MODELS = {
    "native": small,
    "looped": lambda: looped("llama"),
    "whole": lambda: looped("llama", "whole"),
}


def batch() -> dict[str, torch.Tensor]:
    tokens = ids(2, 7)
    mask = torch.ones_like(tokens)
    mask[1, :2], tokens[1, :2] = 0, 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[1, 2] = -100  # which padding would predict
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("kind", MODELS)
def test_lens_and_losses_are_those_of_each_depth(kind: str) -> None:
    model, inputs = MODELS[kind](), batch()
    real = inputs["attention_mask"].bool()
    found = iteration_logits(model, inputs, 4)
    losses = loss_by_depth(model, inputs, (1, 3))
    for depth in (1, 2, 3, 4):
        with torch.no_grad(), at_depth(model, depth):
            output = model(**inputs, use_cache=False)
        assert torch.allclose(found[depth - 1][real], output.logits[real], atol=1e-4)
        if depth in losses:
            assert math.isclose(losses[depth], float(output.loss), rel_tol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_exits(kind: str) -> None:
    model, inputs = MODELS[kind](), batch()
    never, script = measure_exits(model, inputs, [LatentDifference(1e-30), Scripted((2,))], 5)
    assert never.mean_depth == 5 and never.histogram == (0, 0, 0, 0, 12)
    assert script.mean_depth == 2 and script.histogram == (0, 12, 0, 0, 0)
    losses = loss_by_depth(model, inputs, (2, 5))
    assert math.isclose(never.loss, losses[5], rel_tol=1e-5) and math.isclose(
        script.loss, losses[2], rel_tol=1e-5
    )


def test_convergence_and_path_independence() -> None:
    model, inputs = small(), batch()
    states = iteration_states(model, inputs, 16)
    assert states.shape == (17, 2, 7, 32)
    distances = convergence(states)
    assert float(distances[-1].max()) == 0 < float(distances[-2].min())
    assert float(distances[12].median()) < 0.2 * float(distances[0].median())
    apart = path_independence(model, inputs, 16)
    assert len(apart) == 17 and apart[0] > 1.2  # two noises lie √2 of their norm apart
    assert apart[16] < 0.5 * apart[1]
    with pytest.raises(ConfigError, match="two or more"):
        path_independence(model, inputs, 4, seeds=(1,))


def test_behaviours_of_known_ways() -> None:
    time = torch.arange(40.0)
    point = torch.stack([1 + 0.5**time, torch.ones(40)], dim=-1)
    orbit = torch.stack([torch.cos(time * 0.7), torch.sin(time * 0.7)], dim=-1)
    slider = torch.stack([time, 0.1 * time], dim=-1)
    states = torch.stack([point, orbit, slider], dim=1)[:, None]
    assert behaviours(states) == [["fixed point", "orbit", "slider"]]


def test_principal_components() -> None:
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(9, 2, 5, 2, generator=generator) * torch.tensor([5.0, 1.0])
    basis = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0][:2]
    found = principal_components(plane @ basis, 3)
    assert found.shape == (9, 2, 5, 3)
    spread = found.flatten(0, 2).std(0)
    assert float(spread[0]) > 4 > 1.5 > float(spread[1]) > 0.5 and float(spread[2]) < 1e-4


def test_depth_of_a_model() -> None:
    for model in (small(seed=3), looped("llama")):
        before = get_depth(model)
        with at_depth(model, 2):
            assert get_depth(model) == 2
        assert get_depth(model) == before
        with pytest.raises(ConfigError, match="depth is 0"):
            set_depth(model, 0)


def test_inspect(tmp_path: Path) -> None:
    schedule = {"kind": "sampled", "mean": 3, "backward": 2}
    folder = train(recipe(tmp_path, depth={"shape": [1, 1, 1], "schedule": schedule}), 0)
    text = inspect_depth(folder, 4)
    assert "3 (trained mean)" in text and "latent-difference" in text and "r=3" in text
    output = folder / "depth"
    assert {path.name for path in output.iterdir()} == {
        *(
            "depth.json",
            "depth.md",
            "loss.png",
            "accuracy.png",
            "exits.png",
            "convergence.png",
            "trajectories.png",
        )
    }
    results = json.loads((output / "depth.json").read_text())
    assert set(results["loss_by_depth"]) == {"1", "2", "3", "4", "6", "12"}
    assert math.isclose(sum(results["behaviours"].values()), 1.0)
    with pytest.raises(ConfigError, match="examples is 0"):
        inspect_depth(folder, 0)
    with pytest.raises(CheckpointError):
        inspect_depth(tmp_path / "nothing", 4)
    plain = train(recipe(tmp_path, name="plain"), 0)
    with pytest.raises(ConfigError, match="no recurrence"):
        inspect_depth(plain, 4)


def test_inspect_scores_a_label_at_every_position(tmp_path: Path) -> None:
    task = {"kind": "group_tracking", "group": "S3", "min_length": 2, "max_length": 6}
    depth = {"shape": [1, 1, 1], "schedule": {"kind": "sampled", "mean": 2, "backward": 2}}
    folder = train(recipe(tmp_path, task=task, evaluation={"lengths": [6]}, depth=depth), 0)
    inspect_depth(folder, 8)
    found = json.loads((folder / "depth" / "depth.json").read_text())["accuracy_by_depth"]
    assert set(found) == {"1", "2", "3", "4", "8"} and all(
        0 <= share <= 1 for share in found.values()
    )
