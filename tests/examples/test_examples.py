"""The examples run offline, as scripts, and what they save is there."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

EXAMPLES = Path(__file__).parents[2] / "examples"
# By the script, whether it is run with LoRA here, and what it saves.
SCRIPTS = {"sft": True, "dpo": False, "grpo": False, "reward": True}


def test_all_are_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"sums", *SCRIPTS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = SCRIPTS[name]
    words = [f"{name}.py", "--steps=2", f"--output={tmp_path}", *(["--lora"] if lora else [])]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.syspath_prepend(os.fspath(EXAMPLES))
    names = runpy.run_path(os.fspath(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert names["trainer"].state.global_step == 2
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (tmp_path / weights).is_file()
