"""The states that sweeps start from: those of layers that add nothing to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from helpers import hosted, tokens

import undertow
from undertow import Sequential
from undertow.host.attachment import find_pathway
from undertow.solvers import RecurrentBlock, Solution, Solver


@dataclass(frozen=True)
class Watching(Solver):
    """The exact rollout, with the first guess and its errors noted."""

    kind: ClassVar[str] = "watching"

    guesses: list[torch.Tensor | None] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def solve(self, block: RecurrentBlock) -> Solution:
        solution = Sequential().solve(block)
        guess = block.initial_states()
        self.guesses.append(guess)
        if guess is not None:
            self.errors.append(float((guess - solution.states).norm() / solution.states.norm()))
        return solution


def error(pathway: str, idle: bool, **inputs: Any) -> float:
    """How far the guess is from the exact states, of a model whose layers and writes do nothing or
    something."""
    model = hosted("gpt2", pathway).double()
    if idle:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "c_proj" in name or "gamma" in name or ".up." in name:
                    parameter.zero_()
    solver = Watching()
    undertow.set_solver(model, prefill=solver)
    with torch.no_grad():
        model(input_ids=tokens(3, 14), use_cache=False, **inputs)
    return solver.errors[0]


@pytest.mark.parametrize("pathway", ["turboconn-1", "turboconn-3", "t2mlr-middle", "t2mlr-whole"])
def test_it_is_exact_where_layers_add_nothing(pathway: str) -> None:
    assert error(pathway, idle=True) < 1e-12
    assert error(pathway, idle=False) > 1e-3, "the control: layers that add something"


def test_packed_documents_keep_apart() -> None:
    positions = torch.tensor([[*range(4), *range(10)]]).expand(3, -1)
    assert error("t2mlr-whole", idle=True, position_ids=positions) < 1e-12


def test_soft_tokens_have_none() -> None:
    model, solver = hosted("gpt_neox", "soft-token"), Watching()
    assert not find_pathway(model).reads_residual
    undertow.set_solver(model, prefill=solver)
    with torch.no_grad():
        model(input_ids=tokens(2, 9), use_cache=False)
    assert solver.guesses == [None]
