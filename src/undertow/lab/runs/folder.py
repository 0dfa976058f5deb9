"""A run's folder: what is in it, what made it, and whether a training may go on there."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from undertow.config import load_config, to_mapping
from undertow.errors import CheckpointError
from undertow.files import remove_leftovers
from undertow.lab.runs.checkpoints import checkpoints, remove
from undertow.lab.runs.log import has_diverged
from undertow.lab.runs.recipe import Recipe
from undertow.manifest import check_model

RECIPE, VERSIONS, LOG, MODEL = "recipe.yaml", "versions.json", "log.jsonl", "model"
PACKAGES = (
    "undertow",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
)
# What may be another after a training has diverged, and still go on from its last good checkpoint.
REMEDIES = (
    *(
        f"training.{key}"
        for key in (
            "learning_rate",
            "warmup_steps",
            "clip",
            "gate_multiplier",
            "beta2",
            "weight_decay",
        )
    ),
    *(f"training.{key}" for key in ("schedule", "floor", "restart_every", "precision")),
    "recurrence.alpha",
)


def run_folder(recipe: Recipe, seed: int) -> Path:
    return Path(recipe.output) / recipe.name / f"seed-{seed}"


def check_folder(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Refuse to go on in the folder of another experiment, or beside seeds of another.

    Once a seed has diverged, the remedies against that may change: its own, and those of the others
    beside it, of which the finished ones stay as they are. Those in which the folder's own recipe
    differs are returned, as they were, by key.

    Raises:
        CheckpointError: the recipe that the folder, or another seed's beside it, was made with
            differs in what it trains, or cannot be read.
    """
    if (folder / MODEL).exists() and not (
        folder / MODEL
    ).is_dir():  # better known before a training than after it
        raise CheckpointError(
            f"{folder / MODEL} is a file, where the model's folder belongs; move it away"
        )
    now, changed = trained_part(recipe), {}
    if not (folder / RECIPE).exists() and ((folder / MODEL).exists() or checkpoints(folder)):
        raise CheckpointError(
            f"{folder} has lost its {RECIPE}, so what it was trained by is not known; put it back, "
            "or remove the folder"
        )
    for made in sorted(folder.parent.glob(f"seed-*/{RECIPE}")):
        before = trained_part(made_by(made))
        differing = [key for key in now | before if before.get(key) != now.get(key)]
        for key in differing:
            if key not in REMEDIES or not may_change(made.parent):
                raise CheckpointError(
                    f"{made.parent} was made by another recipe, whose {key} is {before.get(key)} "
                    f"and not {now.get(key)}; choose another name or remove the folder"
                )
        if made.parent == folder:
            changed = {key: before.get(key) for key in differing}
    return changed


def clean(folder: Path) -> None:
    """Remove what a killed command left: half-written files, and checkpoints beside a model that is
    whole.

    Raises:
        CheckpointError: the model is not what was saved, so its checkpoints stay.
    """
    remove_leftovers(folder)
    if (folder / MODEL).is_dir() and (old := checkpoints(folder)):
        check_model(folder / MODEL)
        for path in old:
            remove(path)


def may_change(folder: Path) -> bool:
    """Whether a seed of the run has diverged, so that a remedy may be another than in this seed's
    folder."""
    seeds = [path.parent for path in folder.parent.glob(f"seed-*/{LOG}")]
    finished = (folder / MODEL).is_dir()
    return any(has_diverged(seed / LOG) for seed in seeds if seed != folder or not finished)


def made_by(path: Path) -> Recipe:
    """The recipe that a run's folder was made by.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return load_config(Recipe, path)
    except ValueError as error:  # of a key, of YAML or of its encoding
        raise CheckpointError(
            f"{path} is damaged ({error}); write the recipe that the run was made by there, or "
            "remove its folder"
        ) from error


def trained_part(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides the weights, by dotted key."""
    sections = to_mapping(recipe)
    kept: dict[str, Any] = {}
    solved = recipe.recurrence is not None or recipe.model.path is not None  # which may have one
    for name in (
        "task",
        "model",
        "recurrence",
        "depth",
        *(["solver"] if solved else []),
        "lora",
        "training",
    ):
        section = sections[name]
        if isinstance(section, dict):
            kept |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            kept[name] = section
    for key in ("log_every", "save_every", "evaluate_every", "compare_every", "threads"):
        kept.pop(f"training.{key}", None)
    return kept


def versions() -> dict[str, Any]:
    """Versions of what the run is made with, the commit of a checkout, and the command."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    found: dict[str, Any] = {
        "command": command,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    root = Path(__file__).resolve().parents[4]
    if (root / ".git").exists():
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
        found["commit"] = done.stdout.strip() or None
    return found
