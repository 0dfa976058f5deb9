"""An interrupted run that is started again ends where an uninterrupted one does, bit for bit."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import modeling_utils

from undertow.errors import CheckpointError
from undertow.lab.runs.checkpoints import last_checkpoint
from undertow.lab.runs.log import read_log
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.runs.run import Run
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training import Recipe, train
from undertow.lab.training.build import build
from undertow.lab.training.from_scratch import from_scratch
from undertow.lab.training.log import RunLog

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from undertow.lab.training import train
from undertow.lab.runs.recipe import load_recipe
from undertow.lab.training.trainer import RecipeTrainer

torch.set_num_threads(1)
save = RecipeTrainer._save_optimizer_and_scheduler

def die(self, output_dir):
    if self.state.global_step == 6:  # the weights are written, the optimiser's state is not
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, output_dir)

RecipeTrainer._save_optimizer_and_scheduler = die
train(load_recipe(Path(sys.argv[1]), []), seed=0)
"""


# What a sweep costs is not measured by the clock here, so that two runs do the same on a busy
# machine too.
AUTO = {"kind": "auto", "rollout_cost": 2.0}


def recipe(output: Path, **changes: Any) -> Recipe:
    training = {"steps": 8, "schedule": "cosine"} | changes.pop("training", {})
    return tiny.recipe(output, **{"solver": AUTO, "training": training} | changes)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a run starts from: the step, and the weights before its first step."""
    seen: dict[str, Any] = {"steps": 0}

    def begin(
        self: RunLog, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if not seen["steps"]:
            seen["step"] = state.global_step
            seen["weights"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        seen["steps"] += 1

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "on_step_begin", begin)
        patch.setattr(RunLog, "on_step_end", lambda *_, **__: None)
        yield seen


def stop_at(step: int, wanted: Recipe, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start a run that is interrupted at a step."""
    with monkeypatch.context() as patch:
        tiny.interrupt(patch, step)
        with pytest.raises(KeyboardInterrupt):
            train(wanted, seed=0)
    folder = Run.of(wanted, 0).folder
    assert not (folder / "model").exists()
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the folder of a run that was never interrupted; each recipe is trained once for all
    tests."""
    folders: dict[str, Path] = {}

    def run(**changes: Any) -> Path:
        key = repr(changes)
        if key not in folders:
            folders[key] = train(recipe(tmp_path_factory.mktemp("whole"), **changes), seed=0)
        return folders[key]

    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pretrained model."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = character_tokenizer("01=")
    from_scratch(ModelSection(width=16, heads=2, positions=64), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["turboconn", "t2mlr", "plain with dropout", "lora with dropout"])
def test_resumed_equals_uninterrupted(
    kind: str,
    base: Path,
    uninterrupted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: dict[str, Any] = {
        "turboconn": {"recurrence": tiny.TURBOCONN, "solver": "sequential"},
        "t2mlr": {"recurrence": tiny.T2MLR, "training": {"gate_multiplier": 20}},
        "plain with dropout": {"model": {"architecture": "gpt2"}},
        "lora with dropout": {
            "model": {"path": str(base)},
            "recurrence": tiny.T2MLR,
            "lora": {"rank": 4, "dropout": 0.2},
            "training": {"gate_multiplier": 20},
        },
    }[kind]
    whole = uninterrupted(**changes)
    wanted = recipe(tmp_path, **changes)
    folder = stop_at(6, wanted, monkeypatch)  # step 5 is logged, and will be done again
    checkpoint = last_checkpoint(folder)
    assert checkpoint is not None and checkpoint.name == "checkpoint-4"
    saved = tiny.weights(checkpoint)

    with watched(monkeypatch) as seen:
        assert train(wanted, seed=0) == folder
    assert (seen["step"], seen["steps"]) == (4, 4), (
        "it began anew, which ends with the same weights too"
    )
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))
    assert tiny.losses(folder) == tiny.losses(whole)
    assert not list(folder.glob("checkpoint-*"))

    # The recurrence's weights came from the checkpoint: they are not those that it starts with.
    if "recurrence" in changes:
        fresh = build(wanted, seed=0)[0].state_dict()
        names = {
            name
            for name in seen["weights"]
            if ".recurrence." in name and "original_module" not in name
        }
        assert names
        for name in names:
            assert torch.equal(
                seen["weights"][name], saved[name.replace(".modules_to_save.default.", ".")]
            )
            assert not torch.equal(seen["weights"][name], fresh[name]), (
                f"{name} had not moved, so that this shows nothing"
            )


def test_another_interruption_does_not_matter(
    uninterrupted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uninterrupted()
    wanted = recipe(tmp_path)
    for step in (1, 4, 6, 7):
        stop_at(step, wanted, monkeypatch)
    folder = train(wanted, seed=0)
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))
    assert tiny.losses(folder) == tiny.losses(whole)
    assert [
        entry["seed"] for entry in read_log(folder / "log.jsonl") if entry.get("event") == "start"
    ] == [0] * 4


def test_killed_while_writing_a_checkpoint(
    uninterrupted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "recurrence": tiny.TURBOCONN,
        "solver": AUTO,
        "training": {"steps": 8, "schedule": "cosine"},
    }
    path = tiny.recipe_file(tmp_path, **changes)
    with (tmp_path / "output").open("w") as output:
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(path)],
            stdout=output,
            stderr=output,
            env=tiny.environment(),
        )
    assert done.returncode == -signal.SIGKILL, (tmp_path / "output").read_text()[-2000:]
    wanted = recipe(tmp_path, recurrence=tiny.TURBOCONN)
    folder = Run.of(wanted, 0).folder
    half = folder / ".checkpoint-6.writing" / "checkpoint-6"
    assert (half / "model.safetensors").is_file(), "it was not killed where it should be"
    assert not (half / "trainer_state.json").exists()
    with watched(monkeypatch) as seen:
        train(wanted, seed=0)
    assert seen["step"] == 4
    whole = uninterrupted(recurrence=tiny.TURBOCONN)
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))
    assert tiny.losses(folder) == tiny.losses(whole)


@pytest.mark.parametrize("recurrence", [tiny.TURBOCONN, None], ids=["turboconn", "plain"])
def test_a_full_disk_while_saving_the_model_leaves_the_checkpoint(
    recurrence: Any,
    uninterrupted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = modeling_utils.safe_save_file

    def full(tensors: Any, path: Any, **settings: Any) -> None:
        if "checkpoint-" in str(path):
            return write(tensors, path, **settings)
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    wanted = recipe(tmp_path, recurrence=recurrence)
    folder = Run.of(wanted, 0).folder
    with monkeypatch.context() as patch:
        patch.setattr(modeling_utils, "safe_save_file", full)
        with pytest.raises(CheckpointError, match=r"could not write .*No space left on device"):
            train(wanted, seed=0)
    left = {path.name for path in folder.iterdir()}
    assert left == {"recipe.yaml", "versions.json", "log.jsonl", "checkpoint-6", "checkpoint-8"}
    with watched(monkeypatch) as seen:
        train(wanted, seed=0)
    assert seen["steps"] == 0, "only the saving was left to do"
    whole = uninterrupted(**({"recurrence": recurrence} if recurrence else {}))
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}


def test_a_full_disk_while_saving_a_checkpoint_leaves_the_one_before(
    uninterrupted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = torch.save

    def full(value: Any, path: Any, *rest: Any, **settings: Any) -> None:
        if str(path).endswith("checkpoint-4/optimizer.pt"):
            Path(path).write_bytes(b"half")
            raise RuntimeError(
                "[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"
            )  # as torch.save does
        write(value, path, *rest, **settings)

    wanted = recipe(tmp_path, recurrence=tiny.TURBOCONN)
    folder = Run.of(wanted, 0).folder
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(
            CheckpointError,
            match=r"could not write a checkpoint in .*unexpected pos 64.*from the checkpoint",
        ):
            train(wanted, seed=0)
    with watched(monkeypatch) as seen:
        train(wanted, seed=0)
    assert (seen["step"], seen["steps"]) == (2, 6)
    whole = uninterrupted(recurrence=tiny.TURBOCONN)
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))
