"""A study: every combination of some choices, each trained and evaluated with every seed; one table
and one figure of it.

    undertow study recipes/cpu/study-gradients-s3.yaml

Several runs go on at a time, in processes of their own. The same command goes on where it was
interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from undertow.errors import CheckpointError, ConfigError
from undertow.files import read_json, write_json, write_text
from undertow.lab.evaluation.figures import curves_figure
from undertow.lab.runs.lock import locked
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.versions import versions
from undertow.lab.study.findings import finding, findings_table
from undertow.lab.study.pool import make
from undertow.lab.study.settings import Study
from undertow.lab.training.fit import check_fit
from undertow.mapping import from_mapping, to_mapping
from undertow.paths import takes_paths

SUMMARY = "summary.json"


def study(settings: Study) -> str:
    """Train what is not trained yet, and write `summary.json`, `summary.md` and `losses.png`;
    returns the table.

    Raises:
        ConfigError: a combination is no recipe.
        DataError: a test file is malformed.
        CheckpointError: a run's folder was made by another recipe.
        UndertowError: a run cannot be made. Those that are under way are finished first.
    """
    recipes = settings.recipes()
    for recipe in recipes.values():
        check_fit(recipe)
    with locked(settings.folder):
        make(settings, recipes.values())
        return summary(settings, recipes)


def summary(settings: Study, recipes: Mapping[tuple[str, ...], Recipe]) -> str:
    """Write what the runs' folders say, and return it as a table."""
    found = [finding(labels, recipe) for labels, recipe in recipes.items()]
    record = {"study": to_mapping(settings), "versions": versions(), "findings": found}
    write_json(settings.folder / SUMMARY, record)
    text = findings_table(list(settings.axes), found)
    write_text(settings.folder / "summary.md", text + "\n")
    curves_figure(
        {one.labels: one.curves for one in found},
        settings.folder / "losses.png",
        settings.name,
        "held-out loss (nats)",
    )
    return text


@takes_paths
def runs_in(path: Path) -> list[Path]:
    """The folders of a finished study's runs, in the study's order; of any other folder, that
    folder itself."""
    if not (path / SUMMARY).is_file():
        return [path]
    summary = read_json(path / SUMMARY)
    try:
        settings = from_mapping(
            Study, summary["study"] if isinstance(summary, dict) and "study" in summary else summary
        )
    except ConfigError as error:
        raise CheckpointError(
            f"{path / SUMMARY} holds no study ({error}); run `undertow study` again"
        ) from error
    return [path / recipe.name for recipe in settings.recipes().values()]
