"""Recipes: read from YAML, written back, overridden, described; every mistake named before anything
is trained."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import tiny

from undertow import Jacobi, Scan, SoftToken, Truncated, TurboConn
from undertow.annotations import field_types
from undertow.describe import describe, field_docs
from undertow.errors import ConfigError
from undertow.lab.runs.recipe import (
    EvaluationSection,
    LoRASection,
    ModelSection,
    TrainingSection,
    load_recipe,
)
from undertow.lab.tasks import GSM8K, Parity, Text
from undertow.lab.training import Recipe
from undertow.lab.training.build import build
from undertow.mapping import from_mapping, load_yaml, save_yaml, to_mapping
from undertow.registry import sections_of

RECIPES = Path(__file__).parents[3] / "recipes"
SHIPPED = sorted(path for path in RECIPES.rglob("*.yaml") if not path.stem.startswith("study-"))
MINIMAL: dict[str, Any] = {"name": "x", "task": "parity"}


def mistake(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(Recipe, MINIMAL | changes)
    return str(caught.value)


# Shipped recipes


def test_recipes_are_shipped() -> None:
    assert len(SHIPPED) >= 2
    names = [load_recipe(path, []).name for path in SHIPPED]
    assert len(set(names)) == len(names), "two recipes would share a folder"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(RECIPES)))
def test_shipped_recipe_is_valid_and_survives_being_saved(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [])
    assert recipe.name == path.stem
    save_yaml(recipe, tmp_path / "again.yaml")
    assert load_recipe(tmp_path / "again.yaml", []) == recipe


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in SHIPPED
        if not {"path", "tokenizer"} & set(load_yaml(path).get("model") or {})
    ],
    ids=lambda path: str(path.relative_to(RECIPES)),
)
def test_shipped_recurrence_fits_its_model(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [])
    if isinstance(recipe.task, Text):  # such a recipe is given its files on the command line
        (tmp_path / "a.txt").write_text("abc\n")
        recipe = load_recipe(path, [f"--task.files=[{tmp_path / 'a.txt'}]"])
    model, _ = build(recipe, seed=0)
    assert any(".recurrence." in name for name, _ in model.named_parameters()) == (
        recipe.recurrence is not None
    )


# Reading


def test_a_minimal_recipe_takes_the_defaults() -> None:
    recipe = from_mapping(Recipe, MINIMAL)
    assert recipe == Recipe(name="x", task=Parity())
    assert recipe.seeds == (0,) and recipe.recurrence is None and recipe.lora is None
    assert to_mapping(recipe)["training"]["steps"] == TrainingSection().steps == 1000


def test_every_section_is_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        """
name: all
task: {kind: gsm8k, train: a.jsonl, chain_of_thought: true}
seeds: [3, 4]
model: {path: somewhere}
recurrence: {kind: turboconn, preset: llama-3.2-1b, lag: 2}
solver: {kind: sequential, gradient: truncated(8)}
lora: {rank: 4, targets: [q_proj]}
training: {learning_rate: 1e-4, schedule: cosine}
evaluation: {temperature: 1}
"""
    )
    recipe = load_recipe(path, [])
    assert recipe.task == GSM8K(train="a.jsonl", chain_of_thought=True)
    assert recipe.seeds == (3, 4)
    assert recipe.recurrence == TurboConn.preset("llama-3.2-1b", lag=2)
    assert recipe.solver.gradient == Truncated(8)
    assert recipe.lora == LoRASection(rank=4, targets=("q_proj",))
    assert recipe.training == TrainingSection(learning_rate=1e-4, schedule="cosine")
    assert recipe.evaluation == EvaluationSection(temperature=1.0)


def test_overrides_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    path = tiny.recipe_file(tmp_path, recurrence=tiny.TURBOCONN)
    plain = load_recipe(path, [])
    changed = load_recipe(
        path, ["--training.steps=9", "--recurrence.kind=soft-token", "--seeds=[1,2]", "--lora=none"]
    )
    assert changed.training.steps == 9 and plain.training.steps == 6
    assert changed.recurrence == SoftToken()  # another kind drops the keys of the one before
    assert changed.seeds == (1, 2)
    kept = dataclasses.replace(
        changed, training=plain.training, recurrence=plain.recurrence, seeds=plain.seeds
    )
    assert kept == plain
    assert load_recipe(path, ["--recurrence=none"]).recurrence is None


def test_no_setting_of_another_kind_is_kept_in_silence(tmp_path: Path) -> None:
    """Of one solver's settings none may become those of the next, nor be dropped unread."""
    path = tiny.recipe_file(tmp_path, solver={"kind": "jacobi", "forward": 8, "backward": 2})
    assert load_recipe(path, ["--solver.forward=9"]).solver == Jacobi(9, 2)
    for kind in ("--solver.kind=scan", "--solver=scan", "--solver={kind: scan}"):
        assert load_recipe(path, [kind]).solver == Scan()
        assert load_recipe(path, ["--solver.sweeps=3", kind]).solver == Scan(3)
    for wrong in (["--solver.sweeps=3"], ["--solver.kind=scan", "--solver.forward=9"]):
        with pytest.raises(ConfigError, match="unknown key solver"):
            load_recipe(path, wrong)


# Mistakes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trainig": {}}, "unknown key trainig; did you mean 'training'?"),
        ({"training": {"step": 3}}, "unknown key training.step; did you mean 'steps'?"),
        ({"model": {"layer": 3}}, "unknown key model.layer; did you mean 'layers'?"),
        ({"evaluation": {"length": [3]}}, "unknown key evaluation.length; did you mean 'lengths'?"),
        (
            {"task": {"kind": "parity", "max_lenght": 3}},
            "unknown key task.max_lenght; did you mean 'max_length'?",
        ),
        (
            {"task": "party"},
            "expected one of arithmetic, bbh-arithmetic, chat, group_retrieval, group_tracking, "
            "gsm8k, gsm_symbolic, hotpotqa, parity, prosqa, shards, text, variables, got 'party'; "
            "did you mean 'parity'?",
        ),
        (
            {"recurrence": {"kind": "t2mlr", "first_layer": 0, "lastlayer": 1}},
            "unknown key recurrence.lastlayer",
        ),
        ({"training": {"schedule": "cosin"}}, "did you mean 'cosine'?"),
        ({"training": {"steps": 0}}, "training: steps is 0; use 1 or more"),
        ({"training": {"save_every": 0}}, "training: save_every is 0; use 1 or more"),
        ({"training": {"evaluate_every": 0}}, "training: evaluate_every is 0; use 1 or more"),
        ({"training": {"threads": 0}}, "training: threads is 0; use 1 or more"),
        ({"training": {"warmup_steps": -1}}, "training: warmup_steps is -1; use 0 or more"),
        ({"training": {"learning_rate": 0}}, "training: learning_rate is 0.0; use more than 0"),
        ({"training": {"beta2": 1}}, "training: beta2 is 1.0; use 0 or more, and less than 1"),
        ({"model": {"heads": 0}}, "model: heads is 0; use 1 or more"),
        (
            {"model": {"width": 10, "heads": 4}},
            "model: width 10 is no multiple of heads 4; make it one",
        ),
        (
            {"model": {"heads": 4, "key_value_heads": 3}},
            "model: heads 4 is no multiple of key_value_heads 3; make it one",
        ),
        ({"evaluation": {"examples": 0}}, "evaluation: examples is 0; use 1 or more"),
        ({"evaluation": {"batch": 0}}, "evaluation: batch is 0; use 1 or more"),
        ({"evaluation": {"lengths": [4, 0]}}, "evaluation: lengths holds 0; use 1 or more"),
        ({"evaluation": {"temperature": 0}}, "evaluation: temperature is 0.0; use more than 0"),
        ({"model": {"path": "m"}, "lora": {"rank": 0}}, "lora: rank is 0; use 1 or more"),
        (
            {"model": {"path": "m"}, "lora": {"dropout": 1}},
            "lora: dropout is 1.0; use 0 or more, and less than 1",
        ),
        (
            {"lora": {}},
            "lora adapts a pretrained model, but model.path is not set; set it or remove lora",
        ),
        (
            {"model": {"path": "m", "layers": 5}},
            "model: model.layers is 5, but a pretrained model has its own; remove it, or path to "
            "build a model",
        ),
        (
            {"model": {"layers": 5}, "depth": {"shape": [1, 1, 1]}},
            "model.layers is 5, but depth.shape's models do not have it; remove it",
        ),
        ({"seeds": []}, "seeds is empty; give at least one seed"),
        ({"seeds": [0, -1]}, "seeds holds -1; use 0 or more"),
        ({"name": "a/b"}, "name is 'a/b'"),
        ({"name": ".hidden"}, "name is '.hidden'"),
        (
            {"task": "gsm8k", "evaluation": {"lengths": [3]}},
            "evaluation.lengths is set, but gsm8k reads a file as it is",
        ),
        (
            {"task": "text", "evaluation": {"lengths": [3]}},
            "evaluation.lengths is set, but text reads a file as it is",
        ),
        (
            {"task": "group_tracking", "evaluation": {"temperature": 1}},
            "evaluation.temperature is set, but nothing is generated for group_tracking, which is "
            "measured by its labels",
        ),
        (
            {"task": "text", "evaluation": {"max_new_tokens": 1}},
            "evaluation.max_new_tokens is set, but nothing is generated for text, which is "
            "measured by its loss; remove it",
        ),
        (
            {"task": {"kind": "group_tracking", "group": "A6"}},
            "task.group: expected one of 'S3', 'S5', 'A5', 'Z60', 'A4xZ5'",
        ),
        (
            {"task": {"kind": "text", "files": "a.txt"}},
            "task.files: expected [text, ...], got 'a.txt'",
        ),
        (
            {"recurrence": {"kind": "turboconn", "connections": [[0, 1]]}},
            "recurrence: connection 0 -> 1 goes up",
        ),
        (
            {"recurrence": {"kind": "turboconn", "connections": [[1, 0]], "lag": 0}},
            "recurrence: lag is 0",
        ),
        ({"solver": {"kind": "sequential", "gradient": "truncated(0)"}}, "solver: gradient is "),
    ],
)
def test_mistake_is_named(changes: dict[str, Any], expected: str) -> None:
    message = mistake(**changes)
    assert expected in message
    assert "\n" not in message


def test_name_and_task_must_be_given() -> None:
    with pytest.raises(ConfigError, match="missing name, task, which must be given"):
        from_mapping(Recipe, {})


# Help


def test_help_tells_every_setting_of_every_section() -> None:
    text = describe(Recipe)
    listed = {line.strip().partition(":")[0] for line in text.splitlines()}
    words = " ".join(text.split())
    checked = 0

    def walk(cls: type, where: str) -> None:
        nonlocal checked
        for name, hint in field_types(cls).items():
            assert where + name in listed, f"help leaves out {where}{name}"
            doc = field_docs(cls).get(name)
            assert doc, f"{cls.__name__}.{name} has no documentation"
            assert " ".join(doc.split()) in words, f"help does not explain {where}{name}"
            checked += 1
            for section in sections_of(hint):
                walk(section, f"{where}{name}.")

    walk(Recipe, "")
    assert checked > 50
    for section in (ModelSection, LoRASection, TrainingSection, EvaluationSection):
        assert section in {
            each for hint in typing.get_type_hints(Recipe).values() for each in sections_of(hint)
        }
