"""Tracking services beside the run's own log."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import TrainerCallback

from undertow.cli.main import main
from undertow.lab.runs.run import Run
from undertow.lab.training import tracking, train


class Recorder(TrainerCallback):
    """Takes the place of a service."""

    logged: list[dict[str, Any]]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        type(self).logged.append({"step": state.global_step, **logs})


def test_a_tracker_gets_what_the_log_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder.logged = []
    monkeypatch.setattr(tracking, "get_reporting_integration_callbacks", lambda names: [Recorder])
    recipe = tiny.recipe(tmp_path, recurrence=tiny.T2MLR, training={"report_to": "trackio"})
    log = Run(train(recipe, seed=0)).log()
    ours = [entry for entry in log if "loss" in entry or "eval_loss" in entry]
    assert ours and "gate_recurrent" in ours[0], "what callbacks add reaches it too"
    theirs = {entry["step"]: entry for entry in Recorder.logged if "loss" in entry}
    for entry in ours:
        if "loss" in entry:
            got = theirs[entry["step"]]
            assert [got[name] for name in ("loss", "gate_recurrent")] == [
                entry[name] for name in ("loss", "gate_recurrent")
            ]
    Recorder.logged = []
    train(tiny.recipe(tmp_path / "other"), seed=0)
    assert not Recorder.logged, "the control: nothing is reported where nothing is asked for"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_one_that_is_not_installed_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        f"transformers.integrations.integration_utils.is_{name}_available", lambda: False
    )
    path = str(tiny.recipe_file(tmp_path))
    assert main(["train", path, f"--training.report_to={name}"]) == 2
    said = capsys.readouterr().err
    assert f"training.report_to is {name}, which is not installed; install it with: pip" in said
    assert not (tmp_path / "tiny" / "seed-0").exists(), "nothing is left of it"
    assert main(["train", path, "--training.report_to=wandbb"]) == 2
