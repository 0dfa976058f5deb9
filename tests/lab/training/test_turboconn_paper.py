"""TurboConn's paper in figures: its parameter counts through the shipped recipes, its schedule, its
advice, its epochs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from undertow import TurboConn
from undertow.cli.main import main
from undertow.errors import CheckpointError, ConfigError
from undertow.lab.runs.recipe import TrainingSection, load_recipe
from undertow.lab.tasks import Parity, character_tokenizer
from undertow.lab.training import train
from undertow.lab.training.build import build, count_parameters, outline
from undertow.lab.training.data import training_set
from undertow.lab.training.schedule import cosine_restarts

RECIPES = Path(__file__).parents[3] / "recipes"
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
MODELS: dict[str, PreTrainedConfig] = {
    "llama-3.2-1b": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        tie_word_embeddings=True,
        **LLAMA,
    ),
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        head_dim=128,
        **LLAMA,
    ),
    "qwen3-1.7b": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
}
# Appendix A.6: with TurboConn and LoRA of rank 120, and with LoRA of rank 140 alone.
COUNTS = {
    "llama-3.2-1b": (91_946_760, 98_631_680),
    "llama-3.1-8b": (358_999_320, 367_001_600),
    "qwen3-1.7b": (141_111_768, 152_535_040),
}


def paper_recipe(name: str, folder: Path, *overrides: str) -> Any:
    """A shipped recipe whose base model is a folder with nothing but its `config.json`."""
    MODELS[name].save_pretrained(folder)
    return load_recipe(RECIPES / f"turboconn-{name}.yaml", [f"--model.path={folder}", *overrides])


@pytest.mark.parametrize("name", list(MODELS))
def test_the_recipes_train_as_many_parameters_as_the_paper(name: str, tmp_path: Path) -> None:
    model = outline(paper_recipe(name, tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())
    counts = count_parameters(model)
    assert counts["trainable"] == counts["adapters"] + counts["recurrence"] == COUNTS[name][0]
    baseline = count_parameters(
        outline(paper_recipe(name, tmp_path, "--recurrence=none", "--lora.rank=140"))
    )
    assert baseline["trainable"] == baseline["adapters"] == COUNTS[name][1]
    assert (
        baseline["parameters"] - baseline["adapters"] == counts["parameters"] - counts["trainable"]
    ), "not one base"
    other = count_parameters(outline(paper_recipe(name, tmp_path, "--recurrence.rank=119")))
    assert other["trainable"] < COUNTS[name][0]


@pytest.mark.parametrize(
    ("name", "rate"),
    [("llama-3.2-1b", 1.92e-5), ("llama-3.1-8b", 1.92e-5), ("qwen3-1.7b", 5.12e-6)],
)
def test_the_recipes_train_as_the_paper_says(name: str, rate: float) -> None:
    recipe = load_recipe(RECIPES / f"turboconn-{name}.yaml", [])
    section = recipe.training
    assert (section.learning_rate, section.batch, section.epochs, section.warmup_steps) == (
        rate,
        64,
        3,
        100,
    )
    assert (section.schedule, section.restart_every, section.bucket_by_length) == (
        "cosine_restarts",
        1000,
        True,
    )
    assert section.max_tokens == 168 and section.examples == 384_620 - 44
    assert recipe.recurrence == TurboConn.preset(name, lag=4, alpha=100)
    assert recipe.evaluation.temperature == 1.0


def test_an_outline_has_the_shapes_of_the_model_that_is_built(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, recurrence=tiny.TURBOCONN)
    built, _ = build(recipe, 0)
    drawn = outline(recipe)
    assert {n: p.shape for n, p in drawn.named_parameters()} == {
        n: p.shape for n, p in built.named_parameters()
    }
    assert count_parameters(drawn) == count_parameters(built)
    assert count_parameters(built)["recurrence"] == 2 * 8 * 16 + 8 + 16


def test_parameters_are_counted_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny.recipe_file(tmp_path, recurrence=tiny.TURBOCONN))
    assert main(["inspect", "parameters", path, "--recurrence.rank=4"]) == 0
    assert f"| recurrence | {2 * 4 * 16 + 4 + 16} |" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", "parameters", path, f"--model={{path: {tmp_path}}}"]) == 2
    assert f"{tmp_path} is no checkpoint: it has no config.json" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        outline(tiny.recipe(tmp_path, model={"path": str(tmp_path)}))


# The schedule


def test_cosine_restarts() -> None:
    rates = [cosine_restarts(step, 100, 1000) for step in range(3000)]
    assert rates[:1000] == rates[1000:2000] == rates[2000:]
    assert rates[0] == 0 and rates[50] == 0.5 and rates[100] == 1 == max(rates)
    assert rates[550] == pytest.approx(0.5) and rates[325] == pytest.approx(
        0.5 + math.sqrt(0.5) / 2
    )
    assert 0 < rates[999] < 1e-5


def test_a_run_follows_the_schedule_and_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {
        "steps": 9,
        "schedule": "cosine_restarts",
        "restart_every": 4,
        "warmup_steps": 1,
        "save_every": 5,
    }
    recipe = tiny.recipe(tmp_path, training=training)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        tiny.interrupt(patch, 7)
        train(recipe, 0)
    folder = train(recipe, 0)
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    rates = [entry["learning_rate"] for entry in entries if "loss" in entry]
    assert rates == pytest.approx([1e-2 * share for share in 2 * [0, 1, 0.75, 0.25]] + [0])


def test_a_restart_within_the_warm_up_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="restart_every is 100, but the warm-up takes 100 steps; make it longer"
    ):
        TrainingSection(schedule="cosine_restarts", restart_every=100)
    TrainingSection(restart_every=100)  # another schedule does not look at it


# Epochs


def test_epochs_pass_over_the_same_examples() -> None:
    tokenizer = character_tokenizer("01=")
    task = Parity(template="bare", min_length=12, max_length=16)
    section = TrainingSection(epochs=3, examples=50, batch=8, accumulate=2, bucket_by_length=False)
    dataset, _ = training_set(task, tokenizer, section, seed=0)
    assert len(dataset) == 10 * 16, "the last step takes what it lacks from the next pass"
    passes = [sorted(dataset.indices[i : i + 50]) for i in (0, 50, 100)]
    assert passes == [list(range(50))] * 3
    assert list(dataset.indices[:50]) != list(dataset.indices[50:100])
    with pytest.raises(
        ConfigError, match=r"parity is generated without end; set training\.examples as well"
    ):
        training_set(task, tokenizer, TrainingSection(epochs=3), seed=0)


def test_a_run_of_epochs_takes_their_steps(tmp_path: Path) -> None:
    folder = train(
        tiny.recipe(
            tmp_path, training={"steps": 1, "epochs": 2, "examples": 10, "save_every": None}
        ),
        0,
    )
    assert list(tiny.losses(folder)) == [1, 2, 3, 4, 5]


# Advice


@pytest.mark.parametrize(
    ("lag", "alpha", "rate", "scratch", "pretrained"),
    [
        (4, 100, 1.92e-5, None, None),
        (6, 100, 1.92e-5, None, None),
        (8, 100, 1.92e-5, "fell to chance", "fell to chance"),
        (16, 100, 1.92e-5, "fell to chance", "fell to chance"),
        (16, 1, 1.92e-5, None, None),
        (4, 1, 1.92e-5, None, "gained more"),
        (1, 1, 1.92e-5, None, "gained more"),
        (1, 1, 1e-3, None, None),
        (1, 10, 1e-3, None, None),
        (4, 100, 1e-3, "use an alpha of 10 or less", "use an alpha of 10 or less"),
        (4, 100, 5e-4, "is a product above 0.02", "use an alpha of 20 or less"),
    ],
)
def test_advice(
    lag: int, alpha: float, rate: float, scratch: str | None, pretrained: str | None
) -> None:
    recurrence = TurboConn(((1, 0),), lag=lag, alpha=alpha)
    for expected, given in ((scratch, False), (pretrained, True)):
        advice = recurrence.advice(given, rate)
        assert advice is None if expected is None else advice is not None and expected in advice


def test_advice_and_what_is_left_out_are_printed_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    recurrence = tiny.TURBOCONN | {"lag": 8, "alpha": 100.0}
    training = {"steps": 2, "warmup_steps": 0, "max_tokens": 7, "save_every": None, "examples": 40}
    folder = train(tiny.recipe(tmp_path, recurrence=recurrence, training=training), 0)
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    remarks = [entry["text"] for entry in entries if entry.get("event") == "remark"]
    printed = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("undertow: ")
    ]
    assert printed == [f"undertow: {remark}" for remark in remarks]
    trained, held_out, advice = remarks
    left_out = entries[0]["examples_left_out"]
    counts = [int(text.split()[0]) for text in (trained, held_out)]
    assert left_out == sum(counts) and all(counts)
    assert trained == (
        f"{counts[0]} of 40 training examples are left out: they have more than "
        "training.max_tokens, 7"
    )
    assert held_out.startswith(f"{counts[1]} of 8 held-out examples")
    assert advice.startswith("lag 8 with alpha 100 goes against TurboConn's paper")
