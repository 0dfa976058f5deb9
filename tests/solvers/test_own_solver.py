"""A solver of one's own: a right one equals the rollout, and shapes that broadcasting would hide
are refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from helpers import SAME, difference, hosted, tokens

import undertow
from undertow import ConfigError
from undertow.host.block import HostedBlock
from undertow.solvers import RecurrentBlock, Solution, Solver

IDS = tokens(2, 7)


@dataclass(frozen=True)
class Picard(Solver):
    """As many plain sweeps as there are tokens; `spoil` makes of the states what a mistake
    would."""

    kind: ClassVar[str] = "picard"
    where: str = "nowhere"
    spoil: Callable[[torch.Tensor], torch.Tensor] = lambda states: states

    def at(self, where: str, value: torch.Tensor) -> torch.Tensor:
        return self.spoil(value) if where == self.where else value

    def solve(self, block: RecurrentBlock) -> Solution:
        _, readings = block.sweep(None)
        states = block.guess(readings)
        for _ in range(block.tokens):
            received = block.received_from(self.at("received", states))
            _, readings = block.sweep(self.at("sweep", received))
            states = block.update(readings, self.at("update", received))
        output, readings = block.sweep(block.received_from(states), last=True)
        output, states = self.at("output", output), self.at("states", states)
        return Solution(output, states, exact_prefix=block.tokens, sweeps=block.tokens)


def logits(solver: Solver) -> torch.Tensor:
    model: Any = hosted("llama", "turboconn-1", solver=solver)
    found: torch.Tensor = model(IDS, use_cache=False).logits.detach()
    return found


def test_a_right_one_equals_the_rollout() -> None:
    assert difference(logits(Picard()), logits(undertow.Sequential())) < SAME


def test_the_report_names_it_and_says_what_it_did() -> None:
    model: Any = hosted("llama", "turboconn-1", solver=Picard())
    model(IDS, use_cache=False)
    report = undertow.report(model)
    assert report is not None and report.seconds > 0
    assert (report.solver, report.tokens, report.sweeps, report.exact_prefix) == ("picard", 7, 7, 7)


def test_something_else_than_a_solution_is_refused() -> None:
    class Older(Picard):
        def solve(self, block: RecurrentBlock) -> Any:
            solution = super().solve(block)
            return solution.output, solution.states, "a report"

    with pytest.raises(ConfigError, match=r"^the solver Older gave a tuple; give an .*Solution\("):
        logits(Older())


SPOILS = {"one token": lambda states: states[:, :1], "one row": lambda states: states[:1]}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("where", ["received", "sweep", "update", "states", "output"])
def test_shapes_that_are_not_the_blocks_are_refused(where: str, spoil: str) -> None:
    expected = r"gave (states|an output) of shape \[(2, 1|1, 7), \d+\]; give .*\[2, 7, \d+\]"
    with pytest.raises(ConfigError, match=expected):
        logits(Picard(where, SPOILS[spoil]))


@pytest.mark.parametrize("where", ["sweep", "update"])
def test_control_without_the_check_broadcasting_hides_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostedBlock, "_check_states", lambda self, *states, **by: None)
    wrong = logits(Picard(where, SPOILS["one row"]))
    if where == "sweep":
        assert difference(wrong, logits(undertow.Sequential())) > 10 * SAME
