"""Folders that earlier versions saved still load, and give what they gave then.

`v0.1` holds what `v0.1/write.py` wrote with the code of commit 6e70a8f: models with each kind of
recurrence and solver, an adapter, finished runs, and a run that was stopped.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import undertow
from undertow.cli.main import main

V01 = Path(__file__).parent / "v0.1"
OUTPUTS = json.loads((V01 / "outputs.json").read_text())
IDS = torch.tensor([[1, 5, 3, 7, 2, 9, 4, 8], [4, 4, 6, 1, 8, 3, 2, 5]])
# The losses of the steps that were still to come when the run was stopped, had it gone on then.
LOSSES = {5: 1.5774562358856201, 6: 1.2478505373001099}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the folders, to work in: recipes and adapters name others by relative paths."""
    shutil.copytree(V01, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def outputs(model):
    """The loss, the size of its gradient ``[1]`` and the ids that are generated."""
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    size = sum(float(p.grad.double().norm() ** 2) for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    given = torch.ones_like(IDS)
    generated = model.generate(IDS, attention_mask=given, max_new_tokens=6, do_sample=False)
    return {"loss": loss.item(), "gradient": size**0.5, "generated": generated.tolist()}


def same(found, wanted):
    return (
        found["generated"] == wanted["generated"]
        and found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        and found["gradient"] == pytest.approx(wanted["gradient"], rel=1e-4)
    )


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "adapter"])
def test_a_model_gives_what_it_gave(name):
    torch.manual_seed(0)  # a looped model draws nothing, but generation may
    model = AutoModelForCausalLM.from_pretrained(V01 / name)
    assert same(outputs(model), OUTPUTS[name])


@pytest.mark.parametrize("name", ["t2mlr", "turboconn"])
def test_what_it_gave_depends_on_its_recurrence_and_its_solver(name):
    model = AutoModelForCausalLM.from_pretrained(V01 / name)
    undertow.set_solver(model, undertow.Sequential())
    assert not same(outputs(model), OUTPUTS[name])
    undertow.detach(model)
    assert not same(outputs(model), OUTPUTS[name])


def test_an_adapter_gives_what_it_gave(folder):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained("base")
    adapted = peft.PeftModel.from_pretrained(model, "adapter", is_trainable=True).eval()
    found, wanted = outputs(adapted), OUTPUTS["adapter"]
    assert found["generated"] == wanted["generated"]
    # In training its sweeps start from a better guess than they did.
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert found["gradient"] == pytest.approx(wanted["gradient"], rel=1e-2)


@pytest.mark.parametrize("name", ["t2mlr", "depth"])
def test_a_finished_run_is_left_alone_and_evaluated(name, folder, capsys):
    model = folder / "runs" / name / "seed-0" / "model" / "model.safetensors"
    before = model.read_bytes()
    assert main(["train", f"recipes/{name}.yaml"]) == 0
    assert model.read_bytes() == before
    assert main(["eval", f"runs/{name}"]) == 0
    assert "| 8      |   greedy |" in capsys.readouterr().out


def test_a_stopped_run_goes_on(folder):
    assert main(["train", "recipes/stopped.yaml"]) == 0
    lines = (folder / "runs/stopped/seed-0/log.jsonl").read_text().splitlines()
    found = {
        entry["step"]: entry["loss"] for line in lines if "loss" in (entry := json.loads(line))
    }
    assert {step: found[step] for step in LOSSES} == pytest.approx(LOSSES, rel=1e-5)
    finished, gone_on = (
        load_file(folder / f"runs/{name}/seed-0/model/model.safetensors")
        for name in ("t2mlr", "stopped")
    )
    assert gone_on.keys() == finished.keys()
