"""Training on packed documents: each is read as it is alone, and a resumed run takes the same
batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import undertow
from undertow.errors import ConfigError
from undertow.lab.evaluation.loss import loss_per_token
from undertow.lab.runs.checkpoints import last_checkpoint
from undertow.lab.runs.log import read_log
from undertow.lab.runs.run import Run
from undertow.lab.tasks import PadCollator
from undertow.lab.training import train
from undertow.lab.training.build import build
from undertow.lab.training.data import check_documents, training_set
from undertow.lab.training.trainer import RecipeTrainer

TEXTS = [f"{i} times {i} is {'about ' * (i % 4)}{i * i}." for i in range(150)]
MODELS: dict[str, dict[str, Any]] = {
    "t2mlr": {"recurrence": tiny.T2MLR, "solver": "sequential"},
    "turboconn": {"recurrence": tiny.TURBOCONN | {"lag": 2}, "solver": "sequential"},
    "plain": {},
    "lstm": {"model": {"architecture": "lstm"}},
    "pauses": {"model": {"pauses": 1}},
}


def recipe(folder: Path, **changes: Any) -> Any:
    """Three windows or so a step, of several documents each; an epoch is longer than the
    training."""
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "  "]))
    task = {"kind": "text", "files": [str(path)], "context": 48, "cache": str(folder / "tokens")}
    training = {"steps": 8, "batch": 3, "save_every": 2, "evaluate_examples": 2} | changes.pop(
        "training", {}
    )
    return tiny.recipe(
        folder / "runs", task=task, training=training, evaluation={"lengths": []}, **changes
    )


def far_from_closed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_equals_its_documents_alone(name: str, tmp_path: Path) -> None:
    made = recipe(tmp_path, **MODELS[name])
    model, tokenizer = build(made, seed=0)
    far_from_closed(model)
    check_documents(model)
    size = made.task.size("test", tokenizer)
    items = [made.task.encode("test", index, tokenizer) for index in (0, size - 1)]
    batch = PadCollator(tokenizer)(items)
    total, count = 0.0, 0
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
        for row, item in enumerate(items):
            begins = [at for at, position in enumerate(item["position_ids"]) if position == 0]
            assert len(begins) > 1
            for start, stop in zip(begins, [*begins[1:], len(item["input_ids"])], strict=True):
                alone = model(
                    input_ids=batch["input_ids"][row : row + 1, start:stop], use_cache=False
                ).logits[0]
                assert torch.allclose(logits[row, start:stop], alone, atol=1e-4, rtol=1e-4)
                labels = batch["input_ids"][row, start + 1 : stop]
                total += (
                    float(torch.nn.functional.cross_entropy(alone[:-1], labels, reduction="sum"))
                    if len(labels)
                    else 0
                )
                count += len(labels)
    if size == 2:
        found = loss_per_token(model, tokenizer, made.task)
        assert found.tokens == count and found.loss == pytest.approx(total / count, rel=1e-4)


def test_every_solver_keeps_documents_apart(tmp_path: Path) -> None:
    model, _ = build(recipe(tmp_path, recurrence=tiny.T2MLR), seed=0)
    far_from_closed(model)
    for solver in (
        undertow.Jacobi(4, 2),
        undertow.Scan(2, 1),
        undertow.Chunked(3, undertow.Scan(1, 0)),
    ):
        undertow.set_solver(model, prefill=solver)
        check_documents(model)


def test_a_model_that_mixes_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bloom .* packed documents"):
        train(recipe(tmp_path, model={"architecture": "bloom"}), 0)
    assert not list((tmp_path / "runs").rglob("log.jsonl")), "before anything is written"


def test_a_resumed_run_takes_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[dict[str, Any]] = []
    step = RecipeTrainer.training_step

    def noted(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append(
            {name: tensor.clone() for name, tensor in inputs.items()}
            | {"at": self.state.global_step}
        )
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(RecipeTrainer, "training_step", noted)
    folders = [tmp_path / name for name in ("whole", "resumed")]
    for folder in folders:
        folder.mkdir()
    changes: dict[str, Any] = {"recurrence": tiny.T2MLR, "solver": {"kind": "scan"}}
    whole = recipe(folders[0], **changes)
    first = train(whole, 0)
    expected = list(taken)
    taken.clear()
    assert [batch["at"] for batch in expected] == list(range(8))
    assert all("attention_mask" not in batch and "position_ids" in batch for batch in expected)
    size = whole.task.size("train", build(whole, 0)[1])
    assert size > 8 * 3, "the epoch ends before the run"

    wanted = recipe(folders[1], **changes)
    with monkeypatch.context() as patch:
        tiny.interrupt(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            train(wanted, 0)
    assert last_checkpoint(Run.of(wanted, 0).folder).name == "checkpoint-4"  # type: ignore[union-attr]
    taken.clear()
    second = train(wanted, 0)
    assert [batch["at"] for batch in taken] == [4, 5, 6, 7]
    for got, want in zip(taken, expected[4:], strict=True):
        assert all(
            torch.equal(got[name], want[name]) for name in ("input_ids", "labels", "position_ids")
        )
    assert not torch.equal(expected[0]["input_ids"], expected[4]["input_ids"])
    assert tiny.equal(tiny.weights(first / "model"), tiny.weights(second / "model"))
    told = [line["text"] for line in read_log(first / "log.jsonl") if line.get("event") == "remark"]
    assert any("1 rows of the" in text and "there is no text in them" in text for text in told)


def test_windows_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    _, tokenizer = build(made, seed=0)
    orders = [
        list(training_set(made.task, tokenizer, made.training, seed)[0].indices)
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2] and orders[0] != sorted(orders[0])
