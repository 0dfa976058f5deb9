"""The depth sampler: moments, purity, guard and curricula."""

import math

import pytest
import torch

from undertow.depth.loop import Steps
from undertow.depth.sampler import FixedDepth, SampledDepth
from undertow.errors import ConfigError

# Mean, standard deviation, median, 95th percentile, P(depth <= k), mean graded iterations for
# (mean, k).
TABLE = {
    (32, 8): (33.0, 18.0, 29, 67, 0.014, 7.98),
    (16, 8): (17.0, 9.4, 15, 35, 0.153, 7.74),
    (8, 8): (9.0, 5.1, 8, 19, 0.545, 6.62),
    (4, 4): (5.0, 2.9, 4, 11, 0.509, 3.41),
    (64, 8): (65.0, 35.0, 57, 131, 0.000, 8.00),
}


@pytest.mark.parametrize("mean, backward", TABLE)
def test_moments(mean: int, backward: int) -> None:
    expected = TABLE[mean, backward]
    draws = [SampledDepth(mean, backward, seed=5).draw(step) for step in range(6000)]
    depth = torch.tensor([draw.total for draw in draws]).double()
    graded = torch.tensor([draw.with_gradient for draw in draws]).double()
    error = 4 * expected[1] / math.sqrt(len(draws))  # four standard errors of the mean
    assert abs(float(depth.mean()) - expected[0]) < error
    assert abs(float(depth.std()) / expected[1] - 1) < 0.06
    assert abs(float(depth.median()) - expected[2]) <= max(1, 0.06 * expected[2])
    assert abs(float(depth.quantile(0.95)) - expected[3]) <= max(1, 0.08 * expected[3])
    assert abs(float((depth <= backward).double().mean()) - expected[4]) < 0.025
    assert abs(float(graded.mean()) - expected[5]) < 0.1
    assert int(depth.min()) >= 1


def test_pure_function_of_seed_and_step() -> None:
    sampler = SampledDepth(mean=16, seed=3)
    torch.manual_seed(0)
    first = [sampler.draw(step) for step in range(20)]
    torch.manual_seed(99)  # as another rank, or after a resume, in another order
    assert [sampler.draw(step) for step in reversed(range(20))] == first[::-1]
    assert [SampledDepth(mean=16, seed=4).draw(step) for step in range(20)] != first
    assert len({draw.total for draw in first}) > 5


def test_small_mean_lowers_the_graded_iterations_instead_of_raising_the_depth() -> None:
    draws = [SampledDepth(mean=4, backward=8).draw(step) for step in range(3000)]
    assert abs(sum(draw.total for draw in draws) / len(draws) - 5) < 0.25
    assert max(draw.with_gradient for draw in draws) == 4


def test_curricula() -> None:
    linear = SampledDepth(mean=32, curriculum="linear", curriculum_steps=100)
    root = SampledDepth(mean=32, curriculum="1-sqrt", curriculum_steps=100)
    assert [linear.mean_at(step) for step in (0, 24, 49, 99, 500)] == [1, 8, 16, 32, 32]
    assert [root.mean_at(step) for step in (0, 74, 99, 500)] == [1, 16, 32, 32]
    assert all(root.mean_at(s) <= linear.mean_at(s) for s in range(100))
    for curriculum in (linear, root):
        means = [curriculum.mean_at(step) for step in range(100)]
        assert means == sorted(means)
    early = [linear.draw(step).total for step in range(10)]
    late = [linear.draw(step).total for step in range(200, 210)]
    assert sum(early) < sum(late) / 3


def test_fixed_depth() -> None:
    assert FixedDepth(12, 8).draw(7) == Steps(4, 8)
    assert FixedDepth(3, 8).draw(7) == Steps(0, 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"mean": 0},
        {"mean": -3},
        {"backward": 0},
        {"spread": -0.1},
        {"curriculum": "linear"},
        {"curriculum_steps": 5},
    ],
)
def test_mistakes(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings)).split("_")[0]):
        SampledDepth(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="depth is 0"):
        FixedDepth(0)
