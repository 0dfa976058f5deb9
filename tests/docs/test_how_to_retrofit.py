"""The how-to page runs as it stands, on a tiny model in the place of the one that it names."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import undertow
from undertow.cli.main import main
from undertow.lab.tasks import character_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to-retrofit.md").read_text(encoding="utf-8")
NAMED = "HuggingFaceTB/SmolLM2-1.7B-Instruct"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model of as many layers as the one that the page names."""
    folder = tmp_path / "base"
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=24,
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_python_blocks_run(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert (
        len(blocks) == 5 and NAMED in blocks[0]
    )  # the last stands in tests/lab/training/test_sft.py
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(blocks[0].replace(NAMED, str(base)), names)
    model, ids = names["model"], torch.arange(20).reshape(2, 10)
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        assert torch.allclose(model.eval()(ids).logits, plain(ids).logits, atol=1e-5)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    with torch.no_grad():
        trained = model.eval()(ids).logits
        exec(blocks[1], names)
        exec(blocks[2], names)
        assert (trained - plain(ids).logits).abs().max() > 1e-2
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(again(ids).logits, trained, atol=1e-3)
        prompts = torch.cat([ids[:1].expand(2, -1), ids + 20], dim=1)
        names |= {"model": again, "shared": ids[:1], "prompts": prompts, "mask": prompts > -1}
        names["mask"] = names["mask"].long()
        exec(blocks[3].replace("mask=mask,", "mask=mask, max_new_tokens=3,"), names)
        assert names["cache"].get_seq_length() == 22
    assert undertow.report(again) is not None


def test_the_recipe_commands_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    problems = [
        {"question": f"1 + {i}?", "steps": [f"1 + {i}"], "answer": str(i + 1)} for i in range(60)
    ]
    for name in ("train", "test", "other"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, problems)))
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "recipes", tmp_path / "recipes")
    (block,) = re.findall(r"((?:    .*\n)+)", PAGE.partition("## With a recipe")[2])[:1]
    commands = block.replace("\\\n", " ").replace("YOUR_MODEL", str(base)).splitlines()
    small = [
        "--training.steps=2",
        "--training.batch=2",
        "--training.save_every=null",
        "--evaluation.examples=2",
    ]
    ran = []
    for command in commands:
        words = re.findall(r"(?:[^\s']+|'[^']*')+", command.partition("#")[0])
        program, *arguments = [word.replace("'", "") for word in words]
        assert program == "undertow"
        changes = [*small, "--training.evaluate_examples=2"] if arguments[0] == "train" else []
        if arguments[:2] == ["inspect", "parameters"]:
            changes = [f"--model.path={base}", "--recurrence=none"]
        assert main([*arguments, *changes]) == 0, command
        ran.append(arguments[0])
    assert ran == ["inspect", "train", "eval"]
    last = capsys.readouterr().out.splitlines()[-1].split("|")
    assert (last[1].strip(), last[4].strip()) == ("all", "60"), (
        "eval --data tests on the whole file"
    )
