"""Tracking services beside the run's own log, by transformers' callbacks."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from undertow.errors import ConfigError
from undertow.lab.runs.recipe import TrainingSection


def trackers(section: TrainingSection, folder: Path) -> list[TrainerCallback]:
    """The callback of `training.report_to`; none if that is not set. TensorBoard's files go into
    the run's folder.

    Raises:
        ConfigError: its package is not installed.
    """
    name = section.report_to
    if name is None:
        return []
    try:
        made = [kind() for kind in get_reporting_integration_callbacks([name])]
    except (ImportError, RuntimeError) as error:  # what transformers raises of a missing package
        raise ConfigError(
            f"training.report_to is {name}, which is not installed; install it with: pip install "
            f"{name}, or leave report_to out"
        ) from error
    for callback in made:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = str(folder / "tensorboard")
    return made
