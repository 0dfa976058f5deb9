"""Every shipped study makes recipes whose recurrences fit their models."""

from pathlib import Path

import pytest

from undertow.errors import ConfigError
from undertow.lab.runs.recipe import Recipe
from undertow.lab.study.settings import Study
from undertow.lab.training.build import outline
from undertow.mapping import apply_overrides, from_mapping, load_yaml
from undertow.solvers import Sequential

STUDIES = sorted((Path(__file__).parents[3] / "recipes").rglob("study-*.yaml"))


def study_of(path: Path, folder: Path) -> Study:
    """A shipped study; one of text is given a file, as on the command line."""
    settings = load_yaml(path)
    if settings["recipe"]["task"]["kind"] == "text":
        (folder / "a.txt").write_text("abc\n")
        settings = apply_overrides(settings, [f"--recipe.task.files=[{folder / 'a.txt'}]"])
    return from_mapping(Study, settings)


def test_studies_are_shipped() -> None:
    assert len(STUDIES) >= 9


def test_no_recipe_shares_a_folder_with_another_or_a_study() -> None:
    names = [
        load_yaml(path)["name"] for path in (Path(__file__).parents[3] / "recipes").rglob("*.yaml")
    ]
    assert len(set(names)) == len(names) > len(STUDIES)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_combination_is_a_recipe(path: Path, tmp_path: Path) -> None:
    study = study_of(path, tmp_path)
    assert path.stem == f"study-{study.name}"
    recipes: dict[tuple[str, ...], Recipe] = {
        labels: study.variant(labels) for labels in study.combinations()
    }
    assert len({recipe.name for recipe in recipes.values()}) == len(recipes) > 1, (
        "two combinations would share a folder"
    )
    differing = [
        (r.task, r.model, r.recurrence, r.depth, r.solver, r.training) for r in recipes.values()
    ]
    assert all(one not in differing[:place] for place, one in enumerate(differing)), (
        "two combinations are the same"
    )
    for recipe in {(str(r.model), r.recurrence, r.depth): r for r in recipes.values()}.values():
        if recipe.model.path is not None and not Path(recipe.model.path).is_dir():
            pytest.skip(f"{recipe.model.path} is absent; make models fetches it")
        names = [name for name, _ in outline(recipe).named_parameters()]
        has_weights = recipe.recurrence is not None and recipe.recurrence.kind != "soft-token"
        assert any(".recurrence." in name for name in names) == has_weights


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_what_stands_for_exact_training_is_exact(path: Path, tmp_path: Path) -> None:
    study = study_of(path, tmp_path)
    for labels in study.combinations():
        recipe = study.variant(labels)
        if {"full", "exact, full gradient"} & set(labels):
            assert recipe.solver == Sequential(), f"{', '.join(labels)}: {recipe.solver}"
        if study.name.startswith("turboconn-"):
            assert isinstance(recipe.solver, Sequential), f"{', '.join(labels)}: {recipe.solver}"


def test_a_wrong_choice_is_refused(tmp_path: Path) -> None:
    study = study_of(STUDIES[0], tmp_path)
    study.axes["recurrence"]["wrong"] = {"recurrence.lags": 2, "recurrence.kind": "turboconn"}
    with pytest.raises(ConfigError, match=r"unknown key recurrence\.lags"):
        study.variant(["wrong", next(iter(study.axes["gradient"]))])
