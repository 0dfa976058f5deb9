"""A recurrence in a PEFT adapter: one folder that PEFT's own classes load on a fresh base model,
alone or beside others."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from helpers import CHANGED, PATHWAYS, ROUNDING, difference, generate, logits, tokens, unhosted
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import undertow
from undertow.errors import CheckpointError
from undertow.host.adapters import RecurrentLoraConfig
from undertow.host.attachment import find_attachment
from undertow.lab.evaluation.run import continue_prompt, evaluate
from undertow.lab.runs.loading import load
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training import train
from undertow.lab.training.from_scratch import from_scratch

IDS = tokens(2, 9)
CARRIED = {
    "turboconn": PATHWAYS["turboconn-3"],
    "t2mlr": PATHWAYS["t2mlr-middle"],
    "soft-token": undertow.SoftToken(0.3),
}


def moved(model: Any, seed: int) -> Any:
    """The model with everything that is trained shaken, as by a training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def fresh(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


def lora(recurrence: bool, rank: int = 4) -> LoraConfig:
    saved = ["recurrence"] if recurrence else None
    return LoraConfig(
        r=rank, target_modules=["q_proj", "v_proj"], modules_to_save=saved, task_type="CAUSAL_LM"
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    unhosted("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(CARRIED))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def adapter(
    base: Path, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A trained adapter's folder, its model's logits, and tokens that it generates."""
    folder = tmp_path_factory.mktemp(kind)
    model = moved(get_peft_model(undertow.attach(fresh(base), CARRIED[kind]), lora(True)), seed=5)
    model.save_pretrained(folder)
    return folder, logits(model, IDS), generate(model, IDS)


@pytest.fixture(scope="module")
def other(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """An adapter without a recurrence, and its model's logits."""
    folder = tmp_path_factory.mktemp("other")
    model = moved(get_peft_model(fresh(base), lora(False, rank=2)), seed=6)
    model.save_pretrained(folder)
    return folder, logits(model, IDS)


# Loading


def test_the_folder_says_what_it_holds(adapter: Any, kind: str, base: Path) -> None:
    folder, _, _ = adapter
    assert {path.name for path in folder.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    written = json.loads((folder / "adapter_config.json").read_text())
    assert written["peft_type"] == "UNDERTOW" and written["base_model_name_or_path"] == str(base)
    assert written["recurrence"]["kind"] == kind
    config = PeftConfig.from_pretrained(folder)
    assert isinstance(config, RecurrentLoraConfig) and config.peft_type == "LORA"


@pytest.mark.parametrize("way", ["PeftModel", "AutoPeftModel", "AutoModel", "load_adapter"])
def test_it_loads_on_a_fresh_base_model(adapter: Any, kind: str, base: Path, way: str) -> None:
    folder, want, generated = adapter
    plain = logits(fresh(base), IDS)
    assert difference(want, plain) > CHANGED
    if way == "PeftModel":
        model = PeftModel.from_pretrained(fresh(base), folder)
    elif way == "AutoPeftModel":
        model = AutoPeftModelForCausalLM.from_pretrained(folder)
    elif way == "AutoModel":
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        model = fresh(base)
        model.load_adapter(str(folder))
    assert difference(logits(model, IDS), want) < ROUNDING
    assert torch.equal(generate(model, IDS), generated)
    assert find_attachment(model).settings == CARRIED[kind]


def test_it_loads_where_the_same_recurrence_is_attached(
    adapter: Any, kind: str, base: Path
) -> None:
    folder, want, _ = adapter
    model = PeftModel.from_pretrained(undertow.attach(fresh(base), CARRIED[kind]), folder)
    assert difference(logits(model, IDS), want) < ROUNDING


def test_it_trains_on_and_saves_again(adapter: Any, base: Path, tmp_path: Path) -> None:
    folder, want, _ = adapter
    model = PeftModel.from_pretrained(fresh(base), folder, is_trainable=True)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)
    model.save_pretrained(tmp_path)
    before, after = (load_file(at / "adapter_model.safetensors") for at in (folder, tmp_path))
    assert tiny.equal(before, after)
    assert (
        difference(logits(PeftModel.from_pretrained(fresh(base), tmp_path), IDS), want) < ROUNDING
    )


def test_without_undertow_it_is_refused_by_name(adapter: Any, base: Path) -> None:
    code = f"""
from transformers import AutoModelForCausalLM
from peft import PeftModel
PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(base)!r}), {str(adapter[0])!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=tiny.environment()
    )
    assert done.returncode != 0 and "UNDERTOW" in done.stderr.splitlines()[-1]


# Merging, and other adapters


def test_merging_keeps_the_recurrence(adapter: Any, kind: str, base: Path, tmp_path: Path) -> None:
    folder, want, _ = adapter
    merged = PeftModel.from_pretrained(fresh(base), folder).merge_and_unload()
    assert difference(logits(merged, IDS), want) < 1e-4
    assert not any("lora" in name or "modules_to_save" in name for name in merged.state_dict())
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert find_attachment(again).settings == CARRIED[kind]
    assert difference(logits(again, IDS), logits(merged, IDS)) < ROUNDING
    undertow.detach(merged)
    assert difference(logits(merged, IDS), want) > CHANGED, "the recurrence did nothing"


@pytest.mark.parametrize("first", ["this", "other"])
def test_it_stands_beside_another_adapter(adapter: Any, other: Any, base: Path, first: str) -> None:
    plain = logits(fresh(base), IDS)
    folders = {"this": adapter[0], "other": other[0]}
    second = "other" if first == "this" else "this"
    model = PeftModel.from_pretrained(fresh(base), folders[first], adapter_name=first)
    model.load_adapter(str(folders[second]), adapter_name=second)
    for _ in range(2):
        for name, want in (("this", adapter[1]), ("other", other[1])):
            model.set_adapter(name)
            assert difference(logits(model, IDS), want) < ROUNDING, name
        with model.disable_adapter():
            assert torch.equal(logits(model, IDS), plain)
    model.set_adapter("this")
    model.delete_adapter("other")
    assert difference(logits(model, IDS), adapter[1]) < ROUNDING


def test_the_recurrence_rests_while_its_adapter_does(adapter: Any, base: Path) -> None:
    model = PeftModel.from_pretrained(fresh(base), adapter[0])
    report = undertow.report
    with model.disable_adapter():
        logits(model, IDS)
        generate(model, IDS)
        model(input_ids=IDS, recurrent_mask=torch.ones_like(IDS))
        assert report(model) is None, "a rollout ran where nothing is carried"
    logits(model, IDS)
    assert report(model) is not None


def test_once_merged_the_recurrence_is_the_models_own(adapter: Any, base: Path) -> None:
    merged = PeftModel.from_pretrained(fresh(base), adapter[0]).merge_and_unload()
    again = moved(get_peft_model(merged, lora(True)), seed=7)
    assert difference(logits(again, IDS), adapter[1]) > CHANGED
    with again.disable_adapter():
        assert difference(logits(again, IDS), adapter[1]) < 1e-4


def test_an_adapter_of_a_hosted_model_may_leave_its_recurrence_alone(
    base: Path, tmp_path: Path
) -> None:
    """It is then recorded all the same, and the adapter loads where the recurrence is."""
    own = moved(undertow.attach(fresh(base), CARRIED["turboconn"]), seed=3)
    own.save_pretrained(tmp_path / "own")
    with pytest.warns(
        UserWarning, match=r'neither trains nor holds .* add modules_to_save=\["recurrence"\]'
    ):
        model = get_peft_model(own, lora(False))
    want = logits(moved(model, seed=4), IDS)
    with model.disable_adapter():
        assert difference(logits(model, IDS), logits(fresh(base), IDS)) > CHANGED, (
            "the recurrence is the model's own"
        )
    model.save_pretrained(tmp_path / "adapter")
    assert not any(
        "recurrence" in name
        for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    )
    loaded = PeftModel.from_pretrained(fresh(tmp_path / "own"), tmp_path / "adapter")
    assert difference(logits(loaded, IDS), want) < ROUNDING
    with pytest.raises(
        CheckpointError,
        match="a recurrence, whose weights it does not hold, and this model has none",
    ):
        PeftModel.from_pretrained(fresh(base), tmp_path / "adapter")


# What does not fit


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"hidden_size": 64},
            "of 4 layers of width 32, but this model is a llama model of 4 layers of width 64",
        ),
        (
            {"num_hidden_layers": 5},
            "of 4 layers of width 32, but this model is a llama model of 5 layers of width 32",
        ),
        (
            {"model_type": "mistral"},
            "belongs to a llama model of 4 layers of width 32, but this model is a mistral model",
        ),
    ],
)
def test_another_base_model_is_refused(
    adapter: Any, base: Path, changes: dict[str, Any], expected: str
) -> None:
    config = LlamaConfig.from_pretrained(base).to_dict() | changes
    config.pop("head_dim", None)
    config.pop("architectures", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    names = set(model.state_dict())
    with pytest.raises(CheckpointError, match=f"{expected}.*load it on its own base model, {base}"):
        PeftModel.from_pretrained(model, adapter[0])
    assert set(model.state_dict()) == names, "it was changed all the same"


@pytest.mark.parametrize(
    ("recurrence", "expected"),
    [
        (
            undertow.TurboConn(((3, 0),), lag=3, rank=6),
            r"whose connections is \[\[3, 0\], .*, but this model's is \[\[3, 0\]\]",
        ),
        (undertow.T2MLR(1, 2), "whose kind is turboconn, but this model's is t2mlr"),
    ],
)
def test_another_wiring_is_refused(
    base: Path, tmp_path: Path, recurrence: Any, expected: str
) -> None:
    get_peft_model(undertow.attach(fresh(base), CARRIED["turboconn"]), lora(True)).save_pretrained(
        tmp_path
    )
    with pytest.raises(CheckpointError, match=expected):
        PeftModel.from_pretrained(undertow.attach(fresh(base), recurrence), tmp_path)


def test_a_recurrence_that_cannot_be_read_is_refused(base: Path, tmp_path: Path) -> None:
    get_peft_model(undertow.attach(fresh(base), CARRIED["turboconn"]), lora(True)).save_pretrained(
        tmp_path
    )
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"recurrence": {"kind": "turbocon"}}))
    with pytest.raises(
        CheckpointError, match=r"describes no recurrence: .*did you mean 'turboconn'"
    ):
        PeftModel.from_pretrained(fresh(base), tmp_path)


# Runs that save adapters


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same training on a tiny pretrained model, saved merged and as an adapter."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = character_tokenizer("01=")
    torch.manual_seed(1)
    from_scratch(ModelSection(width=16, heads=2, positions=64), tokenizer).save_pretrained(
        folder / "base"
    )
    tokenizer.save_pretrained(folder / "base")
    return {
        save: train(
            tiny.recipe(
                folder,
                name=save,
                model={"path": str(folder / "base")},
                recurrence=tiny.TURBOCONN,
                lora={"rank": 4, "save": save},
            ),
            seed=0,
        )
        for save in ("merged", "adapter")
    }


def test_a_run_leaves_an_adapter_behind(runs: dict[str, Path]) -> None:
    folder = runs["adapter"] / "model"
    names = {path.name for path in folder.iterdir()}
    assert "adapter_config.json" in names and "config.json" not in names
    assert (folder / "adapter_model.safetensors").stat().st_size < (
        runs["merged"] / "model/model.safetensors"
    ).stat().st_size
    ids = torch.tensor([[3, 4, 4, 5, 3, 1, 4, 4]])
    (merged, _), (adapted, _) = (load(str(runs[save] / "model")) for save in ("merged", "adapter"))
    assert difference(logits(merged, ids), logits(adapted, ids)) < 1e-5
    through_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder.parents[2] / "base"), folder
    )
    assert difference(logits(through_peft, ids), logits(adapted, ids)) < 1e-5


def test_such_a_run_is_evaluated_and_continued_as_any(runs: dict[str, Path]) -> None:
    assert (
        evaluate(runs["adapter"], []).partition("\n")[2]
        == evaluate(runs["merged"], []).partition("\n")[2]
    )
    texts = {
        continue_prompt(path, "1011=", 5, 0)
        for run in runs.values()
        for path in (run, run / "model")
    }
    assert len(texts) == 1


def test_an_adapter_that_lacks_weights_or_its_base_is_refused(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(runs["adapter"] / "model", tmp_path / "model"))
    (folder / "manifest.json").unlink()  # which would tell at once
    weights = load_file(folder / "adapter_model.safetensors")
    for kind in (".recurrence.", ".lora_A."):
        gone = next(name for name in weights if kind in name)
        save_file(
            {name: tensor for name, tensor in weights.items() if name != gone},
            folder / "adapter_model.safetensors",
        )
        with pytest.raises(CheckpointError, match=f"lacks weights, {gone} among them"):
            load(str(folder))
    save_file(weights, folder / "adapter_model.safetensors")
    load(str(folder))
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"base_model_name_or_path": "/no/such/base"}))
    with pytest.raises(
        CheckpointError, match=r"the base model of the adapter in .* is missing: there is no folder"
    ):
        load(str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(str(folder))
