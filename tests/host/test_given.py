"""What is handed to `attach`, a forward and `generate`: misspelt, inapplicable or of another type,
in one sentence."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small_huginn
import torch
from helpers import PATHWAYS, generate, hosted, logits, tokens, unhosted
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaModel

import undertow
from undertow import T2MLR, ConfigError, DataError, Looped, UndertowError
from undertow.depth import Cosine
from undertow.errors import UnsupportedArchitectureError
from undertow.host import given, intercept

IDS = tokens(2, 7) % small_huginn.VOCAB
MASK = torch.zeros_like(IDS)


@functools.cache
def model_of(kind: str) -> Any:
    if kind == "huginn":
        return small_huginn.small()
    if kind == "time":
        return hosted("llama", "t2mlr-middle")
    return undertow.attach(unhosted("llama"), Looped((0,), (1, 2), (3,)))


NAMES = [
    ("time", "recurent_mask", "recurrent_mask"),
    ("time", "recurrence_mask", "recurrent_mask"),
    ("time", "recurrentMask", "recurrent_mask"),
    ("depth", "dept", "depth"),
    ("depth", "num_steps", "depth"),
    ("depth", "exit_rul", "exit_rule"),
    ("depth", "state_sed", "state_seed"),
    ("huginn", "depht", "depth"),
    ("huginn", "warmstart", "warm_start"),
]


@pytest.mark.parametrize(("kind", "name", "right"), NAMES)
def test_a_misspelt_name_is_refused_with_the_right_one(kind: str, name: str, right: str) -> None:
    for call in (logits, generate):
        with pytest.raises(ConfigError, match=f"{name} is no argument of .*did you mean '{right}'"):
            call(model_of(kind), IDS, **{name: MASK})


def test_control_without_the_check_a_misspelt_name_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intercept, "check_names", lambda *given: None)
    model = model_of("time")
    assert torch.equal(logits(model, IDS, recurent_mask=MASK), logits(model, IDS))
    assert not torch.equal(logits(model, IDS, recurrent_mask=MASK), logits(model, IDS))


def test_names_that_are_the_base_models_business_pass() -> None:
    others: dict[str, Any] = {
        "num_items_in_batch": 3,
        "cu_seq_lens_q": None,
        "output_attentions": False,
        "something": 1,
    }
    for kind in ("time", "depth"):
        assert torch.equal(logits(model_of(kind), IDS, **others), logits(model_of(kind), IDS))
        assert torch.equal(
            logits(model_of(kind), IDS, batch=1), logits(model_of(kind), IDS)
        )  # as like "watch" as "wach" is
    with pytest.raises(ConfigError, match="watch"):
        logits(model_of("depth"), IDS, wach=1)
    with pytest.raises(ValueError, match="something"):  # the library's own refusal
        generate(model_of("time"), IDS, something=1)


def test_known_names_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoded token asks: where all names are known, that is one operation on sets."""
    monkeypatch.setattr(given, "refuse_near", lambda *names: pytest.fail(f"compared {names}"))
    generate(model_of("time"), IDS, recurrent_mask=torch.ones_like(IDS))
    with pytest.raises(pytest.fail.Exception):
        logits(model_of("time"), IDS, something=1)


VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("depth", {"recurrent_mask": MASK}, "no recurrence in time"),
    ("huginn", {"recurrent_mask": MASK}, "no recurrence in time"),
    ("time", {"depth": 3}, "no recurrence in depth"),
    ("time", {"state_seed": 0}, "no recurrence in depth"),
    ("time", {"recurrent_mask": MASK.tolist()}, "give a tensor"),
    ("time", {"recurrent_mask": MASK.float()}, "of type torch.float32"),
    ("time", {"recurrent_mask": MASK[0]}, "has shape"),
    *[
        (kind, arguments, match)
        for kind in ("depth", "huginn")
        for arguments, match in [
            ({"depth": 2.5}, "depth is 2.5"),
            ({"depth": True}, "depth is True"),
            ({"depth": "4"}, "depth is '4'"),
            ({"depth": (True, 2)}, "depth is"),
            ({"exit_rule": "kl"}, r"give one such as undertow.depth.KLDivergence\("),
            ({"exit_rule": Cosine}, r"the class Cosine; give one such as undertow.depth.Cosine\("),
            ({"warm_start": 1}, "warm_start is 1"),
            ({"resume": 2.5}, "resume is 2.5"),
            ({"state_seed": 1.5}, "state_seed is 1.5"),
            ({"state_seed": torch.rand(2)}, "state_seed is tensor"),
            ({"watch": 3}, "watch is 3"),
            ({"warm_start": True, "resume": 1}, "give only one"),
        ]
    ],
]


@pytest.mark.parametrize(("kind", "arguments", "match"), VALUES)
def test_values_and_places_that_do_not_fit_are_refused(
    kind: str, arguments: dict[str, Any], match: str
) -> None:
    for call in (logits, generate):
        with pytest.raises((ConfigError, DataError), match=match):
            call(model_of(kind), IDS, **arguments)


def test_whole_numbers_of_numpy_are_taken_and_a_seed_beyond_a_tensors_is_refused() -> None:
    model: Any = undertow.attach(unhosted("llama"), Looped((0,), (1, 2), (3,), injection="none"))
    for name in ("depth", "state_seed"):
        assert torch.equal(
            logits(model, IDS, **{name: np.int64(2)}), logits(model, IDS, **{name: 2})
        )
    assert not torch.equal(logits(model, IDS, depth=np.int64(2)), logits(model, IDS, depth=1))
    assert undertow.Looped((0,), (1, 2), (3,), depth=np.int64(3)).depth == 3  # type: ignore[arg-type]
    for seed in (2**70, np.float32(2.0)):
        with pytest.raises(ConfigError, match="state_seed is"):
            logits(model, IDS, state_seed=seed)


def test_a_model_that_takes_no_text_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = unhosted("llama")

    def needs_an_image(*args: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        raise ValueError("exactly one of pixel_values must be given")

    monkeypatch.setattr(model, "forward", needs_an_image)
    with pytest.raises(
        UnsupportedArchitectureError, match=r"does not take text alone .*pixel_values"
    ):
        undertow.attach(model, T2MLR(1, 2))
    monkeypatch.undo()
    undertow.attach(model, T2MLR(1, 2))  # and nothing is left behind


@pytest.mark.parametrize("size", ["lag", "rank"])
def test_sizes_that_no_tensor_has_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=f"{size} is 1000000000000; use 1,000,000 or less"):
        undertow.TurboConn(((1, 0),), **{size: 10**12})
    with pytest.raises(ConfigError, match=f"{size}: 1000.*does not fit into 64 bits"):
        undertow.TurboConn(((1, 0),), **{size: 10**30})
    undertow.TurboConn(((1, 0),), **{size: 1000})


def test_control_those_that_fit_are_taken() -> None:
    logits(
        model_of("time"), IDS, recurrent_mask=MASK.bool(), warm_start=False, resume=0, depth=None
    )
    for kind in ("depth", "huginn"):
        logits(
            model_of(kind),
            IDS,
            depth=2,
            state_seed=torch.tensor([1, 2]),
            watch=lambda *states: None,
        )
        generate(model_of(kind), IDS, depth=2, exit_rule=Cosine(0.1))


def test_generate_refuses_a_mask_longer_than_the_attention_mask() -> None:
    padding = torch.ones_like(IDS)
    with pytest.raises(DataError, match="recurrent_mask has shape"):
        generate(
            model_of("time"),
            IDS,
            recurrent_mask=torch.ones(2, 12, dtype=torch.long),
            attention_mask=padding,
        )
    generate(model_of("time"), IDS, recurrent_mask=torch.ones_like(IDS), attention_mask=padding)


def test_generate_refuses_a_mask_shorter_than_the_attention_mask() -> None:
    with pytest.raises(DataError, match="give both one entry a token"):
        generate(
            model_of("time"), IDS, recurrent_mask=MASK[:, :3], attention_mask=torch.ones_like(IDS)
        )


LORA = LoraConfig(target_modules=["q_proj"])
MIDDLE = PATHWAYS["t2mlr-middle"]
ATTACHED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: undertow.attach(unhosted("llama"), T2MLR),
        r"the class T2MLR; .* undertow.T2MLR\(first_layer, last_layer\)",
    ),
    (
        lambda: undertow.attach(unhosted("llama"), "t2mlr"),
        r"'t2mlr'; give one such as undertow.T2MLR\(",
    ),
    (lambda: undertow.attach(unhosted("llama"), None), "recurrence is None"),
    (
        lambda: undertow.attach(unhosted("llama"), MIDDLE, "sequential"),
        r"give one such as undertow.Sequential\(\)",
    ),
    (
        lambda: undertow.attach(unhosted("llama"), MIDDLE, undertow.Scan),
        r"the class Scan; .* undertow.Scan\(\)",
    ),
    (
        lambda: undertow.set_solver(model_of("time"), "scan"),
        r"solver is 'scan'; give one such as undertow.Scan\(\)",
    ),
    (
        lambda: undertow.set_solver(model_of("time"), prefill=undertow.Scan),
        "prefill is the class Scan",
    ),
    (lambda: undertow.set_solver(None, undertow.Scan()), "None is no model"),
    (lambda: undertow.report("model"), "'model' is no model"),
    (lambda: undertow.detach(LlamaModel), "the class LlamaModel is no model"),
    (lambda: undertow.attach("gpt2", MIDDLE), "not 'gpt2'; load the model first"),
    (
        lambda: undertow.attach(LlamaModel, MIDDLE),
        "not the class LlamaModel; make or load a model first",
    ),
    (
        lambda: undertow.attach(unhosted("llama").model, MIDDLE),
        "LlamaModel has no language-model head",
    ),
    (
        lambda: undertow.attach(nn.DataParallel(unhosted("llama")), MIDDLE),
        "a DataParallel around one; attach before",
    ),
    (
        lambda: undertow.attach(torch.compile(unhosted("llama")), MIDDLE),
        "a OptimizedModule around one; attach before",
    ),
    (
        lambda: undertow.attach(get_peft_model(unhosted("llama"), LORA), MIDDLE),
        "attach before PEFT",
    ),
    (lambda: undertow.attach(nn.Linear(2, 2), MIDDLE), "not a Linear; load one"),
]


@pytest.mark.parametrize("index", range(len(ATTACHED)))
def test_what_cannot_be_attached_or_set_is_refused(index: int) -> None:
    call, match = ATTACHED[index]
    with pytest.raises(UndertowError, match=match):
        call()
