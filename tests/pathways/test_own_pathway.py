"""A pathway of one's own says which of its parameters stay in fp32, learn faster, and show in the
log."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers import hosted
from leaky import LeakyPathway
from torch import nn
from transformers import AutoModelForCausalLM

import undertow
from undertow.host.attachment import find_pathway
from undertow.lab.benchmark import Bench
from undertow.lab.benchmark.candidates import recurrent, training_candidates
from undertow.lab.training.gates import FastGates, GateLog
from undertow.pathways import Pathway, Recurrence
from undertow.pathways.base import Decode


class GatedPathway(LeakyPathway):
    """A gate scales what is written; it stands in a module of its own."""

    fp32_parameters = ("gate.size",)

    def __init__(self, lag: int, width: int) -> None:
        super().__init__(lag, width)
        self.gate = nn.Module()
        self.gate.size = nn.Parameter(torch.zeros(1))

    def write(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.gate.size.to(hidden.dtype) * super().write(site, hidden, state)

    def gate_values(self) -> dict[str, torch.Tensor]:
        return {"size": self.gate.size.detach()}


@dataclass(frozen=True)
class Gated(Recurrence):
    kind: ClassVar[str] = "gated"
    lag: int = 1

    def build(self, layers: int, width: int, decode: Decode | None = None) -> Pathway:
        return GatedPathway(self.lag, width)


def gated() -> Any:
    model = hosted("llama", Gated())
    with torch.no_grad():
        find_pathway(model).get_parameter("gate.size").fill_(0.123456789)
    return model


def kept(model: Any) -> tuple[torch.dtype, float]:
    size = find_pathway(model).get_parameter("gate.size")
    return size.dtype, size.item()


EXACT = torch.tensor(0.123456789).item()


def test_its_fp32_parameters_stay_so_when_the_model_is_cast() -> None:
    model = gated().bfloat16()
    assert kept(model) == (torch.float32, EXACT)
    assert find_pathway(model).get_parameter("rate").dtype == torch.bfloat16
    assert kept(model.double())[0] == torch.double


@pytest.mark.usefixtures("own_kinds")
def test_its_fp32_parameters_stay_so_when_a_folder_is_loaded(tmp_path: Path) -> None:
    undertow.register(Gated)
    model = gated().bfloat16()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert kept(again) == (torch.float32, EXACT)
    assert find_pathway(again).get_parameter("rate").dtype == torch.bfloat16


class Plain:
    """What a Trainer does to make its optimiser, in short."""

    def __init__(self, model: Any) -> None:
        self.model, self.args = model, SimpleNamespace(learning_rate=0.01)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
        return torch.optim.SGD(groups, lr=0.01, weight_decay=0.1)


class Fast(FastGates, Plain):
    gate_multiplier = 20.0


def test_its_fast_parameters_get_a_group_of_their_own() -> None:
    model = gated()
    first, second, fast = Fast(model).create_optimizer().param_groups
    (parameter,) = fast["params"]
    assert parameter is find_pathway(model).get_parameter("gate.size")
    assert (fast["lr"], fast["weight_decay"]) == (0.2, 0.0)
    assert len(first["params"] + second["params"]) + 1 == len(list(model.parameters()))


def test_its_gates_are_logged() -> None:
    state, logs = SimpleNamespace(log_history=[{}]), {"loss": 1.0}
    GateLog().on_log(None, state, None, logs=logs, model=gated())
    assert logs == {"loss": 1.0, "gate_size": EXACT} and state.log_history == [{"gate_size": EXACT}]


def test_a_benchmark_opens_it() -> None:
    bench = Bench(recurrence=Gated(), layers=4, width=32, head_width=8, vocabulary=50)
    pathway = find_pathway(recurrent(bench))
    assert all(parameter.any() for parameter in pathway.parameters())
    closed: Pathway = Gated().build(4, 32)
    assert not closed.get_parameter("gate.size").any(), "the control"
    before = closed.get_parameter("rate").clone()
    closed.open()
    assert torch.equal(closed.get_parameter("rate"), before), "what is off zero stays"
    assert not any("paper's" in name for name in training_candidates(bench) if "jacobi" in name)
