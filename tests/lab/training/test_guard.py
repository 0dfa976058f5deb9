"""A step that is no number ends a run before it is taken; a remedy goes on from the last good
checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from undertow.errors import CheckpointError, ConfigError, DivergedError
from undertow.lab.runs.checkpoints import infinite
from undertow.lab.runs.log import read_log
from undertow.lab.runs.recipe import TrainingSection, load_recipe
from undertow.lab.runs.run import Run
from undertow.lab.training import Recipe, train
from undertow.lab.training import run as run_module
from undertow.lab.training.build import build
from undertow.lab.training.guard import GuardedSteps
from undertow.lab.training.trainer import RecipeTrainer
from undertow.mapping import save_yaml

NAN = float("nan")


def spoil(patch: pytest.MonkeyPatch, fault: str, step: int) -> None:
    """Let a fault happen in a step of the next runs."""
    take = RecipeTrainer.training_step

    def spoilt(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        here = self.state.global_step + 1 == step
        if here and fault == "nan weight":
            with torch.no_grad():
                list(model.parameters())[-1].view(-1)[0] = NAN
        loss = take(self, model, *args, **kwargs)
        if here and "gradient" in fault:
            list(model.parameters())[-1].grad.view(-1)[0] = float(fault[:3])
        return loss * NAN if here and fault == "nan loss" else loss

    patch.setattr(RecipeTrainer, "training_step", spoilt)


def finite(folder: Path) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tiny.weights(folder).values())


def lost(
    wanted: Recipe, monkeypatch: pytest.MonkeyPatch, fault: str = "nan gradient", step: int = 5
) -> str:
    """Train a run that diverges in a step; what is said of it."""
    with monkeypatch.context() as patch:
        spoil(patch, fault, step)
        with pytest.raises(DivergedError) as caught:
            train(wanted, seed=0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "changes", "late"),
    [
        ("nan gradient", {}, False),
        ("nan gradient", {"accumulate": 2}, True),
        ("inf gradient", {"clip": 0}, False),
        ("inf gradient", {}, True),
        ("nan loss", {"accumulate": 2}, False),
        ("nan loss", {"clip": 0}, True),
        ("nan weight", {}, False),
    ],
)
def test_a_step_that_is_no_number_is_not_taken(
    fault: str, changes: dict[str, Any], late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedSteps, "reads_late", lambda self, values: late)
    wanted = tiny.recipe(tmp_path, training={"log_every": 6, "evaluate_examples": 0, **changes})
    said = lost(wanted, monkeypatch, fault)
    folder = Run.of(wanted, 0).folder
    assert (
        "at step 5, which is not taken: training has diverged; lower training.learning_rate, which "
        "is 0.01" in said
    )
    assert f"goes on from the last good checkpoint, {folder / 'checkpoint-4'}" in said
    left = {path.name: finite(path) for path in folder.glob("checkpoint-*")}
    assert left == {"checkpoint-2": True, "checkpoint-4": True} and not (folder / "model").exists()

    assert Run(folder).diverged()
    entry = read_log(folder / "log.jsonl")[-1]
    assert (entry["step"], entry["checkpoint"]) == (5, "checkpoint-4")
    assert len(entry["examples"]) == 4 * changes.get("accumulate", 1)
    assert (
        f"the step's examples are {', '.join(map(str, entry['examples']))} of the train split"
        in said
    )
    assert ("was no number before it" in said) == (fault == "nan weight")

    # Without the fault the same command ends as if nothing had been.
    if changes:
        return
    train(wanted, seed=0)
    whole = train(
        tiny.recipe(
            tmp_path, name="whole", training={"log_every": 6, "evaluate_examples": 0, **changes}
        ),
        seed=0,
    )
    assert tiny.equal(tiny.weights(folder / "model"), tiny.weights(whole / "model"))


@pytest.mark.parametrize("save_every", [2, None])
def test_the_control_without_the_guard_loses_the_run(
    save_every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tiny.recipe(
        tmp_path, training={"log_every": 9, "evaluate_examples": 0, "save_every": save_every}
    )
    monkeypatch.setattr(RecipeTrainer, "look", lambda self: None)
    assert "weight is not finite after step 6" in lost(wanted, monkeypatch), (
        "what is saved is looked at too"
    )
    monkeypatch.setattr(RecipeTrainer, "check_finite", lambda self: None)
    spoil(monkeypatch, "nan gradient", 5)
    assert not finite(train(wanted, seed=0) / "model")


@pytest.mark.parametrize("looks_before", [True, False])
def test_a_step_that_is_read_late_is_read_before_it_is_saved(
    looks_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedSteps, "reads_late", lambda self, values: True)
    if not looks_before:  # the control
        monkeypatch.delattr(GuardedSteps, "_save_checkpoint")
    wanted = tiny.recipe(tmp_path, training={"log_every": 9, "evaluate_examples": 0})
    said = lost(wanted, monkeypatch, step=4)
    assert "at step 4, which is not taken" in said
    assert ("checkpoint-2;" in said) == looks_before
    assert (Run.of(wanted, 0).folder / "checkpoint-4").exists() != looks_before


def test_a_late_look_leaves_the_optimiser_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without looking at all at the reading, the device alone skips the step.
    monkeypatch.setattr(GuardedSteps, "reads_late", lambda self, values: True)
    monkeypatch.setattr(GuardedSteps, "settle", lambda self: None)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    step_end = run_module.RunLog.on_step_end

    def keep(
        self: Any, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        seen[state.global_step] = {
            name: tensor.clone() for name, tensor in model.state_dict().items()
        }
        step_end(self, args, state, control, **kwargs)

    monkeypatch.setattr(run_module.RunLog, "on_step_end", keep)
    spoil(monkeypatch, "nan gradient", 4)
    train(tiny.recipe(tmp_path, training={"evaluate_examples": 0, "save_every": None}), seed=0)
    assert tiny.equal(seen[3], seen[4])
    assert not tiny.equal(seen[2], seen[3]) and not tiny.equal(seen[4], seen[5]), (
        "the control: other steps are taken"
    )


def test_a_lower_rate_goes_on_from_the_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tiny.recipe(tmp_path, recurrence=tiny.TURBOCONN)
    lost(wanted, monkeypatch)
    section = {"learning_rate": 1e-3, "clip": 0.5, "weight_decay": 0}
    mended = tiny.recipe(tmp_path, recurrence=tiny.TURBOCONN | {"alpha": 0.5}, training=section)
    folder = Run.of(wanted, 0).folder
    with monkeypatch.context() as patch:
        tiny.interrupt(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            train(mended, seed=0)
    train(mended, seed=0)  # from the same checkpoint of the old rate, by the new one's recipe
    log = read_log(folder / "log.jsonl")
    rates = {entry["step"]: entry["learning_rate"] for entry in log if "loss" in entry}
    assert rates == pytest.approx({1: 0, 2: 5e-3, 3: 1e-2, 4: 1e-2, 5: 1e-3, 6: 1e-3})
    (entry,) = (entry for entry in log if entry.get("event") == "mended")
    assert entry["checkpoint"] == "checkpoint-4"
    assert entry["before"] == {
        "recurrence.alpha": 1.0,
        "training.learning_rate": 1e-2,
        "training.weight_decay": 0.01,
        "training.clip": 1.0,
    }
    assert entry["now"]["training.learning_rate"] == 1e-3
    assert load_recipe(folder / "recipe.yaml", []) == mended


def test_what_is_no_remedy_is_another_recipe_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tiny.recipe(tmp_path)
    folder = Run.of(wanted, 0).folder
    lower = tiny.recipe(tmp_path, training={"learning_rate": 1e-3})
    with monkeypatch.context() as patch:
        tiny.interrupt(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            train(wanted, seed=0)
    with pytest.raises(
        CheckpointError, match=r"whose training\.learning_rate is 0\.01 and not 0\.001"
    ):
        train(lower, seed=0)  # the control: it has not diverged
    lost(wanted, monkeypatch)
    with pytest.raises(CheckpointError, match=r"whose training\.steps is 6 and not 7"):
        train(tiny.recipe(tmp_path, training={"steps": 7}), seed=0)
    assert Run(folder).check(lower) == {"training.learning_rate": 1e-2}
    train(wanted, seed=0)
    with pytest.raises(
        CheckpointError, match=r"whose training\.learning_rate is 0\.01 and not 0\.001"
    ):
        train(lower, seed=0)  # finished by the old rate


def test_seeds_that_were_finished_before_the_remedy_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = tiny.recipe(tmp_path)
    done = train(wanted, seed=1)
    before = tiny.weights(done / "model")
    lost(wanted, monkeypatch)
    mended = tiny.recipe(tmp_path, training={"learning_rate": 1e-3}, evaluation={"lengths": [7]})
    for seed in (0, 1, 0, 1):
        train(mended, seed)
    assert tiny.equal(tiny.weights(done / "model"), before)
    kept = load_recipe(done / "recipe.yaml", [])
    assert (kept.training, kept.evaluation) == (wanted.training, mended.evaluation)
    assert (
        f"{done} is finished, with training.learning_rate 0.01, and is left as it is"
        in capsys.readouterr().err
    )


def test_without_a_checkpoint_a_remedy_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tiny.recipe(tmp_path, training={"save_every": None})
    assert "the same command then starts anew, as there is no checkpoint yet" in lost(
        wanted, monkeypatch
    )
    mended = tiny.recipe(tmp_path, training={"save_every": None, "learning_rate": 1e-3})
    folder = train(mended, seed=0)
    log = read_log(folder / "log.jsonl")
    assert [entry["learning_rate"] for entry in log if "loss" in entry] == pytest.approx(
        [0, 5e-4, *[1e-3] * 4]
    )
    assert [entry["event"] for entry in log[:3]] == ["diverged", "start", "mended"]


@pytest.mark.parametrize("rate", [1e6, 1e38])
@pytest.mark.parametrize("steps", [1, 6])
def test_a_huge_rate_leaves_no_model_that_is_no_number(
    rate: float, steps: int, tmp_path: Path
) -> None:
    section = {"learning_rate": rate, "warmup_steps": 0, "evaluate_examples": 0, "steps": steps}
    wanted = tiny.recipe(tmp_path, recurrence=tiny.TURBOCONN, training=section)
    try:
        assert finite(train(wanted, seed=0) / "model")
    except DivergedError:
        assert all(finite(path) for path in Run.of(wanted, 0).folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "key", ["learning_rate", "clip", "weight_decay", "gate_multiplier", "beta2", "floor"]
)
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_settings_that_are_no_numbers_are_refused(key: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key}: expected number, got {value}; give a finite one"
    ):
        TrainingSection(**{key: value})


def test_a_model_that_is_broken_already_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = build(tiny.recipe(tmp_path), seed=0)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = NAN
    monkeypatch.setattr(run_module, "build", lambda *_: (model, tokenizer))
    with pytest.raises(
        CheckpointError, match=r"the model's lm_head\.weight is not finite before any training"
    ):
        train(tiny.recipe(tmp_path), seed=0)


def test_buffers_may_hold_the_infinities_of_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tiny.recipe(tmp_path)
    model, tokenizer = build(wanted, seed=0)
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    monkeypatch.setattr(run_module, "build", lambda *_: (model, tokenizer))
    assert list(infinite(model.named_buffers())) == ["mask"]
    assert (train(wanted, seed=0) / "model").is_dir()


def test_the_optimiser_is_looked_at_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RecipeTrainer._save_checkpoint

    def spoilt(self: Any, *args: Any) -> None:
        next(iter(self.optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = float("inf")
        save(self, *args)

    monkeypatch.setattr(RecipeTrainer, "_save_checkpoint", spoilt)
    with pytest.raises(
        DivergedError, match=r"the optimiser's exp_avg_sq of model\..* is not finite after step 2"
    ):
        train(tiny.recipe(tmp_path), seed=0)
    assert not list(Run.of(tiny.recipe(tmp_path), 0).folder.glob("checkpoint-*"))


def test_a_damaged_or_lost_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tiny.recipe(tmp_path)
    lost(wanted, monkeypatch)
    folder = Run.of(wanted, 0).folder
    for content in (b"", b"null", b"\0\0", b"\xff\xfe", b"name: [", b"name: 3\n"):
        (folder / "recipe.yaml").write_bytes(content)
        with pytest.raises(
            CheckpointError,
            match=r"recipe\.yaml is damaged \(.*\); write the recipe that the run was made by",
        ):
            train(wanted, seed=0)
    (folder / "recipe.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"has lost its recipe\.yaml"):
        train(wanted, seed=0)
    save_yaml(wanted, folder / "recipe.yaml")
    train(wanted, seed=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "or lower training.clip: the same"),
        ({"training": {"clip": 0}}, "or set training.clip, which is 0: the same"),
        (
            {"recurrence": tiny.TURBOCONN},
            "or lower training.clip, or lower the recurrence's alpha: the same",
        ),
    ],
)
def test_only_remedies_that_there_are_are_named(
    changes: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected in lost(tiny.recipe(tmp_path, **changes), monkeypatch, step=1)
