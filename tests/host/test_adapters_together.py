"""Adapters of recurrences without parameters, solvers, batches of several adapters, and taking
adapters off again."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from helpers import CHANGED, ROUNDING, difference, generate, hosted, logits, tokens, unhosted
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import undertow
from undertow.errors import ConfigError
from undertow.host import adapters
from undertow.host.attachment import find_attachment, has_recurrence
from undertow.lab.evaluation.run import evaluate
from undertow.lab.runs.loading import load
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training import train
from undertow.lab.training.from_scratch import from_scratch

IDS = tokens(2, 9)
LOOP = undertow.Looped((0,), (1, 2), (3,), depth=3, injection="none")
WITHOUT_PARAMETERS = {"soft-token": undertow.SoftToken(0.3), "loop": LOOP}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    unhosted("llama").save_pretrained(folder)
    return folder


def fresh(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


def trained(base: Path, recurrence: Any, seed: int, saved: list[str] | None = None) -> Any:
    """A base model with a recurrence and an adapter, both shaken as by a training."""
    model = fresh(base) if recurrence is None else undertow.attach(fresh(base), recurrence)
    model = get_peft_model(
        model,
        LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM"),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


# --- without parameters


@pytest.mark.parametrize("saved", [["recurrence"], ["model.recurrence"], None])
@pytest.mark.parametrize("kind", WITHOUT_PARAMETERS)
def test_a_recurrence_without_parameters_is_part_of_its_adapter(
    kind: str, saved: list[str] | None, base: Path, tmp_path: Path
) -> None:
    model = trained(base, WITHOUT_PARAMETERS[kind], 5, saved)
    want, plain = logits(model, IDS), logits(fresh(base), IDS)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(fresh(base), tmp_path)
    assert difference(logits(loaded, IDS), want) < ROUNDING
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded, IDS), plain)
    merged = loaded.merge_and_unload()
    assert difference(logits(merged, IDS), want) < 1e-4
    undertow.detach(merged)
    assert difference(logits(merged, IDS), want) > CHANGED, "the recurrence did nothing"


def test_without_recording_it_would_be_lost(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: what PEFT alone saves of a recurrence without parameters is plain LoRA."""
    monkeypatch.setattr(adapters, "recording", lambda model, config: config)
    model = trained(base, WITHOUT_PARAMETERS["soft-token"], 5, ["recurrence"])
    model.save_pretrained(tmp_path)
    assert not has_recurrence(PeftModel.from_pretrained(fresh(base), tmp_path))


LOOPED = {"prelude": [0], "core": [1], "coda": [2], "injection": "none"}
SECTIONS = {
    "time": {"recurrence": {"kind": "soft-token", "weight": 0.5}},
    "depth": {"depth": {"looped": LOOPED, "schedule": {"kind": "fixed", "depth": 3}}},
}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_a_run_saves_and_scores_an_adapter_of_one(section: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = character_tokenizer("01=")
    torch.manual_seed(1)
    from_scratch(
        ModelSection(width=16, heads=2, layers=3, positions=64), tokenizer
    ).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    runs = {
        save: train(
            tiny.recipe(
                tmp_path,
                name=save,
                model={"path": str(tmp_path / "base")},
                lora={"rank": 4, "save": save},
                **section,
            ),
            seed=0,
        )
        for save in ("merged", "adapter")
    }
    ids = torch.tensor([[3, 4, 4, 5, 3, 1, 4, 4]])
    (merged, _), (adapted, _) = (load(str(runs[save] / "model")) for save in ("merged", "adapter"))
    want = logits(merged, ids)
    assert difference(logits(adapted, ids), want) < 1e-5
    assert difference(logits(undertow.detach(merged), ids), want) > 1e-3, (
        "the recurrence did nothing"
    )
    assert (
        evaluate(runs["adapter"], []).partition("\n")[2]
        == evaluate(runs["merged"], []).partition("\n")[2]
    )


def test_a_part_of_a_recurrence_is_no_module_to_save(base: Path) -> None:
    for part in ("pathway", "recurrence.pathway", "pathway.gates"):
        with pytest.raises(ConfigError, match=f"names '{part}', a part of the recurrence"):
            trained(base, undertow.T2MLR(1, 2), 5, [part])


# --- the solver


def test_an_adapter_remembers_its_solver(base: Path, tmp_path: Path) -> None:
    model = trained(base, undertow.T2MLR(1, 2), 5, ["recurrence"])
    undertow.set_solver(model, undertow.Scan(3, 0), undertow.Scan(7, 0))
    model.save_pretrained(tmp_path / "scan")
    undertow.set_solver(model.base_model.model, undertow.Jacobi(5, 2))
    model.save_pretrained(tmp_path / "jacobi")
    loaded = PeftModel.from_pretrained(fresh(base), tmp_path / "scan", adapter_name="scan")
    loaded.load_adapter(str(tmp_path / "jacobi"), adapter_name="jacobi")
    for name, solver in (("scan", undertow.Scan(3, 0)), ("jacobi", undertow.Jacobi(5, 2))):
        loaded.set_adapter(name)
        assert find_attachment(loaded).solver == solver and find_attachment(
            loaded
        ).prefill == undertow.Scan(7, 0)


# --- several in one batch


@pytest.fixture(scope="module")
def several(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A base model with two adapters of a recurrence each, and two without."""
    kinds = {"a": undertow.T2MLR(1, 2), "b": undertow.T2MLR(1, 2), "plain": None, "other": None}
    model: Any = None
    for seed, (name, recurrence) in enumerate(kinds.items()):
        folder = tmp_path_factory.mktemp(name)
        trained(base, recurrence, seed, ["recurrence"] if recurrence else None).save_pretrained(
            folder
        )
        if model is None:
            model = PeftModel.from_pretrained(fresh(base), folder, adapter_name=name)
        else:
            model.load_adapter(str(folder), name)
    return model.eval()


def alone(model: Any, name: str, run: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """What one adapter gives for all rows."""
    if name == "__base__":
        with model.disable_adapter():
            return run(model)
    model.set_adapter(name)
    return run(model)


@pytest.mark.parametrize("active", ["a", "b", "plain"])
def test_rows_of_one_recurrence_run_whichever_adapter_is_active(several: Any, active: str) -> None:
    for names in (
        ["a", "a"],
        ["b", "b"],
        ["plain", "other"],
        ["__base__", "plain"],
        ["__base__", "__base__"],
    ):
        want = torch.stack(
            [alone(several, name, lambda m: logits(m, IDS))[row] for row, name in enumerate(names)]
        )
        tokens_wanted = [
            alone(several, name, lambda m: generate(m, IDS))[row] for row, name in enumerate(names)
        ]
        several.set_adapter(active)
        assert difference(logits(several, IDS, adapter_names=names), want) < ROUNDING, names
        got = several.generate(
            input_ids=IDS, max_new_tokens=8, do_sample=False, adapter_names=names
        )
        assert torch.equal(got, torch.stack(tokens_wanted)), names
        assert several.active_adapter == active
        assert (
            difference(logits(several, IDS), alone(several, active, lambda m: logits(m, IDS)))
            < ROUNDING
        ), "it stayed"


def test_rows_of_several_recurrences_are_refused(several: Any) -> None:
    for names in (["a", "b"], ["a", "__base__"], ["plain", "b"]):
        with pytest.raises(
            ConfigError,
            match=r"adapter_names mixes rows of .*run each adapter's rows as a batch of their own",
        ):
            logits(several, IDS, adapter_names=names)
        with pytest.raises(ConfigError, match="adapter_names mixes rows"):
            several.generate(input_ids=IDS, max_new_tokens=2, adapter_names=names)


def test_a_models_own_recurrence_is_that_of_every_adapter(base: Path, tmp_path: Path) -> None:
    own = undertow.attach(fresh(base), undertow.SoftToken(0.3))
    model = get_peft_model(
        own, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"), adapter_name="one"
    )
    assert has_recurrence(model)
    with pytest.raises(
        ConfigError, match="mixes"
    ):  # PEFT holds a copy for the adapter, which may have its own solver
        logits(model.eval(), IDS, adapter_names=["one", "__base__"])


# --- taken off again


def test_unloading_leaves_the_base_model(several: Any, base: Path, tmp_path: Path) -> None:
    for name in ("a", "plain"):
        model = trained(base, undertow.SoftToken(0.3), 5)
        model.save_pretrained(tmp_path)
        model = PeftModel.from_pretrained(fresh(base), tmp_path, adapter_name="a")
        model.add_adapter("plain", LoraConfig(r=4, target_modules=["q_proj"]))
        model.set_adapter(name)
        unloaded = model.unload()
        assert not has_recurrence(unloaded)
        assert torch.equal(logits(unloaded, IDS), logits(fresh(base), IDS))
    own = undertow.attach(fresh(base), undertow.SoftToken(0.3))
    want = logits(own, IDS)
    unloaded = get_peft_model(own, LoraConfig(r=4, target_modules=["q_proj"])).unload()
    assert torch.equal(logits(unloaded, IDS), want), "the model's own recurrence stays"


def test_merging_takes_the_recurrence_of_the_adapter_that_is_merged(
    base: Path, tmp_path: Path
) -> None:
    trained(base, undertow.T2MLR(1, 2), 1, ["recurrence"]).save_pretrained(tmp_path / "a")
    trained(base, None, 2).save_pretrained(tmp_path / "plain")

    def both() -> Any:
        model = PeftModel.from_pretrained(fresh(base), tmp_path / "a", adapter_name="a")
        model.load_adapter(str(tmp_path / "plain"), "plain")
        return model

    for active in ("a", "plain"):
        for name in ("a", "plain"):
            want = alone(both(), name, lambda m: logits(m, IDS))
            model = both()
            model.set_adapter(active)
            merged = model.merge_and_unload(adapter_names=[name])
            assert difference(logits(merged, IDS), want) < 1e-4
            assert has_recurrence(merged) == (name == "a")


def test_detaching_what_adapters_hold_is_refused(base: Path) -> None:
    model = trained(base, undertow.T2MLR(1, 2), 1, ["recurrence"])
    with pytest.raises(
        ConfigError, match=r"PEFT adapters hold the recurrence: default; call merge_and_unload"
    ):
        undertow.detach(model)
    assert not has_recurrence(undertow.detach(model.merge_and_unload()))
    with pytest.warns(UserWarning, match="neither trains nor holds"):
        beside = trained(base, undertow.T2MLR(1, 2), 1)
    plain = undertow.detach(beside)
    assert not has_recurrence(plain) and "save_pretrained" not in vars(beside.base_model.model)


def test_an_adapter_that_cannot_tell_of_the_recurrence_says_so() -> None:
    ids = torch.arange(2, 11)[None]
    ia3 = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    with pytest.warns(UserWarning, match="IA3, whose folder does not tell of the recurrence"):
        logits(peft.get_peft_model(hosted("llama", "t2mlr-whole"), ia3), ids)
    lora = peft.LoraConfig(
        target_modules=["k_proj"], modules_to_save=["recurrence"], task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():  # the control: LoRA's folder does
        warnings.simplefilter("error", UserWarning)
        logits(peft.get_peft_model(hosted("llama", "t2mlr-whole"), lora), ids)
