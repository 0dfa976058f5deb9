"""What one call was given never reaches another, whatever interrupts, nests or runs beside it."""

import threading
from typing import Any

import pytest
import torch
from helpers import CHANGED, PATHWAYS, difference, generate, hosted, logits, tokens, unhosted
from peft import LoraConfig, PeftModel, get_peft_model

import undertow
from undertow.host import intercept
from undertow.host.stack import Recorder, current_forward

IDS = tokens(2, 9)
NONE = torch.zeros_like(IDS)


class Stopped(BaseException):
    """As Ctrl-C is, no Exception: hooks that are always called are not."""


PLACES = {
    "embedding": lambda model: model.model.embed_tokens,
    "first layer": lambda model: model.model.layers[0],
    "layer of the block": lambda model: model.model.layers[2],
    "last layer": lambda model: model.model.layers[3],
    "norm": lambda model: model.model.norm,
    "head": lambda model: model.lm_head,
    "backbone": lambda model: model.model,
    "model": lambda model: model,
}


def stop_at(model: Any, place: str, error: type[BaseException], **inputs: Any) -> None:
    def stop(*_: Any) -> None:
        raise error

    handle = PLACES[place](model).register_forward_pre_hook(stop)
    with pytest.raises(error):
        logits(model, IDS, **inputs)
    handle.remove()


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stopped, RuntimeError])
@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_was_stopped_leaves_nothing(place: str, error: type[BaseException]) -> None:
    model = hosted("llama", "t2mlr-whole")
    want, text = logits(model, IDS), generate(model, IDS)
    with torch.no_grad():
        states = model.model(IDS, use_cache=False).last_hidden_state
    for _ in range(2):
        stop_at(model, place, error, recurrent_mask=NONE)
    assert current_forward.get() is None
    assert not any(isinstance(layer, Recorder) for layer in model.model.layers)
    with torch.no_grad():
        assert torch.equal(model.model(IDS, use_cache=False).last_hidden_state, states), (
            "no mask of the call before"
        )
    assert torch.equal(logits(model, IDS), want)
    assert torch.equal(generate(model, IDS), text)


def test_control_a_context_that_is_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hosted("llama", "t2mlr-whole")

    class Kept:
        def __init__(self, variable: Any) -> None:
            self.get, self.set, self.reset = variable.get, variable.set, lambda token: None

    monkeypatch.setattr(intercept, "current_forward", Kept(current_forward))
    before = current_forward.get()
    token = current_forward.set(None)
    stop_at(model, "first layer", KeyboardInterrupt)
    assert current_forward.get() is not None
    current_forward.reset(token)
    assert current_forward.get() is before


def test_a_disabled_adapter_stays_disabled_after_an_interrupt(tmp_path: Any) -> None:
    settings = LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["recurrence"], task_type="CAUSAL_LM"
    )
    get_peft_model(hosted("llama", "t2mlr-whole"), settings).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(unhosted("llama"), tmp_path).eval()
    base = logits(unhosted("llama"), IDS)
    with model.disable_adapter():
        assert torch.equal(logits(model, IDS), base)
    assert difference(logits(model, IDS), base) > CHANGED
    handle = model.base_model.model.model.layers[2].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(Stopped())
    )
    with pytest.raises(Stopped):
        logits(model, IDS)
    handle.remove()
    with model.disable_adapter():
        assert torch.equal(logits(model, IDS), base)


@pytest.mark.parametrize("place", ["embedding", "layer of the block", "norm"])
def test_another_hosted_model_inside(place: str) -> None:
    """Each runs with what it was given, however their calls are nested."""
    outer, inner = hosted("llama", "t2mlr-whole"), hosted("llama", "turboconn-1", seed=1)
    looped = undertow.attach(unhosted("llama"), undertow.Looped((0,), (1, 2), (3,)))
    wants = {
        "inner": logits(inner, IDS),
        "masked": logits(inner, IDS, recurrent_mask=NONE),
        "depth": logits(looped, IDS, depth=3),
        "backbone": inner.model(IDS, use_cache=False).last_hidden_state.detach(),
    }
    want = logits(outer, IDS, recurrent_mask=NONE)
    got: dict[str, torch.Tensor] = {}

    def nest(*_: Any) -> None:
        got["inner"] = logits(inner, IDS)
        got["masked"] = logits(inner, IDS, recurrent_mask=NONE)
        got["depth"] = logits(looped, IDS, depth=3)
        got["backbone"] = inner.model(IDS, use_cache=False).last_hidden_state.detach()
        with pytest.raises(undertow.ConfigError):
            logits(inner, IDS, depth=2)

    handle = PLACES[place](outer).register_forward_pre_hook(nest)
    found = logits(outer, IDS, recurrent_mask=NONE)
    handle.remove()
    assert torch.equal(found, want)
    assert all(torch.equal(got[name], wants[name]) for name in wants)
    assert difference(want, logits(outer, IDS)) > CHANGED


def test_a_model_inside_itself() -> None:
    model, got = hosted("llama", "turboconn-1"), []
    want, inside = logits(model, IDS, recurrent_mask=NONE), logits(model, IDS[:, :5])
    once = [True]

    def nest(*_: Any) -> None:
        if once:
            once.clear()
            got.append(logits(model, IDS[:, :5]))
            got.append(torch.tensor([isinstance(layer, Recorder) for layer in model.model.layers]))

    model.model.layers[1].register_forward_pre_hook(nest)
    assert torch.equal(logits(model, IDS, recurrent_mask=NONE), want)
    assert torch.equal(got[0], inside) and not got[1].any()


def test_a_generator_left_half_way() -> None:
    model = hosted("llama", "t2mlr-whole")
    want = logits(model, IDS)

    def pieces() -> Any:
        for length in (4, 6, 9):
            yield logits(model, IDS[:, :length], recurrent_mask=NONE[:, :length])

    generator = pieces()
    next(generator)
    assert torch.equal(logits(model, IDS), want)
    del generator
    assert torch.equal(logits(model, IDS), want)


def test_threads_do_not_meet() -> None:
    model = hosted("llama", "turboconn-3")
    wants = [logits(model, IDS), logits(model, IDS, recurrent_mask=NONE)]
    wrong: list[int] = []

    def run(which: int) -> None:
        for _ in range(8):
            inputs = {} if which == 0 else {"recurrent_mask": NONE}
            if not torch.equal(logits(model, IDS, **inputs), wants[which]):
                wrong.append(which)

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_learning_lets_another_hosted_model_run_inside(pathway: str) -> None:
    """The first forward of a model that was attached without weights watches that model alone."""
    inner, got = hosted("llama", pathway, seed=1), []
    want = logits(inner, IDS)
    outer = unhosted("llama")
    outer.model.layers[0].register_forward_pre_hook(lambda *_: got.append(logits(inner, IDS)))
    undertow.attach(outer, PATHWAYS[pathway])
    assert got and all(torch.equal(each, want) for each in got)
