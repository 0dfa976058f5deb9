"""Each line of the log tells how fast the training goes, and where the gradient is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from undertow.lab.runs.run import Run
from undertow.lab.training import train
from undertow.lab.training.build import outline
from undertow.lab.training.dry_run import layer_costs
from undertow.lab.training.throughput import Throughput, gradient_shares, peak
from undertow.lab.training.trainer import RecipeTrainer


def logged(folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in Run(folder).log() if "loss" in entry]


def test_a_run_logs_tokens_work_and_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[int]] = []
    kept = RecipeTrainer.taken

    def spy(self: RecipeTrainer) -> list[int]:
        taken.append(kept(self))
        return taken[-1]

    monkeypatch.setattr(RecipeTrainer, "taken", spy)
    recipe = tiny.recipe(tmp_path, recurrence=tiny.T2MLR)
    folder = train(recipe, seed=0)
    entries = logged(folder)
    assert len(entries) == len(taken)
    for entry, (tokens, rows) in zip(entries, taken, strict=True):
        assert rows == recipe.training.batch and tokens > rows
        rate = entry["tokens_per_second"]
        assert rate <= 1.01 * tokens / entry["seconds_per_step"]
        each, _ = layer_costs(recipe, outline(recipe), tokens / rows)
        assert entry["tflops"] == pytest.approx(3 * each * rate / 1e12, rel=1e-3)
        assert "flops_use" not in entry, "a CPU has no peak here"
        parts = [entry[f"grad_norm_{part}"] for part in ("recurrence", "backbone")]
        assert min(parts) > 0
        assert sum(part**2 for part in parts) == pytest.approx(entry["grad_norm"] ** 2, rel=1e-4)


def test_without_a_recurrence_the_gradient_has_one_part(tmp_path: Path) -> None:
    entries = logged(train(tiny.recipe(tmp_path, recurrence=None), seed=0))
    assert all("grad_norm" in entry and "grad_norm_backbone" not in entry for entry in entries)
    assert all(entry["tokens_per_second"] > 0 and entry["tflops"] > 0 for entry in entries)


def test_shares_are_those_of_the_norms() -> None:
    model = nn.ModuleDict({"recurrence": nn.Linear(1, 1), "layer": nn.Linear(1, 1)})
    model["recurrence"].weight.grad = torch.tensor([[3.0]])
    model["layer"].weight.grad = torch.tensor([[4.0]])
    shares = gradient_shares(model)
    assert float(shares["recurrence"]) == pytest.approx(0.6)
    assert float(shares["backbone"]) == pytest.approx(0.8)
    model["layer"].weight.grad = None
    assert gradient_shares(model) == {}


def test_peaks_are_found_by_name() -> None:
    assert peak("NVIDIA H100 80GB HBM3", "bf16") == 989
    assert peak("NVIDIA H100 PCIe", "bf16") == 756
    assert peak("NVIDIA A100-SXM4-40GB", "tf32") == 156
    assert peak("cpu", "fp32") is None


def test_flops_use_is_the_share_of_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undertow.lab.training.throughput.peak", lambda *_: 1e-3)
    for entry in logged(train(tiny.recipe(tmp_path, recurrence=None), seed=0)):
        assert entry["flops_use"] == pytest.approx(entry["tflops"] / 1e-3)


def test_nothing_is_divided_by_no_time() -> None:
    logs = {"loss": 1.0}
    Throughput(tiny.recipe(Path("runs"))).on_log(None, None, None, logs=logs)
    assert logs == {"loss": 1.0}
