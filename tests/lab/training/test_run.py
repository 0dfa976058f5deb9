"""What a run leaves behind: its resolved recipe, versions, a log, and a model that loads
elsewhere."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import undertow
from undertow.errors import CheckpointError, DataError
from undertow.host.attachment import find_attachment
from undertow.lab.evaluation import accuracy_by_length
from undertow.lab.runs.loading import load
from undertow.lab.runs.recipe import load_recipe
from undertow.lab.runs.run import Run
from undertow.lab.tasks import Parity
from undertow.lab.training import Recipe, run, train
from undertow.lab.training.build import build
from undertow.lab.training.data import training_set
from undertow.lab.training.trainer import RecipeTrainer

IDS = torch.tensor([[3, 4, 4, 5, 3, 1, 4, 4]])


@pytest.mark.parametrize(
    "recurrence",
    [tiny.TURBOCONN, tiny.T2MLR, {"kind": "soft-token"}, None],
    ids=["turboconn", "t2mlr", "soft-token", "plain"],
)
def test_a_run_makes_its_folder(
    recurrence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: dict[str, Any] = {}

    def keep(self: Any, **settings: Any) -> Any:
        trained["model"] = self.model
        return evaluate(self, **settings)

    evaluate = RecipeTrainer.evaluate
    monkeypatch.setattr(RecipeTrainer, "evaluate", keep)
    recipe = tiny.recipe(tmp_path, recurrence=recurrence, training={"evaluate_every": 3})
    folder = train(recipe, seed=7)
    assert folder == Run.of(recipe, 7).folder == tmp_path / "tiny" / "seed-7"
    assert sorted(path.name for path in folder.iterdir()) == [
        "log.jsonl",
        "model",
        "recipe.yaml",
        "versions.json",
    ]

    assert load_recipe(folder / "recipe.yaml", []) == recipe
    versions = json.loads((folder / "versions.json").read_text())
    assert (
        versions["torch"] == torch.__version__
        and versions["transformers"] == transformers.__version__
    )
    assert versions["command"] and versions["python"]

    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert (
        entries[0]["event"] == "start"
        and entries[0]["seed"] == 7
        and entries[0]["examples_left_out"] == 0
    )
    assert entries[0]["parameters"] == sum(p.numel() for p in trained["model"].parameters())
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5, 6]
    for entry in steps:
        assert entry["loss"] > 0 and entry["grad_norm"] > 0 and entry["seconds_per_step"] > 0
    assert [entry["learning_rate"] for entry in steps] == pytest.approx(
        [0, 5e-3, 1e-2, 1e-2, 1e-2, 1e-2]
    )
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [3, 6]

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        expected = trained["model"].eval()(input_ids=IDS).logits
        # Copied, because loaded weights lie in memory as they do in the file, which can change how
        # sums are rounded.
        assert torch.equal(copy.deepcopy(model)(input_ids=IDS).logits, expected)
        start, _ = build(recipe, seed=7)
        assert not torch.allclose(start.eval()(input_ids=IDS).logits, expected, atol=1e-3), (
            "nothing was learnt"
        )
    assert model.config.use_cache
    assert AutoTokenizer.from_pretrained(folder / "model")("01=").input_ids == [3, 4, 5]
    if recurrence is not None:
        assert find_attachment(model).settings == recipe.recurrence


@pytest.mark.parametrize(("every", "steps"), [(None, [6]), (2, [2, 4, 6]), (4, [4, 6])])
def test_the_last_step_is_evaluated_once(
    every: int | None, steps: list[int], tmp_path: Path
) -> None:
    folder = train(
        tiny.recipe(tmp_path, recurrence=None, training={"evaluate_every": every}), seed=0
    )
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == steps


def test_no_checkpoints_and_no_held_out_loss_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(
        RecipeTrainer, "_save_checkpoint", lambda self, *_: saved.append(self.state.global_step)
    )
    section = {"save_every": None, "evaluate_examples": 0, "evaluate_every": 2}
    folder = train(tiny.recipe(tmp_path, training=section), seed=0)
    assert not saved
    assert not [entry for entry in tiny.read_log(folder / "log.jsonl") if "eval_loss" in entry]
    train(tiny.recipe(tmp_path, name="saving"), seed=0)
    assert saved == [2, 4, 6]


def test_training_settings_reach_the_trainer(tmp_path: Path) -> None:
    section = {
        "accumulate": 3,
        "beta2": 0.9,
        "weight_decay": 0.2,
        "clip": 0.5,
        "schedule": "cosine",
        "log_every": 2,
    }
    arguments = run.arguments(tiny.recipe(tmp_path, training=section), tmp_path, seed=5)
    assert (arguments.max_steps, arguments.per_device_train_batch_size) == (6, 4)
    assert (
        arguments.gradient_accumulation_steps,
        arguments.logging_steps,
        arguments.warmup_steps,
    ) == (3, 2, 2)
    assert (arguments.adam_beta2, arguments.weight_decay, arguments.max_grad_norm) == (
        0.9,
        0.2,
        0.5,
    )
    assert (arguments.learning_rate, arguments.lr_scheduler_type, arguments.seed) == (
        1e-2,
        "cosine",
        5,
    )


def test_examples_are_trained_on_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    step = RecipeTrainer.training_step

    def keep(
        self: Any, model: Any, inputs: dict[str, torch.Tensor], *rest: Any, **settings: Any
    ) -> Any:
        rows = zip(
            inputs["input_ids"].tolist(), inputs["attention_mask"].sum(1).tolist(), strict=True
        )
        seen.extend(row[:length] for row, length in rows)
        return step(self, model, inputs, *rest, **settings)

    monkeypatch.setattr(RecipeTrainer, "training_step", keep)
    recipe = tiny.recipe(tmp_path, training={"accumulate": 2})
    train(recipe, seed=3)
    dataset: Any = training_set(recipe.task, build(recipe, 3)[1], recipe.training, seed=3)[0]
    assert len(seen) == 6 * 4 * 2
    assert seen == [item["input_ids"] for item in dataset]


def optimizer_groups(recipe: Recipe, folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """A recipe's model, and the groups of parameters that its optimiser has."""
    model, _ = build(recipe, seed=0)
    trainer = RecipeTrainer(
        recipe.training, model=model, args=run.arguments(recipe, folder, seed=0)
    )
    return model, trainer.create_optimizer().param_groups


def test_gates_learn_at_a_rate_of_their_own(tmp_path: Path) -> None:
    recipe = tiny.recipe(
        tmp_path, recurrence=tiny.T2MLR, training={"gate_multiplier": 20, "weight_decay": 0.1}
    )
    model, groups = optimizer_groups(recipe, tmp_path)
    gates = [parameter for name, parameter in model.named_parameters() if "gamma_" in name]
    assert len(gates) == 2
    assert [id(parameter) for parameter in groups[-1]["params"]] == [id(gate) for gate in gates]
    assert [group["lr"] for group in groups] == pytest.approx([1e-2, 1e-2, 0.2])
    assert [group["weight_decay"] for group in groups] == [0.1, 0, 0]
    optimised = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(optimised) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"recurrence": tiny.T2MLR},
        {"recurrence": tiny.TURBOCONN, "training": {"gate_multiplier": 20}},
    ],
    ids=["multiplier 1", "no gates"],
)
def test_without_gates_all_learn_at_one_rate(changes: dict[str, Any], tmp_path: Path) -> None:
    model, groups = optimizer_groups(tiny.recipe(tmp_path, **changes), tmp_path)
    assert {group["lr"] for group in groups} == {1e-2}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("recurrence", [tiny.TURBOCONN, None], ids=["turboconn", "plain"])
def test_settings_that_must_not_change_the_result(recurrence: Any, tmp_path: Path) -> None:
    # The same batch in two halves, with activations recomputed.
    section = {"batch": 2, "accumulate": 2, "activation_checkpointing": True}
    plain = {"bucket_by_length": False}
    exact = {"recurrence": recurrence, "solver": "sequential"}
    base = train(tiny.recipe(tmp_path, name="a", **exact, training=plain), seed=0)
    other = train(tiny.recipe(tmp_path, name="b", **exact, training=plain | section), seed=0)
    first, second = (list(tiny.losses(folder).values()) for folder in (base, other))
    assert first == pytest.approx(second, rel=1e-3)


def test_two_runs_are_the_same_and_another_seed_is_not(tmp_path: Path) -> None:
    folders = [
        train(
            tiny.recipe(tmp_path, name=name, recurrence=tiny.TURBOCONN, solver="sequential"), seed
        )
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    first, again, other = (tiny.weights(folder / "model") for folder in folders)
    assert tiny.equal(first, again)
    assert not tiny.equal(first, other)


def test_a_finished_run_is_left_alone_but_for_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(tiny.recipe(tmp_path), seed=0)
    monkeypatch.setattr(run, "build", lambda *_: pytest.fail("a finished run was trained again"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert train(tiny.recipe(tmp_path), seed=0) == folder
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    changed = tiny.recipe(tmp_path, evaluation={"lengths": [7]}, training={"log_every": 3})
    train(changed, seed=0)
    assert load_recipe(folder / "recipe.yaml", []) == changed
    before.pop(folder / "recipe.yaml")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"training": {"steps": 7}}, "training.steps is 6 and not 7"),
        (
            {"task": {"kind": "arithmetic", "template": "bare"}},
            "task.kind is parity and not arithmetic",
        ),
        ({"recurrence": tiny.TURBOCONN | {"lag": 2}}, "recurrence.lag is 1 and not 2"),
        ({"recurrence": tiny.T2MLR}, "recurrence.kind is turboconn and not t2mlr"),
        ({"recurrence": None}, "recurrence.* is .* and not None"),
        ({"model": {"architecture": "qwen3"}}, "model.architecture is llama and not qwen3"),
    ],
)
def test_the_folder_of_another_recipe_is_refused(
    changes: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Run.of(tiny.recipe(tmp_path), 0).folder
    undertow.mapping.save_yaml(
        tiny.recipe(tmp_path, recurrence=tiny.TURBOCONN), folder / "recipe.yaml"
    )
    monkeypatch.setattr(
        run, "build", lambda *_: pytest.fail("it was trained in another recipe's folder")
    )
    with pytest.raises(
        CheckpointError,
        match=f"was made by another recipe, whose {key}; choose another name or remove",
    ):
        train(tiny.recipe(tmp_path, **({"recurrence": tiny.TURBOCONN} | changes)), seed=0)


def test_a_solver_counts_only_where_there_is_something_to_solve(tmp_path: Path) -> None:
    scan = {"kind": "scan", "sweeps": 2, "backward": 1}
    plain, hosted = (
        tiny.recipe(tmp_path),
        tiny.recipe(tmp_path, name="hosted", recurrence=tiny.TURBOCONN),
    )
    for recipe in (plain, hosted):
        undertow.mapping.save_yaml(recipe, Run.of(recipe, 0).folder / "recipe.yaml")
    Run(Run.of(plain, 0).folder).check(tiny.recipe(tmp_path, solver=scan))
    with pytest.raises(CheckpointError, match=r"whose solver\.kind is auto and not scan"):
        Run(Run.of(hosted, 0).folder).check(
            tiny.recipe(tmp_path, name="hosted", recurrence=tiny.TURBOCONN, solver=scan)
        )


def test_what_cannot_be_evaluated_is_found_out_before_training(tmp_path: Path) -> None:
    short = {
        "kind": "parity",
        "template": "bare",
        "max_length": 3,
    }  # of 14 strings none is held out
    with pytest.raises(DataError, match="valid split"):
        train(tiny.recipe(tmp_path, task=short), seed=0)
    assert not Run.of(tiny.recipe(tmp_path), 0).folder.exists(), (
        "a folder with a recipe would refuse the mended recipe"
    )
    train(tiny.recipe(tmp_path, task=short, training={"evaluate_examples": 0}), seed=0)


def test_examples_left_out_are_reported(tmp_path: Path) -> None:
    folder = train(tiny.recipe(tmp_path, training={"max_tokens": 8}), seed=0)
    assert 0 < tiny.read_log(folder / "log.jsonl")[0]["examples_left_out"] < 32


def test_a_model_learns_parity(tmp_path: Path) -> None:
    bits = {"kind": "parity", "template": "bare", "max_length": 6}
    section = {
        "steps": 150,
        "batch": 16,
        "warmup_steps": 20,
        "evaluate_examples": 0,
        "save_every": None,
        "log_every": 10,
    }
    recurrence = tiny.TURBOCONN | {"rank": 16}
    recipe = tiny.recipe(
        tmp_path, task=bits, recurrence=recurrence, solver="sequential", training=section
    )

    def accuracy(model: Any, tokenizer: Any) -> float:
        # Strings of the test split, longer than any trained on.
        results = accuracy_by_length(model, tokenizer, Parity(template="bare"), [7, 8], examples=40)
        return sum(result.correct for result in results) / sum(result.total for result in results)

    before = accuracy(*build(recipe, seed=0))
    folder = train(recipe, seed=0)
    losses = list(tiny.losses(folder).values())
    assert losses[-1] < 0.1 * losses[0]
    after = accuracy(*load(str(folder / "model")))
    assert before < 0.7 < 0.95 <= after


def test_a_file_in_the_model_s_place_is_told_before_the_training(tmp_path: Path) -> None:
    wanted = tiny.recipe(tmp_path)
    folder = run.Run.of(wanted, 0).folder
    folder.mkdir(parents=True)
    (folder / "model").write_text("")
    with pytest.raises(
        CheckpointError,
        match=r"seed-0/model is a file, where the model's folder belongs; move it away",
    ):
        train(wanted, seed=0)
    assert [path.name for path in folder.iterdir()] == ["model"]
    (folder / "model").unlink()
    assert (train(wanted, seed=0) / "model").is_dir(), "the control"
