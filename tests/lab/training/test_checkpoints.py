"""Checkpoints prove themselves: which one a run goes on from, what is said of others, and what is
never removed."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file

from undertow import manifest
from undertow.cli.main import main
from undertow.errors import CheckpointError
from undertow.files import MANIFEST
from undertow.lab.runs import checkpoints as checkpoints_module
from undertow.lab.runs.checkpoints import NEEDED, checkpoints, choose, last_checkpoint
from undertow.lab.runs.log import read_log
from undertow.lab.runs.run import Run
from undertow.lab.training import Recipe, train
from undertow.lab.training.trainer import RecipeTrainer

AUTO = {"kind": "auto", "rollout_cost": 2.0}  # does the same on a busy machine
CHANGES: dict[str, Any] = {"recurrence": tiny.T2MLR, "solver": AUTO, "training": {"steps": 7}}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flip,
    "null": lambda path: path.write_text("null"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that was stopped after step 6."""
    output = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        tiny.interrupt(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            train(tiny.recipe(output, **CHANGES), seed=0)
    return output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny.recipe(tmp_path_factory.mktemp("whole"), **CHANGES), seed=0)


@pytest.fixture
def wanted(stopped: Path, tmp_path: Path) -> Recipe:
    """The recipe of a run of which the same is there."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tiny.recipe(tmp_path, **CHANGES)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", "flipped"),
        ("optimizer.pt", "missing"),
        ("optimizer.pt", "flipped"),
        ("scheduler.pt", "missing"),
        ("rng_state.pth", "half"),
        ("trainer_state.json", "null"),
        (MANIFEST, "empty"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(
    name: str, damage: str, wanted: Recipe, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Run.of(wanted, 0).folder
    DAMAGES[damage](folder / "checkpoint-6" / name)
    chosen, (said,) = choose(folder)
    assert chosen == folder / "checkpoint-4"
    assert said.startswith("checkpoint-6 is skipped: ") and name in said
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-6", "checkpoint-4"], (
        "it may be readable later"
    )
    train(wanted, seed=0)
    assert f"undertow: {said}" in capsys.readouterr().err
    assert said in [entry.get("text") for entry in read_log(folder / "log.jsonl")]
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))
    assert tiny.losses(folder) == tiny.losses(whole)
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", *NEEDED, "model.safetensors"])
def test_every_damage_of_every_file_is_found(name: str, damage: str, wanted: Recipe) -> None:
    folder = Run.of(wanted, 0).folder
    assert last_checkpoint(folder) == folder / "checkpoint-6", "the control"
    DAMAGES[damage](folder / "checkpoint-6" / name)
    assert last_checkpoint(folder) == folder / "checkpoint-4"
    DAMAGES[damage](folder / "checkpoint-4" / name)
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in .* can be resumed from \(checkpoint-6 is .*; checkpoint-4 is",
    ):
        last_checkpoint(folder)


def test_without_hashes_other_weights_would_be_resumed_from(
    wanted: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Run.of(wanted, 0).folder
    flip(folder / "checkpoint-6" / "model.safetensors")
    monkeypatch.setattr(checkpoints_module, "check_manifest", lambda *_: None)
    assert last_checkpoint(folder) == folder / "checkpoint-6"


def test_a_run_never_starts_anew_on_top_of_damaged_checkpoints(
    wanted: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Run.of(wanted, 0).folder
    for path in checkpoints(folder):
        flip(path / "optimizer.pt")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    recipe = str(tiny.recipe_file(Path(wanted.output), **CHANGES))
    assert main(["train", recipe]) == 2
    assert "restore one of them, or remove them to start anew" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    for path in checkpoints(folder):
        shutil.rmtree(path)
    assert last_checkpoint(folder) is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_passing_read_error_removes_nothing(
    number: int, wanted: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Run.of(wanted, 0).folder
    digest = manifest.digest

    def failing(path: Path) -> str:
        if path.parent.name == "checkpoint-6":
            raise OSError(number, "cannot be read now", str(path))
        return digest(path)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "digest", failing)
        chosen, (said,) = choose(folder)
        assert chosen == folder / "checkpoint-4" and "cannot be read now" in said
    assert last_checkpoint(folder) == folder / "checkpoint-6"


def test_the_newest_is_found_by_number_and_has_to_have_its_own(wanted: Recipe) -> None:
    folder = Run.of(wanted, 0).folder
    (folder / "checkpoint-6").rename(folder / "checkpoint-12")
    chosen, (said,) = choose(folder)
    assert (
        chosen == folder / "checkpoint-4"
        and "checkpoint-12 is of step 6; give it its name back" in said
    )
    (folder / "checkpoint-notes").mkdir()  # the user's own
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-12", "checkpoint-4"]


def test_a_checkpoint_of_an_older_undertow_is_read_through(wanted: Recipe, whole: Path) -> None:
    folder = Run.of(wanted, 0).folder
    for path in checkpoints(folder):
        (path / MANIFEST).unlink()
    chosen, (said,) = choose(folder)
    assert chosen == folder / "checkpoint-6"
    assert (
        "checkpoint-6 has no manifest.json, as those of an older undertow: it is complete and can "
        "be read" in said
    )
    for name in NEEDED:
        content = (folder / "checkpoint-6" / name).read_bytes()
        for damage in ("half", "missing"):
            DAMAGES[damage](folder / "checkpoint-6" / name)
            assert last_checkpoint(folder) == folder / "checkpoint-4", f"{name} {damage}"
        (folder / "checkpoint-6" / name).write_bytes(content)
    train(wanted, seed=0)
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))


def test_a_checkpoint_of_an_older_undertow_that_is_no_number_is_skipped(wanted: Recipe) -> None:
    path = Run.of(wanted, 0).folder / "checkpoint-6"
    weights = tiny.weights(path)
    next(iter(weights.values())).view(-1)[0] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / MANIFEST).unlink()
    _, (said,) = choose(path.parent)
    assert "that is not finite" in said


def test_good_checkpoints_go_only_when_better_ones_are_whole(
    wanted: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Run.of(wanted, 0).folder
    flip(folder / "checkpoint-6" / "optimizer.pt")
    seen: list[list[str]] = []
    save = RecipeTrainer._save_checkpoint

    def keep(self: Any, *args: Any) -> None:
        seen.append(sorted(path.name for path in folder.glob("checkpoint-*")))
        save(self, *args)
        seen.append(sorted(path.name for path in folder.glob("checkpoint-*")))
        assert last_checkpoint(folder) == folder / f"checkpoint-{self.state.global_step}"

    monkeypatch.setattr(RecipeTrainer, "_save_checkpoint", keep)
    train(wanted, seed=0)
    both = ["checkpoint-4", "checkpoint-6"]
    assert seen == [both, both, both, ["checkpoint-6", "checkpoint-7"]]


def test_a_checkpoint_of_another_model_is_refused(wanted: Recipe) -> None:
    folder = Run.of(wanted, 0).folder
    for path in checkpoints(folder):
        (path / MANIFEST).unlink()
        state = torch.load(path / "optimizer.pt", weights_only=True)
        state["param_groups"][0]["params"].pop()
        torch.save(state, path / "optimizer.pt")
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-6 does not fit this training: .*; remove it if it is of another",
    ):
        train(wanted, seed=0)


def test_checkpoints_beside_a_finished_model_go_unless_it_is_damaged(
    wanted: Recipe, whole: Path
) -> None:
    folder = Run.of(wanted, 0).folder
    shutil.copytree(whole / "model", folder / "model")
    (folder / ".model.writing").mkdir()
    flip(folder / "model" / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors is not what was saved.* or remove .*model and train again",
    ):
        train(wanted, seed=0)
    assert len(checkpoints(folder)) == 2
    flip(folder / "model" / "model.safetensors")
    train(wanted, seed=0)
    assert sorted(path.name for path in folder.iterdir()) == [
        "log.jsonl",
        "model",
        "recipe.yaml",
        "versions.json",
    ]


def test_evaluation_cleans_up_too(wanted: Recipe, whole: Path) -> None:
    folder = Run.of(wanted, 0).folder
    shutil.copytree(whole / "model", folder / "model")
    assert main(["eval", str(folder)]) == 0
    assert not checkpoints(folder)
    assert json.loads((folder / "accuracy.json").read_text())


@pytest.mark.parametrize("finished", [False, True])
def test_only_the_run_s_own_checkpoints_are_removed(
    finished: bool, wanted: Recipe, whole: Path, tmp_path: Path
) -> None:
    folder = Run.of(wanted, 0).folder
    if finished:
        shutil.copytree(whole / "model", folder / "model")
    shutil.copytree(folder / "checkpoint-6", folder / "checkpoint-6-mine")
    (folder / "checkpoint-notes.txt").write_text("mine too")
    (folder / "checkpoint-9").write_text("a file")
    (folder / "checkpoint-6").rename(tmp_path / "elsewhere")
    (folder / "checkpoint-6").symlink_to(tmp_path / "elsewhere")
    assert last_checkpoint(folder) == folder / "checkpoint-6"
    train(wanted, seed=0)
    left = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert left == ["checkpoint-6-mine", "checkpoint-9", "checkpoint-notes.txt"]
    assert (tmp_path / "elsewhere" / MANIFEST).is_file()
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))


@pytest.mark.parametrize("content", [{}, [], None, 1, torch.ones(2)], ids=str)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_state_of_another_kind_in_an_older_checkpoint_is_found(
    name: str, content: object, wanted: Recipe
) -> None:
    folder = Run.of(wanted, 0).folder
    (folder / "checkpoint-6" / MANIFEST).unlink()
    assert last_checkpoint(folder) == folder / "checkpoint-6", "the control"
    torch.save(content, folder / "checkpoint-6" / name)
    chosen, (said,) = choose(folder)
    assert chosen == folder / "checkpoint-4" and name in said


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"unknown": 1},
            {"log_history": 5},
            {"stateful_callbacks": []},
            {"max_steps": "x"},
            {"epoch": "y"},
        ),
        {"train_batch_size": None},
    ],
    ids=str,
)
def test_a_trainer_s_state_of_another_kind_is_found(change: dict[str, Any], wanted: Recipe) -> None:
    folder = Run.of(wanted, 0).folder
    path = folder / "checkpoint-6" / "trainer_state.json"
    (folder / "checkpoint-6" / MANIFEST).unlink()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    chosen, (said,) = choose(folder)
    assert chosen == folder / "checkpoint-4" and "trainer_state.json is damaged" in said
