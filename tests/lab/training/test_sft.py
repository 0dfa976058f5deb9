"""Chat data: through TRL's SFTTrainer as the how-to page says, and through a recipe; the gates
move, at their own rate."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import undertow
from undertow.cli.main import main
from undertow.host.attachment import find_pathway
from undertow.lab.runs.loading import load
from undertow.lab.runs.log import read_log
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training import train

PAGE = (Path(__file__).parents[3] / "docs" / "how-to-retrofit.md").read_text(encoding="utf-8")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ROWS = [
    {"problem": f"What is {i} + 1?", "generated_solution": f"It is {i + 1}."} for i in range(40)
]
SMALL = (
    'SFTConfig(output_dir="out", max_length=4096, learning_rate=2e-3, max_steps=3, '
    'per_device_train_batch_size=2, report_to="none", bf16=False, use_cpu=True)'
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny chat model of as many layers as the page's."""
    folder = tmp_path / "base"
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    settings = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 20,
        "num_attention_heads": 2,
    }
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **settings, **ends)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def block(base: Path, rows: Path, lora: bool) -> str:
    """The page's fourth block on a tiny model and a local file."""
    (found,) = [
        each
        for each in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
        if "SFTTrainer" in each
    ]
    data = f'load_dataset("json", data_files={str(rows)!r}, split="train")'
    for old, new in (
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", str(base)),
        ('load_dataset("nvidia/OpenMathReasoning", split="cot")', data),
        ('SFTConfig(output_dir="out", max_length=4096, learning_rate=2e-5)', SMALL),
        ("    # peft_config", "    peft_config" if lora else "    # peft_config"),
    ):
        assert old in found, old
        found = found.replace(old, new)
    return "from peft import LoraConfig\n" + found


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_page_trains_with_trl(
    lora: bool, base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    names: dict[str, Any] = {}
    exec(block(base, rows, lora), names)
    trainer = names["trainer"]
    pathway = find_pathway(trainer.model)
    gates = [pathway.gamma_recurrent, pathway.gamma_current]
    for gate in gates:
        assert gate.dtype == torch.float32 and float(gate.detach()) != 0, "it has not moved"
    *others, own = trainer.optimizer.param_groups
    assert {id(p) for p in own["params"]} == {id(gate) for gate in gates}
    assert (
        own["initial_lr"] == pytest.approx(100 * others[0]["initial_lr"])
        and own["weight_decay"] == 0
    )
    assert not {id(p) for group in others for p in group["params"]} & {id(gate) for gate in gates}

    # The loss is the answer's alone.
    batch = trainer.data_collator([trainer.train_dataset[0]])
    known = [int(token) for token in batch["labels"][0] if token != -100]
    assert (
        names["trainer"].processing_class.decode(known) == ROWS[0]["generated_solution"] + "<eos>"
    )

    ids = torch.arange(10)[None]
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
        again = load("out/final")[0] if lora else AutoModelForCausalLM.from_pretrained("out/final")
        assert torch.allclose(again.eval()(ids).logits, expected, atol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(base)
        assert not torch.allclose(plain(ids).logits, expected, atol=1e-3), (
            "the control: it was trained"
        )


def test_gates_stay_in_fp32_in_a_model_in_bf16(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16")
    pathway: Any = find_pathway(undertow.attach(model, undertow.T2MLR.from_paper(5, 18)))
    assert pathway.project.weight.dtype == torch.bfloat16
    assert pathway.gamma_recurrent.dtype == pathway.gamma_current.dtype == torch.float32


@pytest.mark.parametrize("lora", [None, {"rank": 2, "save": "adapter"}], ids=["full", "lora"])
def test_a_recipe_trains_on_chat_data(lora: Any, base: Path, rows: Path, tmp_path: Path) -> None:
    long = {"problem": "x" * 400, "generated_solution": "y"}
    rows.write_text(rows.read_text() + "\n" + json.dumps(long))
    recipe = tiny.recipe(
        tmp_path / "runs",
        task={"kind": "chat", "train": str(rows)},
        model={"path": str(base)},
        recurrence={"kind": "t2mlr", "from_paper": [5, 18]},
        solver={"kind": "scan"},
        lora=lora,
        training={
            "steps": 2,
            "epochs": 1,
            "batch": 8,
            "max_tokens": 200,
            "gate_multiplier": 50,
            "save_every": None,
        },
        evaluation={"lengths": []},
    )
    folder = train(recipe, 0)
    log = read_log(folder / "log.jsonl")
    assert any(
        re.match(r"1 of \d+ training examples are left out", line.get("text", "")) for line in log
    )
    lines = [line for line in log if "loss" in line]
    assert lines[-1]["gate_recurrent"] != 0 and lines[-1]["step"] == len(lines) >= 4
    model, _ = load(str(folder / "model"))
    assert float(find_pathway(model).gamma_recurrent.detach()) != 0  # type: ignore[union-attr, operator]


def test_the_recipe_says_what_it_would_cost(base: Path, rows: Path, capsys: Any) -> None:
    path = Path(__file__).parents[3] / "recipes" / "smollm2-1.7b-t2mlr-openmath.yaml"
    given = [
        f"--model.path={base}",
        "--recurrence.from_paper=[5,18]",
        "--task.hub=null",
        f"--task.train={rows}",
    ]
    assert main(["train", str(path), "--dry-run", *given]) == 2
    assert "max_tokens is 4096, but the model reads 2048 tokens at most" in capsys.readouterr().err
    given.append("--training.max_tokens=2048")
    assert main(["train", str(path), "--dry-run", *given]) == 0
    assert "T2MLR" not in capsys.readouterr().err
    rows.write_text(rows.read_text() + '\n{"messages": [{"role": "user", "content": "?"}]}')
    assert main(["train", str(path), "--dry-run", *given]) == 2
    assert "chats.jsonl, line 41: expected a message of the assistant" in capsys.readouterr().err
