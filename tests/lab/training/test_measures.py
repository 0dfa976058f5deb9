"""What lines of the log tell of speed and of gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from undertow.lab.runs.run import Run
from undertow.lab.training.build import build
from undertow.lab.training.dry_run import cost_of, training_cost
from undertow.lab.training.measures import Cost, MeasuredSteps, norms, peak_of
from undertow.lab.training.run import train


def test_a_line_tells_the_rates_and_the_norms_of_its_parts(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, recurrence=tiny.T2MLR)
    train(recipe, seed=0)
    lines = [entry for entry in Run.of(recipe, 0).log() if "loss" in entry]
    assert lines
    for line in lines:
        parts = [line["grad_norm_recurrence"], line["grad_norm_backbone"]]
        assert (parts[0] ** 2 + parts[1] ** 2) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-4)
        assert line["tokens_per_second"] > 0 and line["flops_per_second"] > 0
        assert "mfu" not in line  # of a CPU no peak is known


def test_a_cost_is_that_of_a_dry_run_at_any_length(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, recurrence=tiny.T2MLR)
    model, _ = build(recipe, 0)
    cost = cost_of(recipe, model)
    for length in (7.0, 300.0):
        expected = length * training_cost(recipe, model, length)
        assert cost.of(length, length**2) == pytest.approx(expected, rel=1e-9)


def test_rates_are_of_the_tokens_that_are_no_padding() -> None:
    class Steps:
        def training_step(self, *args: object) -> float:
            return 0.0

    class Measured(MeasuredSteps, Steps):
        pass

    steps = Measured()
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    for _ in range(2):
        steps.training_step(None, {"input_ids": mask, "attention_mask": mask})
    assert steps._seen.tolist() == [8.0, 20.0]
    steps.cost, steps.peak = Cost(10.0, 1.0), 1000.0
    steps.clock = type("Clock", (), {"seconds": 2.0})()
    assert steps._measures() == {"tokens_per_second": 4.0, "flops_per_second": 50.0, "mfu": 0.05}


def test_a_model_without_recurrence_has_no_parts() -> None:
    assert norms(torch.nn.Linear(2, 2)) == {}


def test_peaks_go_by_name() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_of("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert peak_of("NVIDIA H100 NVL", "bf16") is None
