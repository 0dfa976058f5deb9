"""`import undertow` is cheap, knows all its names, and lets transformers and PEFT load what was
saved, whichever is imported first."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from helpers import PATHWAYS, ROUNDING, difference, hosted, logits, tokens, unhosted
from peft import LoraConfig, get_peft_model
from small_huginn import small

import undertow

IDS = tokens(2, 9) % 61  # of either vocabulary
BARE = """
import sys
import undertow
assert not {"torch", "transformers", "peft", "numpy"} & set(sys.modules)
"""
WITHOUT_FINDER = """
sys.meta_path = [each for each in sys.meta_path if not type(each).__module__.startswith("undertow")]
"""
AUTO = "from transformers import AutoConfig, AutoModelForCausalLM, CONFIG_MAPPING\n"
PEFT = "from peft import AutoPeftModelForCausalLM, PeftModel\n"
SAVE = """
import torch
def save(model, name):
    torch.manual_seed(0)
    with torch.no_grad():
        found = model.eval()(input_ids=torch.load("ids"), use_cache=False).logits
    torch.save(found, name + "-found")
"""
CONFIGS = """
import copy, pickle
for mapping in (copy.deepcopy(CONFIG_MAPPING), pickle.loads(pickle.dumps(CONFIG_MAPPING))):
    assert "undertow" in mapping
assert AutoConfig.for_model("huginn_raven", n_layers_in_coda=3).n_layers_in_coda == 3
assert AutoConfig.from_pretrained("model").recurrence["kind"] == "turboconn"
"""
MODEL = "save(AutoModelForCausalLM.from_pretrained('model'), 'model')\n"
HUGINN = "save(AutoModelForCausalLM.from_pretrained('huginn'), 'huginn')\n"
ADAPTER = """
from transformers import LlamaForCausalLM
save(PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "adapter"), "adapter")
"""
ADAPTER_ALONE = "save(AutoPeftModelForCausalLM.from_pretrained('adapter'), 'adapter')"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Models of each kind that are saved, by the name of their folder."""
    folder = tmp_path_factory.mktemp("models")
    unhosted("llama").save_pretrained(folder / "base")
    base = type(unhosted("llama")).from_pretrained(folder / "base")
    undertow.attach(base, PATHWAYS["turboconn-1"])
    settings = LoraConfig(
        target_modules=["q_proj"], modules_to_save=["recurrence"], task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(base, settings).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    found = {"model": hosted("llama", "turboconn-3"), "huginn": small().eval(), "adapter": adapted}
    for name, model in found.items():
        model.save_pretrained(folder / name)
    # What a later PEFT may add, which PEFT passes over.
    config = folder / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace("{", '{"a_setting_to_come": 1,', 1))
    torch.save(IDS, folder / "ids")
    return {"folder": folder, **found}


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    environment = tiny.environment()
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def check(name: str, models: dict[str, Any]) -> None:
    found = torch.load(models["folder"] / f"{name}-found")
    torch.manual_seed(0)  # of which Huginn draws its first state
    assert difference(found, logits(models[name], IDS)) < ROUNDING


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (BARE + AUTO + SAVE + MODEL + HUGINN, ["model", "huginn"]),
        (AUTO + BARE.partition("assert")[0] + SAVE + CONFIGS + MODEL, ["model"]),
        (BARE + PEFT + SAVE + ADAPTER, ["adapter"]),
        (PEFT + BARE.partition("assert")[0] + SAVE + ADAPTER_ALONE, ["adapter"]),
    ],
    ids=["undertow first", "transformers first", "undertow before peft", "peft first"],
)
def test_a_bare_import_loads_what_was_saved(
    program: str, names: list[str], models: dict[str, Any]
) -> None:
    done = run(program, models["folder"])
    assert done.returncode == 0, done.stderr
    for name in names:
        check(name, models)


def test_control_without_the_finder_nothing_is_entered(models: dict[str, Any]) -> None:
    done = run(BARE + WITHOUT_FINDER + AUTO + SAVE + MODEL, models["folder"])
    assert done.returncode == 1 and "model type `undertow`" in done.stderr


def test_each_public_name_resolves() -> None:
    for name in undertow.__all__:
        assert getattr(undertow, name) is not None
        assert name in dir(undertow)
    for room in ("depth", "errors", "host", "models", "pathways", "solvers"):
        assert getattr(undertow, room) is importlib.import_module(f"undertow.{room}")
    with pytest.raises(AttributeError, match="module 'undertow' has no attribute 'attahc'"):
        undertow.attahc  # noqa: B018


def test_type_checkers_read_the_same_names() -> None:
    tree = ast.parse(Path(undertow.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    read = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted(read) == sorted(undertow.__all__) == sorted(undertow._HOMES)
    for name, module in read.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(undertow, name)
