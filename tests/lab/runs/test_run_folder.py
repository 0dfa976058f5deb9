"""A run's folder and an experiment's, by the objects that stand for them."""

import json
from pathlib import Path

import pytest
import tiny

from undertow.errors import CheckpointError, ConfigError
from undertow.lab.runs.results import Accuracy
from undertow.lab.runs.run import Experiment, Run
from undertow.lab.training import train


def test_a_run_holds_what_its_folder_holds(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, training={"steps": 2, "save_every": None})
    run = Run.of(recipe, 3)
    assert run.folder == tmp_path / "tiny" / "seed-3" and run.name == "seed-3"
    assert not run.finished and run.log() == [] and not run.diverged()
    assert train(recipe, seed=3) == run.folder
    assert run.finished and run.recipe() == recipe
    assert run.recipe(["--evaluation.batch=2"]).evaluation.batch == 2
    model, tokenizer = run.load()
    assert model.config.vocab_size == len(tokenizer)
    with pytest.raises(ConfigError, match=r"depth is 2, but .* has no recurrence in depth"):
        run.load(depth=2)
    assert run.accuracies() == () and run.loss() is None
    found = Accuracy(6, 0.0, 1, 2)
    run.write_results("accuracy.json", [found])
    assert run.accuracies() == (found,)
    assert json.loads(run.accuracy_file.read_text())[0]["correct"] == 1
    (run.folder / ".loss.json.writing").write_text("half")
    run.write_results("loss.json", {"loss": 1.5})
    assert run.loss() == 1.5 and not list(run.folder.glob(".*")), "what was left half-written"


def test_an_experiment_is_its_finished_runs(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, training={"steps": 2, "save_every": None})
    for seed in (0, 1):
        train(recipe, seed)
    folder = tmp_path / "tiny"
    assert [run.name for run in Experiment(folder).runs] == ["seed-0", "seed-1"]
    assert [run.folder for run in Experiment(str(folder / "seed-1")).runs] == [folder / "seed-1"]
    assert (Experiment(folder).seconds_per_step() or 0) > 0
    (folder / "seed-0" / "model").rename(folder / "seed-0" / "elsewhere")
    assert [run.name for run in Experiment(folder).runs] == ["seed-1"]
    with pytest.raises(CheckpointError, match="its training has not finished"):
        Experiment(folder / "seed-0")
    with pytest.raises(CheckpointError, match=r"it has no recipe\.yaml"):
        Experiment(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        Experiment(tmp_path / "absent")
