"""The page "Write your own" runs as it stands: its files, its Python, its recipe and its commands,
with fewer steps."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from helpers import randomize, tokens, unhosted

import undertow
from undertow.cli.main import main
from undertow.lab.runs.run import Run

PAGE = (Path(__file__).parents[2] / "docs" / "write-your-own.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
FILES = {
    match[1]: block
    for block in [*PYTHON, *re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)]
    if (match := re.match(r"# (\S+)\n", block))
}
COMMANDS = [
    line
    for block in re.findall(r"```\n(undertow .*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]
SMALL = ["--training.steps=3", "--training.batch=8", "--training.evaluate_examples=4"]
SMALL += ["--training.save_every=null", "--evaluation.examples=4"]
BENCH = ["--width=16", "--head_width=8", "--vocabulary=50", "--tokens=16", "--batch=1"]
BENCH += ["--prompt=32", "--generated=4", "--rounds=1", "--threads=1", "--measures=[decode]"]
# In a process of its own that imports what the page says to import.
LOADS = """
import torch, undertow
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained("out")
except undertow.CheckpointError as error:
    print(error)
import my_pathway
model = AutoModelForCausalLM.from_pretrained("out")
torch.save(model(torch.load("ids")).logits, "logits")
"""


@pytest.fixture
def folder(tmp_path: Path, own_kinds: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the page's files; their modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_the_pathway_is_short() -> None:
    assert list(FILES) == ["my_pathway.py", "my_solver.py", "my_task.py", "my_rule.py", "mine.yaml"]
    assert len(FILES["my_pathway.py"].splitlines()) <= 60


def test_the_python_runs_and_a_fresh_process_loads_what_it_saved(folder: Path) -> None:
    names: dict[str, Any] = {}
    for block in PYTHON:
        if block not in FILES.values():
            exec(block, names)
    model, ids = names["model"], names["ids"]
    model.save_pretrained("out")
    torch.save(ids, "ids")
    command = [sys.executable, "-c", LOADS]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment())
    assert done.returncode == 0, done.stderr
    assert "kind 'leaky', whose class Leaky is not known here; import my_pathway" in done.stdout
    undertow.set_solver(model, undertow.Auto())
    with torch.no_grad():
        assert torch.allclose(torch.load("logits"), model(ids).logits, atol=1e-4)


@pytest.mark.parametrize("pathway", ["leaky", "t2mlr", "turboconn"])
def test_the_solver_run_to_its_end_equals_the_rollout(pathway: str, folder: Path) -> None:
    from my_pathway import Leaky  # type: ignore[import-not-found]
    from my_solver import Picard  # type: ignore[import-not-found]

    recurrences = {
        "leaky": Leaky(2, 1),
        "t2mlr": undertow.T2MLR(1, 2),
        "turboconn": undertow.TurboConn(((3, 0),), lag=3, alpha=0.5, rank=6),
    }
    model = randomize(undertow.attach(unhosted("llama"), recurrences[pathway]))
    ids = tokens(2, 11)

    def run(solver: undertow.Solver) -> torch.Tensor:
        undertow.set_solver(model, solver)
        output = model(ids, labels=ids)
        output.loss.backward()  # there is a gradient
        return output.logits.detach()

    exact = run(undertow.Sequential())
    assert torch.allclose(run(Picard(11)), exact, atol=1e-4)
    few = run(Picard(1))
    prefix = undertow.report(model).exact_prefix
    assert prefix == 2 * model.model.recurrence.pathway.lag
    assert torch.allclose(few[:, :prefix], exact[:, :prefix], atol=1e-4)
    assert not torch.allclose(few, exact, atol=1e-4), "the control"


def test_the_commands_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = []
    for line in COMMANDS:
        program, command, *arguments = shlex.split(line)
        assert program == "undertow"
        small = {"train": SMALL, "bench": BENCH}.get(command, [])
        assert main([command, *arguments, *small]) == 0, line
        ran.append(command)
        told = capsys.readouterr().out
        if line.startswith("undertow inspect depth"):
            assert "still" in told
    assert ran == ["train", "inspect", "generate", "train", "train", "inspect", "eval", "bench"]
    recipe = Run("runs/mine/seed-0").recipe()
    assert recipe.recurrence.kind == "leaky" and recipe.solver.kind == "picard"
    names = ["my_pathway.py", "my_solver.py", "my_task.py"]
    assert recipe.plugins == tuple(str(folder / name) for name in names)
