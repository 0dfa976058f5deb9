"""A saved model loads as it was, with PEFT or without; what is damaged or incomplete does not pass
in silence."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import (
    ARCHITECTURES,
    CHANGED,
    PATHWAYS,
    ROUNDING,
    difference,
    generate,
    hosted,
    logits,
    randomize,
    recurrent_parameters,
    some,
    tokens,
    unhosted,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import undertow
from undertow import CheckpointError, files
from undertow.pathways.t2mlr import GAMMAS

# The two with parameters, in turn.
TRAINED = [
    (name, ("turboconn-3", "t2mlr-middle")[index % 2]) for index, name in enumerate(ARCHITECTURES)
]
WEIGHTS = "model.safetensors"


def load(folder: Path, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


# --- the whole model


@pytest.mark.parametrize(("name", "pathway"), some())
def test_a_saved_model_loads_as_it_was(name: str, pathway: str, tmp_path: Path) -> None:
    model, ids = hosted(name, pathway), tokens(2, 9)
    model.save_pretrained(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert type(loaded) is type(model)
    assert not loaded.training
    assert difference(logits(loaded, ids), logits(model, ids)) < ROUNDING
    before, after = model.state_dict(), loaded.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(generate(loaded, ids), generate(model, ids))
    loaded.save_pretrained(tmp_path / "again")
    assert (
        load_file(tmp_path / "again" / WEIGHTS).keys()
        == load_file(tmp_path / "saved" / WEIGHTS).keys()
    )
    assert difference(logits(load(tmp_path / "again"), ids), logits(model, ids)) < ROUNDING


def test_a_saved_folder_holds_safetensors_and_a_config_of_its_own(tmp_path: Path) -> None:
    model = hosted("llama", "turboconn-3")
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        WEIGHTS,
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "undertow"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["base"]["model_type"] == "llama"
    assert config["recurrence"]["kind"] == "turboconn"
    assert config["recurrence"]["lag"] == 3
    loaded = load(tmp_path)
    assert loaded.model.recurrence.settings == model.model.recurrence.settings
    assert loaded.generation_config.max_new_tokens == 3
    assert AutoConfig.from_pretrained(tmp_path).model_type == "undertow"


def test_sharded_weights_and_a_given_state_dict(tmp_path: Path) -> None:
    model, ids = hosted("llama", "t2mlr-whole"), tokens(2, 9)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert difference(logits(load(tmp_path / "shards"), ids), logits(model, ids)) < ROUNDING

    halved = {key: value / 2 for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=halved)
    got = load(tmp_path / "given").state_dict()
    assert all(torch.equal(got[key], halved[key]) for key in halved)


def test_saving_over_another_checkpoint_leaves_none_of_its_weights(tmp_path: Path) -> None:
    hosted("llama", "t2mlr-whole").save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "notes.txt").write_text("mine")
    model, ids = hosted("qwen3", "turboconn-1"), tokens(2, 9)
    model.save_pretrained(tmp_path)
    assert difference(logits(load(tmp_path), ids), logits(model, ids)) < ROUNDING
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == [WEIGHTS]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.parent.glob(".*writing"))


@pytest.mark.parametrize(
    ("name", "pathway"),
    [("llama", "t2mlr-whole"), ("gpt2", "turboconn-3"), ("gemma3", "soft-token")],
)
def test_loading_in_half_precision(name: str, pathway: str, tmp_path: Path) -> None:
    model, ids = hosted(name, pathway), tokens(2, 9)
    model.save_pretrained(tmp_path)
    half = load(tmp_path, dtype=torch.bfloat16)
    for key, parameter in recurrent_parameters(half).items():
        assert parameter.dtype == (torch.float32 if "gamma" in key else torch.bfloat16), key
    assert {p.dtype for key, p in half.named_parameters() if "recurrence" not in key} == {
        torch.bfloat16
    }
    for (
        key,
        parameter,
    ) in model.named_parameters():  # not its buffers, which loading leaves as they are
        parameter.data = parameter.data.to(torch.float32 if "gamma" in key else torch.bfloat16)
    before, after = dict(model.named_parameters()), dict(half.named_parameters())
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert difference(logits(half, ids).float(), logits(model, ids).float()) < 0.05

    half.save_pretrained(tmp_path / "half")
    again = load(tmp_path / "half")
    for key, parameter in again.named_parameters():
        assert parameter.dtype == after[key].dtype
        assert torch.equal(parameter, after[key])


@pytest.mark.parametrize(("name", "pathway"), TRAINED)
def test_attaching_to_a_loaded_model_keeps_the_papers_initialisation(
    name: str, pathway: str, tmp_path: Path
) -> None:
    """`from_pretrained` makes up what a checkpoint lacks; the recurrence is not made up."""
    base, ids = unhosted(name), tokens(2, 9)
    base.save_pretrained(tmp_path)
    loaded = undertow.attach(load(tmp_path), PATHWAYS[pathway])
    assert difference(logits(loaded, ids), logits(base, ids)) < 1e-4
    before = {key: p.detach().clone() for key, p in recurrent_parameters(loaded).items()}
    loaded.init_weights()
    after = recurrent_parameters(loaded)
    assert all(torch.equal(after[key], before[key]) for key in before)
    for key, parameter in after.items():
        zero = key.startswith("up.") or "gamma" in key or key == "gates.bias"
        assert bool((parameter == 0).all()) == zero, key


def test_a_fresh_model_from_its_config(tmp_path: Path) -> None:
    """Pretraining from scratch: random base weights, and the recurrence as the paper starts it."""
    hosted("llama", "turboconn-3").save_pretrained(tmp_path)
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert type(fresh) is transformers.LlamaForCausalLM
    assert undertow.report(fresh) is None
    for key, parameter in recurrent_parameters(fresh).items():
        assert bool((parameter == 0).all()) == key.startswith("up."), key


def test_the_loading_info_is_handed_on(tmp_path: Path) -> None:
    hosted("llama", "turboconn-3").save_pretrained(tmp_path)
    model, info = load(tmp_path, output_loading_info=True)
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


class OwnLlama(transformers.LlamaForCausalLM):
    """A class that the library does not know."""


class OwnConfig(transformers.LlamaConfig):
    model_type = "own-llama"


class OwnModel(transformers.LlamaForCausalLM):
    """One with a config of its own, as remote code has."""

    config_class = OwnConfig


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`AutoModelForCausalLM.register`, taken back after the test."""
    mapping = AutoModelForCausalLM._model_mapping
    before = dict(mapping._extra_content)
    yield lambda config, model: AutoModelForCausalLM.register(config, model, exist_ok=True)
    mapping._extra_content.clear()
    mapping._extra_content.update(before)


@pytest.mark.parametrize("own", [OwnLlama, OwnModel])
def test_a_model_class_of_the_users_loads_once_it_is_registered(
    own: Any, registered: Callable[..., None], tmp_path: Path
) -> None:
    AutoConfig.register("own-llama", OwnConfig, exist_ok=True)
    base = unhosted("llama")
    model = own(
        own.config_class(**{k: v for k, v in base.config.to_dict().items() if k != "model_type"})
    )
    with pytest.warns(
        UserWarning,
        match=rf"call AutoModelForCausalLM\.register\({own.config_class.__name__}, {own.__name__}",
    ):
        undertow.attach(model.eval(), PATHWAYS["t2mlr-middle"])
    randomize(model).save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=rf"class {own.__name__} is not known; call AutoModelForCausalLM\.register",
    ):
        load(tmp_path)
    registered(own.config_class, own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(tmp_path)
        undertow.attach(own(own.config_class(**loaded.config.to_dict())), PATHWAYS["t2mlr-middle"])
    assert type(loaded) is own
    assert difference(logits(loaded, tokens(2, 9)), logits(model, tokens(2, 9))) < ROUNDING


# --- PEFT


TARGETS = {
    "gpt2": ["c_attn"],
    "gpt_bigcode": ["c_attn"],
    "falcon": ["query_key_value"],
    "falcon_alibi": ["query_key_value"],
    "bloom": ["query_key_value"],
    "gpt_neox": ["query_key_value"],
    "mpt": ["Wqkv"],
    "deepseek_v2": ["q_b_proj", "o_proj"],
    "deepseek_v3": ["q_b_proj", "o_proj"],
    "nanochat": ["q_proj"],
}


def adapted(model: PreTrainedModel, name: str) -> Any:
    targets = TARGETS.get(name, ["q_proj", "v_proj"])
    transposed = name == "gpt2"
    config = LoraConfig(
        r=4, target_modules=targets, modules_to_save=["recurrence"], fan_in_fan_out=transposed
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize(("name", "pathway"), TRAINED)
def test_a_lora_adapter_carries_the_recurrence(name: str, pathway: str, tmp_path: Path) -> None:
    ids = tokens(2, 9)
    base = undertow.attach(unhosted(name), PATHWAYS[pathway])
    plain = logits(base, ids)
    model = adapted(base, name)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(
                    0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                )
    trained = [key for key, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in key or ".recurrence.modules_to_save." in key for key in trained)
    assert any(".recurrence.modules_to_save." in key for key in trained)

    want = logits(model, ids)
    assert difference(want, plain) > CHANGED
    with model.disable_adapter():
        assert difference(logits(model, ids), plain) < 1e-4
    model.save_pretrained(tmp_path)
    assert any(
        "recurrence.pathway" in key for key in load_file(tmp_path / "adapter_model.safetensors")
    )

    fresh = undertow.attach(unhosted(name), PATHWAYS[pathway])
    loaded = PeftModel.from_pretrained(fresh, tmp_path)
    assert difference(logits(loaded, ids), want) < ROUNDING
    assert torch.equal(generate(loaded, ids), generate(model, ids))


def test_training_through_peft_trains_the_copy_in_use() -> None:
    model = adapted(undertow.attach(unhosted("llama"), PATHWAYS["turboconn-3"]), "llama")
    ids = tokens(2, 9)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if "recurrence" in key}
    for key, gradient in gradients.items():
        assert (gradient is not None) == ("modules_to_save" in key), key
    assert any(bool(g.abs().sum() > 0) for g in gradients.values() if g is not None)


def test_an_adapter_does_not_copy_the_model() -> None:
    """PEFT copies the modules that it saves; the recurrence knows its model, which must not be
    copied along."""
    base = hosted("llama", "t2mlr-whole")
    weights = {id(p) for p in base.parameters()}
    model = adapted(base, "llama")
    copied = model.base_model.model.model.recurrence.modules_to_save["default"]
    assert copied.owners.model is base
    assert {id(p) for p in copied.owners.model.parameters()} >= weights


def test_merging_an_adapter_keeps_the_recurrence(tmp_path: Path) -> None:
    base = hosted("llama", "t2mlr-whole")
    model = adapted(base, "llama")
    randomize(model, seed=6)
    ids = tokens(2, 9)
    want = logits(model, ids)
    merged = model.merge_and_unload()
    assert difference(logits(merged, ids), want) < 1e-4
    merged.save_pretrained(tmp_path)
    assert difference(logits(load(tmp_path), ids), logits(merged, ids)) < ROUNDING


# --- what must not load


def saved(tmp_path: Path, pathway: str = "turboconn-3") -> tuple[PreTrainedModel, Path]:
    model = hosted("llama", pathway)
    model.save_pretrained(tmp_path / "saved")
    return model, tmp_path / "saved"


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_without_undertow_loading_fails(tmp_path: Path) -> None:
    """It must never drop the recurrence in silence."""
    _, folder = saved(tmp_path)
    program = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "try:\n"
        "    AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "except Exception as error:\n"
        "    assert 'undertow' in str(error), error\n"
        "    assert not any(name.split('.')[0] == 'undertow' for name in sys.modules)\n"
        "    sys.exit(7)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 7, run.stderr


@pytest.mark.parametrize("settings", [{}, {"dtype": torch.bfloat16}, {"dtype": "auto"}])
@pytest.mark.parametrize(
    ("name", "pathway"),
    [("llama", "t2mlr-middle"), ("gpt2", "turboconn-3"), ("gemma3", "soft-token")],
)
def test_the_base_models_own_class_does_not_drop_the_recurrence(
    name: str, pathway: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, ids = hosted(name, pathway), tokens(2, 9)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        AttributeError, match="load it with AutoModelForCausalLM after import undertow"
    ):
        type(model).from_pretrained(tmp_path, **settings)
    undertow.detach(model)
    model.save_pretrained(tmp_path / "base")
    loaded = type(model).from_pretrained(tmp_path / "base", **settings)
    assert difference(logits(loaded, ids).float(), logits(model, ids)) < 0.3, (
        "control: the base model alone loads"
    )


def scalar_gammas(path: Path) -> None:
    """Give the γ of saved weights the shape that they had in an earlier version."""
    weights = load_file(path)
    found = [key for key in weights if key.rpartition(".")[2] in GAMMAS]
    assert len(found) == 2
    save_file(
        weights | {key: weights[key].reshape(()) for key in found}, path, metadata={"format": "pt"}
    )


@pytest.mark.parametrize("settings", [{}, {"dtype": torch.bfloat16}])
def test_weights_whose_gammas_are_scalars_load(settings: dict[str, Any], tmp_path: Path) -> None:
    model, folder = saved(tmp_path, "t2mlr-middle")
    want = load(folder, **settings)
    scalar_gammas(folder / WEIGHTS)
    loaded = load(folder, **settings)
    before, after = want.state_dict(), loaded.state_dict()
    assert all(
        torch.equal(after[key], before[key]) and after[key].dtype == before[key].dtype
        for key in before
    )
    assert [list(after[key].shape) for key in after if "gamma" in key] == [[1], [1]]
    assert torch.equal(logits(loaded, tokens(2, 9)), logits(want, tokens(2, 9)))

    fresh = undertow.attach(unhosted("llama"), PATHWAYS["t2mlr-middle"])
    fresh.load_state_dict(load_file(folder / WEIGHTS))
    assert difference(logits(fresh, tokens(2, 9)), logits(model, tokens(2, 9))) < ROUNDING

    edit_config(folder, lambda config: config["base"].update(hidden_size=16))
    with pytest.raises(CheckpointError, match="do not have the shapes"):
        load(folder)


def test_an_adapter_whose_gammas_are_scalars_loads(tmp_path: Path) -> None:
    model, ids = (
        adapted(undertow.attach(unhosted("llama"), PATHWAYS["t2mlr-middle"]), "llama"),
        tokens(2, 9),
    )
    randomize(model, seed=6)
    model.save_pretrained(tmp_path)
    scalar_gammas(tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(unhosted("llama"), tmp_path)
    assert difference(logits(loaded, ids), logits(model, ids)) < ROUNDING


def test_a_folder_of_an_earlier_version_loads(tmp_path: Path) -> None:
    """Its config has the base model's dtype in both places."""
    model, folder = saved(tmp_path)
    edit_config(folder, lambda config: config["base"].update(dtype=config["dtype"]))
    loaded = load(folder)
    assert loaded.config.dtype == torch.float32
    assert difference(logits(loaded, tokens(2, 9)), logits(model, tokens(2, 9))) < ROUNDING


@pytest.mark.parametrize(
    "lacking", ["recurrence", "recurrence.pathway.up.0.bias", "lm_head", "layers.2.mlp"]
)
def test_a_folder_without_some_of_the_weights(lacking: str, tmp_path: Path) -> None:
    """The library alone would make them up, with a warning."""
    _, folder = saved(tmp_path)
    weights = {
        key: value for key, value in load_file(folder / WEIGHTS).items() if lacking not in key
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks [0-9]+ weights"):
        load(folder)


@pytest.mark.parametrize("kept", [0, 5, 2000, 0.5, -1])
def test_truncated_weights(tmp_path: Path, kept: float) -> None:
    _, folder = saved(tmp_path)
    data = (folder / WEIGHTS).read_bytes()
    stop = int(kept * len(data)) if isinstance(kept, float) else int(kept)
    (folder / WEIGHTS).write_bytes(data[:stop])
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, OSError, ValueError)):
        load(tmp_path)
    _, folder = saved(tmp_path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="holds no weights that can be read"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.pop("base"),
        lambda config: config.pop("recurrence"),
        lambda config: config["base"].pop("model_type"),
        lambda config: config["base"].update(model_type="no-such-model"),
        lambda config: config.update(architectures=["NoSuchModel"]),
        lambda config: config["recurrence"].update(kind="no-such-recurrence"),
        lambda config: config["recurrence"].update(lag=0),
        lambda config: config["recurrence"].update(lagg=2),
        lambda config: config.update(recurrence=3),
    ],
)
def test_a_config_that_describes_no_hosted_model(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    _, folder = saved(tmp_path)
    edit_config(folder, change)
    with pytest.raises(CheckpointError, match="does not describe a hosted model"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["recurrence"].update(rank=7),
        lambda config: config["recurrence"].update(connections=[[3, 0]]),
        lambda config: config.update(
            recurrence={"kind": "t2mlr", "first_layer": 1, "last_layer": 2}
        ),
        lambda config: config["recurrence"].update(connections=[[9, 0]]),
    ],
    ids=["rank", "connections", "kind", "outside"],
)
def test_the_config_of_another_recurrence(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    _, folder = saved(tmp_path)
    edit_config(folder, change)
    with pytest.raises(CheckpointError):
        load(folder)


def test_saving_to_a_file_and_pushing_are_refused(tmp_path: Path) -> None:
    model = hosted("llama", "turboconn-3")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="it is a file"):
        model.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(undertow.ConfigError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "new", push_to_hub=True)
    model.save_pretrained(tmp_path / "new", is_main_process=False)
    assert not (tmp_path / "new").exists()


def test_a_detached_model_saves_as_the_base_model(tmp_path: Path) -> None:
    model = undertow.detach(hosted("llama", "turboconn-3"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    assert difference(logits(load(tmp_path), tokens(2, 9)), logits(model, tokens(2, 9))) < ROUNDING


# --- a save that fails


def interrupt(after: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `action` happen in place of the `after`-th file that a save writes or renames."""
    done = [0]

    def spoil(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            done[0] += 1
            if done[0] == after:
                action()
            return original(*args, **kwargs)

        return write

    monkeypatch.setattr(Path, "write_text", spoil(Path.write_text))
    monkeypatch.setattr(os, "replace", spoil(os.replace))
    monkeypatch.setattr(files, "_exchange", spoil(files._exchange))
    monkeypatch.setattr(
        transformers.modeling_utils,
        "safe_save_file",
        spoil(transformers.modeling_utils.safe_save_file),
    )


def no_space() -> None:
    raise OSError(28, "No space left on device")


# A save writes the weights, writes and renames the config, and exchanges the folders.
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_old_checkpoint(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, folder = saved(tmp_path)
    new = randomize(hosted("llama", "turboconn-3"), seed=8)
    with monkeypatch.context() as patch:
        interrupt(after, no_space, patch)
        with pytest.raises(CheckpointError, match=r"could not write .*No space left on device"):
            new.save_pretrained(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"], "nothing half-written is left"
    assert difference(logits(load(folder), tokens(2, 9)), logits(old, tokens(2, 9))) < ROUNDING
    new.save_pretrained(folder)
    assert difference(logits(load(folder), tokens(2, 9)), logits(new, tokens(2, 9))) < ROUNDING


@pytest.mark.parametrize("after", [1, 2, 3, 4, None])
def test_a_killed_save_leaves_a_whole_checkpoint(
    after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one up to the moment when the folders are exchanged, and the new one from then on."""
    old, folder = saved(tmp_path)
    new = randomize(hosted("llama", "turboconn-3"), seed=8)
    child = os.fork()
    if child == 0:
        try:
            if after is None:  # after the exchange, before the old folder is gone
                exchange = files._exchange
                monkeypatch.setattr(
                    files,
                    "_exchange",
                    lambda *paths: (exchange(*paths), os.kill(os.getpid(), signal.SIGKILL)),
                )
            else:
                interrupt(after, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
            new.save_pretrained(folder)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    got, ids = logits(load(folder), tokens(2, 9)), tokens(2, 9)
    survivors = [model for model in (old, new) if difference(got, logits(model, ids)) < ROUNDING]
    assert len(survivors) == 1
    assert survivors == [new if after is None else old]
    new.save_pretrained(folder)
    assert difference(logits(load(folder), ids), logits(new, ids)) < ROUNDING
    assert [path.name for path in tmp_path.iterdir()] == ["saved"], (
        "what the killed save left behind is gone"
    )


@pytest.mark.parametrize("exchanges", [True, False], ids=["at once", "by two renames"])
@pytest.mark.parametrize("after", [1, 3, 5, 8])
def test_an_interrupted_save_of_shards_leaves_a_whole_checkpoint(
    after: int, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: None)
    old, new, ids = (
        hosted("llama", "turboconn-3"),
        hosted("llama", "turboconn-3", seed=1),
        tokens(2, 9),
    )
    old.save_pretrained(tmp_path, max_shard_size="40KB")
    with monkeypatch.context() as patch:
        interrupt(after, no_space, patch)
        with pytest.raises(CheckpointError, match="what was there before is untouched"):
            new.save_pretrained(tmp_path, max_shard_size="40KB")
    assert difference(logits(load(tmp_path), ids), logits(old, ids)) < ROUNDING
    (tmp_path / "notes.txt").write_text("kept")
    new.save_pretrained(tmp_path, max_shard_size="40KB")
    assert difference(logits(load(tmp_path), ids), logits(new, ids)) < ROUNDING
    assert (tmp_path / "notes.txt").read_text() == "kept", "what a save does not write stays"


def test_two_renames_of_which_the_second_fails_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, folder = saved(tmp_path)
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if source.name.endswith(".writing"):
            no_space()
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: None)
        patch.setattr(os, "rename", fail)
        with pytest.raises(CheckpointError, match="what was there before is untouched"):
            hosted("llama", "turboconn-3", seed=1).save_pretrained(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert difference(logits(load(folder), tokens(2, 9)), logits(old, tokens(2, 9))) < ROUNDING


# --- negative controls


def test_control_other_weights_in_the_file(tmp_path: Path) -> None:
    model, folder = saved(tmp_path, "t2mlr-whole")
    weights = load_file(folder / WEIGHTS)
    key = next(key for key in weights if key.endswith("gamma_recurrent"))
    weights[key] = torch.tensor([0.2])
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    assert difference(logits(load(folder), tokens(2, 9)), logits(model, tokens(2, 9))) > CHANGED


def test_control_the_library_makes_up_what_a_base_checkpoint_lacks(tmp_path: Path) -> None:
    """Without the mark that Undertow puts on its modules, loading would initialise them anew."""
    model = undertow.attach(unhosted("llama"), PATHWAYS["turboconn-3"])
    for module in model.modules():
        if hasattr(module, "_is_hf_initialized"):
            del module._is_hf_initialized
    before = [p.detach().clone() for p in recurrent_parameters(model).values()]
    model.init_weights()
    assert any(
        not torch.equal(p, old)
        for p, old in zip(recurrent_parameters(model).values(), before, strict=True)
    )
    assert isinstance(model.model.recurrence, nn.Module)
