"""Loss a token: the mean over all predicted tokens, whatever the batches."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from undertow.errors import ConfigError
from undertow.host import set_solver
from undertow.lab.evaluation.loss import loss_per_token
from undertow.lab.runs.results import Loss, loss_table
from undertow.lab.tasks import Parity, Text, character_tokenizer
from undertow.lab.training.build import build
from undertow.solvers import Jacobi

LINES = "".join(f"{number * number}\n" for number in range(400))


@pytest.fixture
def task(tmp_path: Path) -> Text:
    path = tmp_path / "squares.txt"
    path.write_text(LINES)
    return Text((str(path),), context=16)


@pytest.fixture
def tokenizer(task: Text) -> Any:
    return character_tokenizer(task.characters())


class Constant(nn.Module):
    """A model that gives every next character the same probabilities."""

    def __init__(self, probabilities: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.device = probabilities.log(), torch.device("cpu")

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool
    ) -> Any:
        assert not use_cache and not self.training and not torch.is_grad_enabled()
        return type("Output", (), {"logits": self.logits.expand(*input_ids.shape, -1)})


def hosted(task: Text) -> Any:
    """A model whose recurrence is far from closed."""
    recipe = tiny.recipe(
        Path("unused"),
        task={"kind": "text", "files": list(task.files), "context": 16},
        recurrence=tiny.T2MLR,
        evaluation={"lengths": []},
    )
    model, _ = build(recipe, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_every_predicted_token_counts_alike(task: Text, tokenizer: Any) -> None:
    probabilities = torch.arange(1.0, len(tokenizer) + 1)
    probabilities /= probabilities.sum()
    windows = [
        task.encode("test", index, tokenizer)["input_ids"]
        for index in range(task.size("test", tokenizer))
    ]
    assert len(windows[-1]) < 16, "no last window is shorter"
    predicted = [token for window in windows for token in window[1:]]
    expected = -sum(math.log(probabilities[token]) for token in predicted) / len(predicted)
    for batch in (1, 3, 128):
        model = Constant(probabilities).train()
        found = loss_per_token(model, tokenizer, task, batch=batch)
        assert found.loss == pytest.approx(expected, rel=1e-5)
        assert (found.tokens, found.windows, found.of) == (
            len(predicted),
            len(windows),
            len(windows),
        )
        assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
        assert model.training
    assert loss_per_token(
        Constant(probabilities), tokenizer, task, split="valid"
    ).loss != pytest.approx(expected)


def test_no_more_windows_than_asked_for(task: Text, tokenizer: Any) -> None:
    found = loss_per_token(
        Constant(torch.ones(len(tokenizer)) / len(tokenizer)), tokenizer, task, examples=2
    )
    assert (found.tokens, found.windows, found.of) == (30, 2, task.size("test", tokenizer))
    assert found.perplexity == pytest.approx(len(tokenizer), rel=1e-5)


def test_it_is_the_models_own_loss_with_exact_states(task: Text, tokenizer: Any) -> None:
    model = hosted(task)
    windows = [task.encode("test", index, tokenizer)["input_ids"] for index in range(4)]
    assert {len(window) for window in windows} == {16}
    ids = torch.tensor(windows)
    expected = float(model(ids, labels=ids, use_cache=False).loss.detach())
    found = loss_per_token(model, tokenizer, task, examples=4, batch=3)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    set_solver(model, Jacobi(1, 1))
    assert float(model(ids, labels=ids, use_cache=False).loss.detach()) != pytest.approx(
        expected, rel=1e-3
    )
    assert loss_per_token(model, tokenizer, task, examples=4).loss == pytest.approx(
        expected, rel=1e-5
    )


def test_a_task_without_an_end_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="parity is generated without end"):
        loss_per_token(Constant(torch.ones(9)), tokenizer, Parity())


def test_table() -> None:
    rows = loss_table(
        {"seed-0": Loss(math.log(2), 100, 3, 7), "seed-1": Loss(0.0, 5, 1, 1)}
    ).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["model", "loss", "perplexity", "tokens", "windows", "of"]
    assert cells[2:] == [
        ["seed-0", "0.6931", "2.000", "100", "3", "7"],
        ["seed-1", "0.0000", "1.000", "5", "1", "1"],
    ]
