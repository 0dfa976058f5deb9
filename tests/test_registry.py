"""Kinds of one's own: registered in one line, valid wherever one of the family is named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import ROUNDING, difference, tokens, unhosted
from small_looped import run
from transformers import AutoModelForCausalLM

import undertow
from undertow import T2MLR, ConfigError, Scan
from undertow.depth.exits import EXIT_RULES, ExitRule
from undertow.describe import describe
from undertow.lab.runs.recipe import Recipe
from undertow.lab.tasks import TASKS, Example, GeneratedTask
from undertow.mapping import apply_overrides, from_mapping, to_mapping
from undertow.pathways import RECURRENCES
from undertow.registry import kinds, register
from undertow.settings import settings
from undertow.solvers import SOLVERS, Sequential, Solver

pytestmark = pytest.mark.usefixtures("own_kinds")


class Mine(T2MLR):
    kind = "mine"


class Patient(Sequential):
    kind = "patient"


class Deep(ExitRule):
    kind = "deep"


@settings(kw_only=True)
class Reverse(GeneratedTask):
    kind: ClassVar[str] = "reverse"
    longest: int = 8
    """Most letters."""

    def draw(self, generator: Any, length: int | None) -> Example:
        text = "".join(generator.choices("ab", k=length or generator.randint(1, self.longest)))
        return Example(f"{text}=", text[::-1])

    def characters(self) -> str:
        return "=ab"


@pytest.mark.parametrize(
    ("cls", "view"), [(Mine, RECURRENCES), (Patient, SOLVERS), (Reverse, TASKS), (Deep, EXIT_RULES)]
)
def test_a_registered_class_joins_its_family(cls: Any, view: Mapping[str, Any]) -> None:
    assert cls.kind not in view
    assert register(cls) is cls
    assert view[cls.kind] is cls
    assert sum(cls.kind in each for each in (RECURRENCES, SOLVERS, TASKS, EXIT_RULES)) == 1


def test_recipes_take_it_at_once() -> None:
    recipe = {
        "name": "x",
        "task": {"kind": "reverse", "longest": 5},
        "recurrence": {"kind": "mine", "first_layer": 0, "last_layer": 1},
    }
    with pytest.raises(ConfigError, match=r"got 'reverse'.*import.*plugins: \[my_module\]"):
        from_mapping(Recipe, recipe)
    for cls in (Mine, Patient, Reverse):
        register(cls)
    read = from_mapping(Recipe, apply_overrides(recipe, ["--solver=patient", "--task.longest=4"]))
    assert read.task == Reverse(longest=4)
    assert read.recurrence == Mine(0, 1) != T2MLR(0, 1)
    assert read.solver == Patient()
    assert from_mapping(Recipe, to_mapping(read)) == read
    assert "task.longest: whole number (default: 8)" in describe(Recipe)
    with pytest.raises(ConfigError, match=r"task\.longst; did you mean"):
        from_mapping(Recipe, apply_overrides(recipe, ["--task.longst=4"]))


def test_saved_folders_take_it_at_once(tmp_path: Path) -> None:
    model, ids = undertow.attach(unhosted("llama"), Mine(0, 1), Patient()), tokens(1, 5)
    model.save_pretrained(tmp_path)
    with pytest.raises(undertow.CheckpointError, match=r"'mine'.*; import test_registry"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    register(Mine)
    register(Patient)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.recurrence.settings == Mine(0, 1)
    assert loaded.model.recurrence.solver == Patient()
    with torch.no_grad():
        assert difference(run(loaded, ids).logits, run(model, ids).logits) < ROUNDING


def test_a_class_that_cannot_be_found_again_is_refused() -> None:
    class Stray:
        kind = "stray"

    class Nameless(Solver):
        def solve(self, block: Any) -> Any: ...

    class Taken(Scan): ...

    with pytest.raises(ConfigError, match=r"Stray cannot be registered; derive it from .*Task"):
        register(Stray)
    with pytest.raises(ConfigError, match="Nameless's kind is None; give it one"):
        register(Nameless)
    with pytest.raises(ConfigError, match=r"kind 'scan' of .*Taken is taken by .*sweeps\.Scan; "):
        register(Taken)
    assert kinds(Solver)["scan"] is Scan


def test_a_cell_that_runs_again_replaces_its_class() -> None:
    def cell() -> type:
        class Cell(Sequential):
            kind = "cell"

        return register(Cell)

    first, second = cell(), cell()
    assert SOLVERS["cell"] is second is not first
