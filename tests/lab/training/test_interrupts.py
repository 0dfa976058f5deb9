"""SIGINT and SIGTERM: the step ends, a checkpoint is saved, and what is said of it is true."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from undertow.cli.main import COMMANDS, main
from undertow.errors import Interrupted
from undertow.lab.runs.checkpoints import checkpoints
from undertow.lab.runs.recipe import TrainingSection
from undertow.lab.runs.run import Run
from undertow.lab.signals import hearing, stop
from undertow.lab.training import interrupts, train
from undertow.lab.training.interrupts import Interrupts
from undertow.lab.training.log import RunLog
from undertow.lab.training.remarks import warmup_remarks
from undertow.lab.training.trainer import RecipeTrainer

SECTION = {"steps": 8, "schedule": "cosine", "save_every": None}


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C is heard, even where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def signalled(patch: pytest.MonkeyPatch, step: int, *numbers: int) -> None:
    """Send signals in the middle of a step of the next runs."""
    take = RecipeTrainer.training_step

    def sending(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return take(self, *args, **kwargs)

    patch.setattr(RecipeTrainer, "training_step", sending)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny.recipe(tmp_path_factory.mktemp("whole"), training=SECTION), seed=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [3, 8])
def test_the_first_signal_keeps_the_work(
    number: int,
    step: int,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = str(tiny.recipe_file(tmp_path, training=SECTION))
    folder = Run.of(tiny.recipe(tmp_path), 0).folder
    with monkeypatch.context() as patch:
        signalled(patch, step, number)
        assert main(["train", path]) == 128 + number
    (checkpoint,) = checkpoints(folder)
    assert checkpoint.name == f"checkpoint-{step}"
    said = capfd.readouterr().err
    assert said.endswith(f"undertow: interrupted; the same command goes on from {checkpoint}\n")
    assert "ending after this step, with a checkpoint; the same signal again ends at once" in said
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler), "handlers stay"
    train(tiny.recipe(tmp_path, training=SECTION), seed=0)
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))
    assert tiny.losses(folder) == tiny.losses(whole)
    assert {entry.name for entry in folder.iterdir()} == {entry.name for entry in whole.iterdir()}


def test_the_second_signal_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tiny.recipe(tmp_path, training=SECTION)
    signalled(monkeypatch, 3, signal.SIGINT, signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        train(wanted, seed=0)
    assert caught.value.number == signal.SIGTERM
    assert caught.value.said == (
        "no checkpoint was saved yet, as training.save_every is null, so the same command starts "
        "anew"
    )
    assert not checkpoints(Run.of(wanted, 0).folder)


def test_a_process_of_a_study_leaves_the_second_signal_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "parent_process", lambda: object())
    signalled(monkeypatch, 3, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(Interrupted, match="checkpoint-3"):
        train(tiny.recipe(tmp_path, training=SECTION), seed=0)


def test_the_control_without_hearing_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interrupts, "hearing", lambda self: hearing(stop))
    signalled(monkeypatch, 3, signal.SIGINT)
    with pytest.raises(Interrupted, match="starts anew"):
        train(tiny.recipe(tmp_path, training=SECTION), seed=0)


def test_a_signal_in_the_last_evaluation_keeps_the_steps(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tiny.recipe(tmp_path, training=SECTION)
    with monkeypatch.context() as patch:
        evaluate = RecipeTrainer.evaluate

        def sending(self: Any, *args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(self, *args, **kwargs)

        patch.setattr(RecipeTrainer, "evaluate", sending)
        with pytest.raises(Interrupted, match="checkpoint-8"):
            train(wanted, seed=0)
    folder = train(wanted, seed=0)
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))


def test_a_signal_while_the_model_is_saved_lets_it_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunLog.write

    def sending(self: RunLog, **entry: Any) -> None:
        write(self, **entry)
        if entry.get("event") == "end":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunLog, "write", sending)
    with pytest.raises(Interrupted, match="is finished, and its model saved"):
        train(tiny.recipe(tmp_path, training=SECTION), seed=0)
    assert (Run.of(tiny.recipe(tmp_path), 0).folder / "model").is_dir()


@pytest.mark.parametrize(
    ("seconds", "took", "steps"),
    [(1.0, 0.0, []), (13.0, 0.0, [8]), (301.0, 0.0, [2, 4, 6, 8]), (301.0, 100.0, [2, 8])],
    ids=["a short run", "more than a minute", "long steps", "slow saving"],
)
def test_checkpoints_come_by_time_where_nothing_is_said(
    seconds: float, took: float, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    begin = RunLog.on_step_begin

    def later(self: RunLog, *args: Any, **kwargs: Any) -> None:
        now[0] += seconds
        begin(self, *args, **kwargs)

    monkeypatch.setattr(RunLog, "on_step_begin", later)
    saved: list[int] = []

    def saving(self: Any, *_: Any) -> None:
        saved.append(self.state.global_step)
        now[0] += took

    monkeypatch.setattr(RecipeTrainer, "_save_checkpoint", saving)
    train(tiny.recipe(tmp_path, training={"steps": 8, "save_every": "auto"}), seed=0)
    assert saved == steps
    assert TrainingSection().save_every == "auto"


def test_every_command_says_what_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "bench": ["bench"],
        "generate": ["generate", str(tmp_path), "1"],
        "eval": ["eval", str(tmp_path)],
    }
    for name, given in arguments.items():
        for number in (signal.SIGINT, signal.SIGTERM):
            sending = dataclasses.replace(
                COMMANDS[name], run=lambda *_, number=number: os.kill(os.getpid(), number)
            )
            monkeypatch.setitem(COMMANDS, name, sending)
            assert main(given) == 128 + number
            said = capsys.readouterr().err
            assert said == f"undertow: interrupted; {COMMANDS[name].interrupted}\n"
            assert "checkpoint" not in said


def test_a_study_passes_signals_on(tmp_path: Path) -> None:
    common = {
        key: value
        for key, value in tiny.settings(tmp_path).items()
        if key not in ("name", "output")
    }
    common["training"] = common["training"] | {
        "steps": 3000,
        "save_every": None,
        "evaluate_examples": 0,
        "threads": 1,
    }
    axes = {
        "rate": {"one": {"training.learning_rate": 1e-4}, "two": {"training.learning_rate": 2e-4}}
    }
    study = {
        "name": "grid",
        "output": str(tmp_path),
        "recipe": common,
        "axes": axes,
        "seeds": [0],
        "workers": 1,
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(study))
    command = [sys.executable, "-m", "undertow.cli.main", "study", str(tmp_path / "grid.yaml")]
    log = tmp_path / "grid" / "one" / "seed-0" / "log.jsonl"
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=tiny.environment())
        until = time.monotonic() + 120
        while time.monotonic() < until and not (log.is_file() and b'"step": 5' in log.read_bytes()):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, (tmp_path / "output").read_text()
    said = (tmp_path / "output").read_text()
    assert (
        "finished runs are kept, and the same command goes on with the others from their last "
        "checkpoints" in said
    )
    assert "Traceback" not in said
    assert len(checkpoints(log.parent)) == 1, "the run did not hear of it"
    assert not (tmp_path / "grid" / "two").exists(), "another was begun"


@pytest.mark.parametrize(
    ("section", "steps", "said"),
    [
        (
            {"warmup_steps": 30},
            30,
            "training.warmup_steps is 30, but there are 30 steps: the rate never gets to 0.001",
        ),
        ({"warmup_steps": 1}, 3, "the first of the 3 steps has learning rate 0"),
        ({"warmup_steps": 100}, 101, None),
        ({"warmup_steps": 0}, 1, None),
    ],
)
def test_a_warm_up_that_leaves_little_is_remarked(
    section: dict[str, int], steps: int, said: str | None, tmp_path: Path
) -> None:
    found = warmup_remarks(
        tiny.recipe(tmp_path, training=section | {"learning_rate": 1e-3}).training, steps
    )
    assert (found == []) if said is None else found[0].startswith(said)


def test_a_checkpoint_without_a_manifest_is_not_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    said = interrupts.how_to_go_on(tmp_path, finished=False, saves=True)
    assert said.startswith(
        f"the same command goes on from {tmp_path / 'checkpoint-4'}, if it is whole"
    )
    (tmp_path / "checkpoint-4").rmdir()
    assert "starts anew" in interrupts.how_to_go_on(tmp_path, finished=False, saves=True), (
        "the control"
    )
