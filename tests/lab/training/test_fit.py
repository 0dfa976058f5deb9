"""What a model or a machine cannot hold is told before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from undertow.cli.main import main
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.lab.runs.loading import check_model_folder, load
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training import machine
from undertow.lab.training.fit import check_fit
from undertow.lab.training.machine import check_memory, check_order

CHARACTERS = "01="  # and three special tokens


def pretrained(folder: Path, rows: int) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    (
        config.max_position_embeddings,
        config.pad_token_id,
        config.bos_token_id,
        config.eos_token_id,
    ) = 64, 0, None, 1
    LlamaForCausalLM(config).save_pretrained(folder)
    character_tokenizer(CHARACTERS).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("rows", [5, 6])
def test_fewer_embeddings_than_tokens(
    rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one row a token, the negative control, every command goes on."""
    path = pretrained(tmp_path / "m", rows)
    recipe = str(
        tiny.recipe_file(tmp_path, model={"path": path}, training={"steps": 1, "warmup_steps": 0})
    )
    commands: list[list[str]] = [
        ["train", recipe, "--dry-run"],
        ["generate", path, "101=", "--max-new-tokens=1"],
        ["train", recipe],
    ]
    for command in commands:
        code = main(command)
        said = capsys.readouterr().err
        assert code == (0 if rows == 6 else 2)
        assert (
            "has embeddings for 5 tokens, but its tokenizer gives ids up to 5; give the tokenizer"
            in said
        ) == (rows == 5)
    assert (tmp_path / "tiny").exists() == (rows == 6)
    if rows == 5:
        with pytest.raises(CheckpointError, match="resize_token_embeddings"):
            load(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model": {"positions": 9}},
            "a training example of length 8 has 11 tokens, but the model reads 9 at most",
        ),
        (
            {"model": {"positions": 16}, "evaluation": {"lengths": [8, 20]}},
            "evaluation.lengths holds 20, of which an example has 23",
        ),
        (
            {"evaluation": {"examples": 2**40}},
            "evaluation.examples is 1099511627776, and parity is generated without end",
        ),
        ({"training": {"evaluate_examples": 2**40}}, "training.evaluate_examples is 1099511627776"),
    ],
)
def test_what_the_model_does_not_read(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises((DataError, ConfigError)) as caught:
        check_fit(tiny.recipe(tmp_path, **changes))
    assert expected in str(caught.value)
    check_fit(tiny.recipe(tmp_path, model={"positions": 11}))  # negative control: exactly enough


def test_a_test_file_of_long_examples(tmp_path: Path) -> None:
    rows = "".join(f'{{"question": "{"1" * length}", "answer": "#### 2"}}\n' for length in (5, 100))
    (tmp_path / "d.jsonl").write_text(rows)
    tokenizer = tmp_path / "t"
    character_tokenizer("".join(map(chr, range(10, 127)))).save_pretrained(tokenizer)
    task = {"kind": "gsm8k", "train": str(tmp_path / "d.jsonl"), "test": str(tmp_path / "d.jsonl")}
    changes: dict[str, Any] = {"task": task, "evaluation": {"lengths": [], "examples": 2}}
    with pytest.raises(DataError, match="gsm8k test example 1 has"):
        check_fit(
            tiny.recipe(tmp_path, **changes, model={"positions": 100, "tokenizer": str(tokenizer)})
        )
    check_fit(
        tiny.recipe(tmp_path, **changes, model={"positions": 200, "tokenizer": str(tokenizer)})
    )


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, model={"width": 65536, "layers": 100})
    monkeypatch.setattr(machine, "memory", lambda: 2**36)
    with pytest.raises(
        ConfigError,
        match=r"parameters, and its training takes [\d,.]+ GiB for weights and optimiser",
    ):
        check_fit(recipe)
    with pytest.raises(ConfigError, match="make 1,000,000,000 examples, whose order alone takes"):
        check_order(10**9)
    check_order(10**8)
    monkeypatch.setattr(
        machine, "memory", lambda: None
    )  # negative control: a system that does not say
    check_memory(10**15, 10**15)
    check_order(10**15)


def test_this_machine_says_how_much_memory_it_has() -> None:
    found = machine.memory()
    assert found is None or 2**28 < found < 2**50


def test_a_model_folder_is_looked_at_before_it_is_loaded(tmp_path: Path) -> None:
    folder = Path(pretrained(tmp_path / "m", 6))
    check_model_folder(folder)
    config = folder / "config.json"
    text = config.read_text()
    damaged = {
        text.replace(
            '"num_hidden_layers": 2', '"num_hidden_layers": 1000000000'
        ): "num_hidden_layers is 1000000000",
        text[: len(text) // 2]: "config.json, line",
        "[]": r"holds \[\] and no config",
        "[" * 5000: "nested more than 50 deep",
    }
    for content, expected in damaged.items():
        config.write_text(content)
        with pytest.raises(CheckpointError, match=expected):
            load(str(folder))
    config.write_text(text)
    load(str(folder))  # negative control
    (folder / "tokenizer_config.json").write_text('{\n"x": 1,\n}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json, line 3: expected JSON"):
        load(str(folder))
    (folder / "tokenizer.json").unlink()
    Path(folder / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a device, which is not read"):
        load(str(folder))
