"""A looped model that carries a recurrence in time too."""

import copy
from typing import Any

import pytest
import torch
from helpers import CACHE, CHANGED, ROUNDING, SAME, difference, generate, randomize, tokens
from small_looped import looped, padded, run
from transformers import AutoModelForCausalLM

import undertow
from undertow import T2MLR, Looped, TurboConn
from undertow.depth import DepthCache, LatentDifference
from undertow.pathways import Recurrence
from undertow.solvers import Jacobi, Scan, Sequential

# Around the core, which is layers 1 and 2 of four; in front of it; behind it.
PATHWAYS: dict[str, Recurrence] = {
    "t2mlr-around": T2MLR(1, 2),
    "t2mlr-whole": T2MLR(0, 3),
    "turboconn-around": TurboConn(((2, 0), (3, 0)), lag=2, alpha=0.5, rank=6),
    "turboconn-behind": TurboConn(((3, 2),), lag=1, alpha=0.5, rank=6),
    "t2mlr-before": T2MLR(0, 0),
}


def both(name: str, pathway: str, loop: str = "adapter") -> Any:
    return randomize(undertow.attach(looped(name, loop), PATHWAYS[pathway]))


@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_decoding_equals_the_whole_pass_and_rows_alone(name: str, pathway: str) -> None:
    model = both(name, pathway)
    ids, mask, rows = padded((8, 5))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = run(model, ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache, parts = DepthCache(), []
    for start, stop in ((0, 4), (4, 5), (5, 8)):
        inputs: dict[str, Any] = {CACHE: cache, "attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        parts.append(run(model, ids[:, start:stop], use_cache=True, **inputs).logits)
    real = mask.bool()
    assert difference(torch.cat(parts, dim=1)[real], whole[real]) < SAME
    for row, text in enumerate(rows):
        assert difference(whole[row][real[row]], run(model, text, use_cache=False).logits[0]) < SAME
    # Both recurrences act.
    alone = run(looped(name), ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert difference(whole[real], alone[real]) > CHANGED
    shallow = run(model, ids, attention_mask=mask, position_ids=positions, use_cache=False, depth=1).logits
    assert difference(whole[real], shallow[real]) > CHANGED


@pytest.mark.parametrize("pathway", ["t2mlr-around", "turboconn-around"])
def test_generate_and_beams(pathway: str) -> None:
    model = both("llama", pathway)
    ids = tokens(2, 5)
    for settings in ({}, {"num_beams": 2}):
        inputs = {"attention_mask": torch.ones_like(ids), "depth": 3, **settings}
        assert torch.equal(generate(model, ids, **inputs), generate(model, ids, use_cache=False, **inputs))


@pytest.mark.parametrize("pathway", ["t2mlr-around", "turboconn-around", "t2mlr-whole"])
def test_parallel_solvers_run_to_the_end_equal_the_rollout(pathway: str) -> None:
    """Logits and gradients, with backpropagation truncated in depth as well."""
    ids = tokens(2, 6)
    found: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
    for name, solver in (("exact", Sequential()), ("jacobi", Jacobi(6, 6)), ("scan", Scan(6, 6))):
        model = both("llama", pathway)
        undertow.set_solver(model, solver)
        output = model(input_ids=ids, labels=ids, depth=(1, 2), use_cache=name != "jacobi")
        output.loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        found[name] = output.logits.detach(), gradients
    for name in ("jacobi", "scan"):
        assert difference(found[name][0], found["exact"][0]) < SAME
    keys = found["exact"][1].keys()
    assert any("recurrence.loop.adapter" in key for key in keys) and any("recurrence.pathway" in key for key in keys)
    for key in keys:
        got, want = found["jacobi"][1][key], found["exact"][1][key]
        assert float((got - want).abs().max()) < 1e-3 * float(want.abs().max()) + 1e-9, key


def test_attaching_in_either_order_is_the_same(tmp_path: Any) -> None:
    ids = tokens(1, 6)
    first = both("llama", "t2mlr-around")
    second = undertow.attach(undertow.detach(copy.deepcopy(first)), PATHWAYS["t2mlr-around"])
    undertow.attach(second, Looped((0,), (1, 2), (3,), depth=4, backward=2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(run(first, ids).logits, run(second, ids).logits)
    first.save_pretrained(tmp_path / "both")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    assert difference(run(loaded, ids).logits, run(first, ids).logits) < ROUNDING


def test_mistakes() -> None:
    model = looped("llama")
    with pytest.raises(undertow.ConfigError, match="inside the looped layers 1 to 2"):
        undertow.attach(model, T2MLR(2, 2))
    assert run(model, tokens(1, 3)).logits.shape[1] == 3  # the failed attempt left the model as it was
    with pytest.raises(undertow.ConfigError, match="already has a recurrence of this kind"):
        undertow.attach(model, Looped((0,), (1,), (2,)))
    time_only = undertow.attach(undertow.detach(looped("llama")), T2MLR(1, 2))
    with pytest.raises(undertow.ConfigError, match="inside the looped layers"):
        undertow.attach(time_only, Looped((0,), (1, 2, 3), ()))
    with pytest.raises(undertow.ConfigError, match="beside a recurrence in time"):
        run(both("llama", "t2mlr-around"), tokens(1, 3), exit_rule=LatentDifference())
    with pytest.raises(undertow.ConfigError, match="depth is given, but"):
        run(time_only, tokens(1, 3), depth=3)
