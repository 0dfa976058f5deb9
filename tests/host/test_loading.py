"""Every keyword of `from_pretrained` does to a hosted model's folder what it does to the base
model's, mistakes included."""

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CHANGED, PATHWAYS, ROUNDING, difference, hosted, logits, tokens, unhosted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import undertow
from undertow import CheckpointError
from undertow.host.attachment import find_attachment
from undertow.host.folder_config import UndertowConfig
from undertow.solvers import Scan, Sequential

Folders = tuple[Path, Path]
ARCHITECTURES = ["llama", "gpt2", "gemma3", "gpt_oss", "bloom"]
# One of each is left out or drawn; what two of them do together is compared too.
KEYWORDS: dict[str, list[Any]] = {
    "attn_implementation": ["eager", "sdpa", "nonsense", {"": "eager"}],
    "experts_implementation": ["eager", "nonsense"],
    "use_cache": [False],
    "attention_dropout": [0.1],
    "attn_pdrop": [0.1],
    "output_hidden_states": [True],
    "output_attentions": [True],
    "return_dict": [False],
    "pad_token_id": [5],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 5.0}],
    "dtype": [torch.bfloat16, "bfloat16", "auto", "nonsense"],
    "torch_dtype": [torch.float16],
    "device_map": ["cpu", {"": "cpu"}, "auto", "nonsense", {"nothing": "cpu"}],
    "low_cpu_mem_usage": [True],
    "vocab_size": [50],
    "hidden_size": [64],
    "ignore_mismatched_sizes": [True],
    "quantization_config": [
        {"quant_method": "nonsense"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ],
    "generation_config": [GenerationConfig(max_new_tokens=3)],
    "subfolder": ["nope"],
    "variant": ["nope"],
    "revision": ["other"],
    "use_safetensors": [True, False],
    "local_files_only": [True],
    "trust_remote_code": [True, False],
    "output_loading_info": [True],
    "key_mapping": [{"a": "b"}],
    "nonsense": [1],
}
# These two would make up a recurrence's weights, which is refused: see below.
MADE_UP = {"hidden_size", "ignore_mismatched_sizes"}
SEVERAL = (
    st.dictionaries(st.sampled_from(sorted(KEYWORDS)), st.integers(0, 4), min_size=1, max_size=3)
    .map(
        lambda drawn: {
            name: KEYWORDS[name][index % len(KEYWORDS[name])] for name, index in drawn.items()
        }
    )
    .filter(lambda keywords: not keywords.keys() >= MADE_UP)
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    """The folders of a base model and of the same with a recurrence that changes no output yet."""
    found = {}
    for name in ARCHITECTURES:
        base, own = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("hosted")
        unhosted(name).save_pretrained(base)
        undertow.attach(unhosted(name), PATHWAYS["turboconn-3"]).save_pretrained(own)
        found[name] = (base, own)
    return found


def load(folder: Path, **keywords: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **copy.deepcopy(keywords))


def outcome(folder: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    """What came of a loading: the exception, or what the model is like."""
    try:
        loaded = load(folder, **keywords)
    except Exception as error:
        return {"error": type(error)}
    model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
    reinitialised = "ignore_mismatched_sizes" in keywords
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = {
            key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"
        }
    return {
        "class": type(model),
        "config": config
        | {
            "kernel": model.config._attn_implementation,
            "attentions": model.config.output_attentions,
        },
        "generation": model.generation_config.to_dict(),
        "parameters": {
            n: (p.dtype, p.shape, p.device)
            for n, p in model.named_parameters()
            if ".recurrence." not in n
        },
        "info": None if info is None else set(info),
        "logits": None if reinitialised else run(model),
    }


def run(model: PreTrainedModel) -> Any:
    """Logits, or the exception of a setting that no forward of this model stands."""
    try:
        return logits(model, tokens(2, 7))
    except Exception as error:
        return type(error)


def compare(folders: Folders, keywords: dict[str, Any]) -> None:
    want, got = (outcome(folder, keywords) for folder in folders)
    assert ("error" in got) == ("error" in want), (got.get("error"), want.get("error"))
    if "error" in want:
        assert issubclass(got["error"], want["error"])
        return
    for name in ("class", "config", "generation", "parameters", "info"):
        assert got[name] == want[name], name
    if got["logits"] is undertow.UnsupportedArchitectureError:
        return  # layers' outputs of a model that collects them itself
    if isinstance(want["logits"], torch.Tensor):
        assert difference(got["logits"].float(), want["logits"].float()) < 1e-4
    else:
        assert got["logits"] == want["logits"]


def test_every_keyword(saved: dict[str, Folders]) -> None:
    for keyword, values in KEYWORDS.items():
        for value in values:
            compare(saved["llama"], {keyword: value})


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(ARCHITECTURES), keywords=SEVERAL)
def test_several_keywords(saved: dict[str, Folders], name: str, keywords: dict[str, Any]) -> None:
    compare(saved[name], keywords)


@pytest.mark.parametrize(
    "keywords",
    [{"attn_implementation": "nonsense"}, {"use_cache": False}, {"attention_dropout": 0.1}],
)
def test_the_comparison_can_fail(
    saved: dict[str, Folders], keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overrides that do not reach the base model's config, as they once did not."""
    original = UndertowConfig.from_dict.__func__  # type: ignore[attr-defined]

    def deaf(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        config = original(cls, config_dict)
        return (config, {}) if kwargs.get("return_unused_kwargs") else config

    monkeypatch.setattr(UndertowConfig, "from_dict", classmethod(deaf))
    with pytest.raises(AssertionError):
        compare(saved["llama"], keywords)


def test_a_subfolder_and_a_variant(tmp_path: Path) -> None:
    model = hosted("llama", "turboconn-3")
    model.save_pretrained(tmp_path / "inner", variant="fp16")
    loaded = load(tmp_path, subfolder="inner", variant="fp16")
    assert difference(logits(loaded, tokens(2, 9)), logits(model, tokens(2, 9))) < ROUNDING
    with pytest.raises(OSError, match="holds no weights that can be read"):
        load(tmp_path, subfolder="inner")


def test_mismatched_sizes_are_ignored_where_asked_but_the_recurrences(
    saved: dict[str, Folders], tmp_path: Path
) -> None:
    model, info = load(
        saved["llama"][1], vocab_size=50, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert model.get_input_embeddings().weight.shape[0] == 50 and len(info["mismatched_keys"]) == 2
    with pytest.raises(CheckpointError, match="weights of the recurrence"):
        load(saved["llama"][1], hidden_size=64, ignore_mismatched_sizes=True)
    config = AutoConfig.from_pretrained(saved["llama"][1])
    config.recurrence["rank"] = 5
    for ignored in (True, False):
        with pytest.raises(CheckpointError, match="shapes"):
            load(saved["llama"][1], config=config, ignore_mismatched_sizes=ignored)


# --- the config


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_config_stands_for_the_base_models(
    saved: dict[str, Folders], name: str, tmp_path: Path
) -> None:
    base, own = (
        AutoConfig.from_pretrained(folder, attn_implementation="eager", use_cache=False)
        for folder in saved[name]
    )
    assert own.model_type == "undertow"
    assert own._attn_implementation == base._attn_implementation == "eager"
    assert own.hidden_size == base.hidden_size and own.dtype == base.dtype and not own.use_cache
    assert own.get_text_config().to_dict() == base.get_text_config().to_dict() | {
        "_name_or_path": str(saved[name][1])
    }
    for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert copied.to_dict() == own.to_dict()
    own.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == own.to_diff_dict()
    model = AutoModelForCausalLM.from_config(own)
    assert model.config._attn_implementation == "eager" and not model.config.use_cache
    assert AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert find_attachment(model).settings == PATHWAYS["turboconn-3"]


def test_a_config_that_was_changed(saved: dict[str, Folders]) -> None:
    config = AutoConfig.from_pretrained(saved["llama"][1])
    config.use_cache, config.attention_dropout, config._attn_implementation = False, 0.2, "eager"
    config.output_hidden_states = True
    model = load(saved["llama"][1], config=config)
    assert not model.config.use_cache and model.config.attention_dropout == 0.2
    assert model.config._attn_implementation == "eager"
    assert len(model(tokens(1, 4)).hidden_states) == 5
    untouched = load(saved["llama"][1])
    assert untouched.config.use_cache and untouched(tokens(1, 4)).hidden_states is None


# --- the solver


def test_the_solvers_are_saved(tmp_path: Path) -> None:
    model = hosted("llama", "turboconn-3")
    for solver in (
        Scan(3, 0),
        undertow.Jacobi(5, 2),
        undertow.Auto(0.02),
        Sequential("adjoint(1)"),
    ):
        undertow.set_solver(model, solver, undertow.Chunked(7, Scan(4, 0)))
        model.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        for again in (loaded, fresh):
            assert find_attachment(again).solver == solver
            assert find_attachment(again).prefill == undertow.Chunked(7, Scan(4, 0))
        assert difference(logits(loaded, tokens(2, 9)), logits(model, tokens(2, 9))) < ROUNDING


def test_a_folder_saved_before_solvers_were_loads_with_the_default_ones(tmp_path: Path) -> None:
    model = hosted("llama", "turboconn-3", solver=Scan(3, 0))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("solver", "prefill")})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(tmp_path)
    assert (
        find_attachment(loaded).solver == undertow.Auto()
        and find_attachment(loaded).prefill == Sequential()
    )


class Own(Scan):
    """A solver of the user's own, whose kind is that of another."""


class Named(Sequential):
    kind = "named"


def test_a_solver_of_the_users_own_is_named_when_it_is_not_known(
    tmp_path: Path, own_kinds: None
) -> None:
    model = hosted("llama", "turboconn-3", solver=Own(4, 0))
    model.save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning,
        match=r"saved with a solver that is not known here .*'Own'.*undertow\.set_solver",
    ):
        loaded = load(tmp_path)
    assert find_attachment(loaded).solver == undertow.Auto()
    assert difference(logits(loaded, tokens(2, 9)), logits(model, tokens(2, 9))) < ROUNDING

    undertow.set_solver(model, Named("adjoint(2)"))
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="'Named'"):
        load(tmp_path)
    undertow.register(Named)
    model.save_pretrained(tmp_path)
    assert find_attachment(load(tmp_path)).solver == Named("adjoint(2)")


def test_a_recurrence_still_matters_after_loading_with_overrides(tmp_path: Path) -> None:
    """The comparisons above are of a recurrence that changes nothing yet."""
    model = hosted("llama", "turboconn-3")
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, attn_implementation="eager", use_cache=False)
    assert difference(logits(loaded, tokens(2, 9)), logits(model, tokens(2, 9))) < 1e-4
    assert (
        difference(logits(loaded, tokens(2, 9)), logits(unhosted("llama"), tokens(2, 9))) > CHANGED
    )
