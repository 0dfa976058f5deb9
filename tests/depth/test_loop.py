"""The loop: which iterations run and carry gradient; and the initial state's noise."""

import pytest
import torch
from torch import nn

from undertow.depth.initial import initial_state, mix, row_seeds
from undertow.depth.loop import Steps, iterate, steps_from
from undertow.errors import ConfigError


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.calls = 0

    def bind(self, embedding: torch.Tensor):
        def iteration(state: torch.Tensor, index: int) -> torch.Tensor:
            self.calls += 1
            return torch.tanh(self.layer(torch.cat([state, embedding], dim=-1)))

        return iteration


def run(steps: Steps, training: bool = True, **settings):
    core = Core().train(training)
    embedding = torch.ones(2, 3, 4, requires_grad=True)
    state = iterate(core.bind(embedding), torch.zeros(2, 3, 4), steps, **settings)
    state.pow(2).sum().backward()
    return state, core.layer.weight.grad, embedding.grad, core.calls


def test_truncated_gradient_is_that_of_the_last_iterations() -> None:
    state, gradient, on_embedding, _ = run(Steps(3, 2))
    core = Core()
    with torch.no_grad():
        middle = iterate(core.bind(torch.ones(2, 3, 4)), torch.zeros(2, 3, 4), Steps(0, 3))
    embedding = torch.ones(2, 3, 4, requires_grad=True)
    iteration = core.bind(embedding)
    expected = iteration(iteration(middle, 3), 4)
    expected.pow(2).sum().backward()
    assert torch.equal(state, expected)
    assert torch.equal(gradient, core.layer.weight.grad)
    assert torch.equal(on_embedding, embedding.grad)
    full = run(Steps(0, 5))
    assert torch.equal(full[0], state)
    assert not torch.allclose(full[1], gradient)  # the truncation is real


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_does_not_depend_on_the_mode(checkpointing: bool) -> None:
    training = run(Steps(2, 3), training=True, checkpointing=checkpointing)
    evaluating = run(Steps(2, 3), training=False, checkpointing=checkpointing)
    assert torch.equal(training[1], evaluating[1])
    assert float(training[1].abs().sum()) > 0


def test_checkpointing_recomputes_the_graded_iterations_only() -> None:
    plain, checkpointed = run(Steps(2, 3)), run(Steps(2, 3), checkpointing=True)
    assert (plain[3], checkpointed[3]) == (5, 8)
    assert torch.equal(plain[1], checkpointed[1])


def test_watch_and_start() -> None:
    seen = []
    core = Core()
    iteration = core.bind(torch.ones(2, 3, 4))
    whole = iterate(
        iteration,
        torch.zeros(2, 3, 4),
        Steps(0, 5),
        watch=lambda i, before, after: seen.append((i, after)),
    )
    assert [i for i, _ in seen] == [0, 1, 2, 3, 4]
    assert torch.equal(iterate(iteration, seen[1][1], Steps(0, 5), start=2), whole)


def test_depth_arguments() -> None:
    assert steps_from(None, 32, 8) == Steps(24, 8)
    assert steps_from(4, 32, 8) == Steps(0, 4)
    assert steps_from((3, 0), 32, 8) == Steps(3, 0)
    for wrong in (0, -1, 2.5, True, (1, 2, 3), (0, 0), (-1, 4)):
        with pytest.raises(ConfigError, match="depth is"):
            steps_from(wrong, 32, 8)  # type: ignore[arg-type]


def test_initial_state_is_a_function_of_seed_and_position() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5]])
    state = initial_state(positions, 64, 0.5, seed=7)
    assert torch.equal(state[0, 2:], state[1, :2])
    assert torch.equal(initial_state(positions[:, 1:2], 64, 0.5, seed=7), state[:, 1:2])
    assert not torch.allclose(initial_state(positions, 64, 0.5, seed=8), state)
    rows = initial_state(positions, 64, 0.5, seed=row_seeds(7, 2))
    assert not torch.allclose(rows[0, 2:], rows[1, :2])
    assert torch.equal(initial_state(positions, 64, 0.0), torch.zeros(2, 4, 64))
    assert torch.equal(initial_state(positions, 64, 0.5, seed=torch.tensor(7)), state)
    with pytest.raises(ConfigError, match="there are 3 seeds for 2 rows; give one, or one a row"):
        initial_state(positions, 64, 0.5, seed=row_seeds(7, 3))


def test_initial_state_is_a_truncated_normal() -> None:
    state = initial_state(torch.arange(500)[None], 512, 2.0, seed=1)
    assert abs(float(state.mean())) < 0.02
    assert (
        abs(float(state.std()) / 2.0 - 0.9866) < 0.005
    )  # the cut at three standard deviations takes 1.3 %
    assert 5.9 < float(state.abs().max()) <= 6.001
    assert abs(float((state.abs() < 2.0).float().mean()) - 0.6836) < 0.005
    flat = state[0]
    correlation = torch.corrcoef(flat[:64])  # of positions, over channels
    assert float((correlation - torch.eye(64)).abs().max()) < 0.25
    assert float((torch.corrcoef(flat.T[:64]) - torch.eye(64)).abs().max()) < 0.25


def test_mixed_seeds_differ() -> None:
    seeds = {mix(seed, step) for seed in range(30) for step in range(30)}
    assert len(seeds) == 900
