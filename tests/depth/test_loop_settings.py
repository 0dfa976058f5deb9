"""A loop's settings: presets and mistakes; on disk and under PEFT; the gate's objectives; the
monitors."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROUNDING, difference, tokens, unhosted
from peft import LoraConfig, PeftModel, get_peft_model
from small_looped import looped, run
from torch import nn
from transformers import AutoModelForCausalLM

import undertow
from undertow import Looped
from undertow.depth import (
    Anchor,
    Budget,
    DepthCache,
    KLDivergence,
    Last,
    LatentDifference,
    LearnedGate,
    MinPKL,
    Scripted,
)
from undertow.depth.monitors import StateMonitor, state_measures
from undertow.depth.objectives import exit_distribution, expected_loss, gate_loss
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.mapping import from_mapping, to_mapping


def test_presets() -> None:
    tiny = Looped.preset("tinyllama-1.1b")
    assert (len(tiny.prelude), len(tiny.core), len(tiny.coda)) == (4, 8, 4)
    assert tiny.core == tuple(range(10, 18)) and tiny.coda[-1] == 21
    for name in ("llama-3.2-1b", "olmo-2-1b"):
        preset = Looped.preset(name, depth=8)
        assert (preset.prelude, preset.core, preset.coda) == (
            (0, 1, 2, 3),
            (6, 7, 8, 9, 10, 11),
            (12, 13, 14, 15),
        )
        assert preset.depth == 8
    small = Looped.preset("llama-3.2-1b-2-4-2")
    assert (small.prelude, small.core, small.coda) == ((0, 1), (10, 11, 12, 13), (14, 15))
    whole = Looped.whole(24)
    assert (whole.prelude, whole.core, whole.coda) == ((), tuple(range(24)), ())
    assert whole.injection == "none" and whole.norm and whole.gate and whole.depth == 4
    for settings in (tiny, whole):
        assert from_mapping(Looped, to_mapping(settings)) == settings
    assert from_mapping(Looped, {"preset": "olmo-2-1b", "depth": 8}) == Looped.preset(
        "olmo-2-1b", depth=8
    )


@pytest.mark.parametrize(
    "picks, match",
    [
        (((0, 1), (1, 2), (3,)), "layer 1 is picked twice"),
        (((0,), (2, 3), (1,)), "go up and down"),
        (((0,), (), (1,)), "core is empty"),
        (((-1,), (0,), ()), "layer -1 is picked"),
        ((0, (1,), ()), r"Looped\.prelude: expected \[whole number, \.\.\.\], got 0"),
        (((0,), (1.0,), ()), r"Looped\.core\[0\]: expected whole number, got 1\.0"),
        (((0,), (1,), (), "add"), "injection: expected one of 'adapter', 'none', got 'add'"),
    ],
)
def test_wrong_picks(picks: tuple, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Looped(*picks)


def test_ranges_are_saved(tmp_path: Path) -> None:
    model = undertow.attach(unhosted("llama"), Looped(range(0, 1), range(1, 3), range(3, 4)))  # type: ignore[arg-type]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, tokens(1, 4)).logits, run(model, tokens(1, 4)).logits)


def test_what_a_forward_refuses() -> None:
    ids = tokens(2, 5)
    for loop in ("plain", "whole"):
        with pytest.raises(ConfigError, match="warm_start would lose the token"):
            run(looped("llama", loop), ids, warm_start=True)
    with pytest.raises(ConfigError, match="resume is 5 and depth 2"):
        run(looped("llama"), ids, depth=2, resume=5)
    timed = undertow.attach(looped("llama"), undertow.T2MLR(1, 2))
    with pytest.raises(
        ConfigError, match="exit_rule, watch cannot be given beside a recurrence in time"
    ):
        run(timed, ids, exit_rule=LatentDifference(), watch=StateMonitor())


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: DepthCache(4), "the cache policy is 4; give one such as"),
        (lambda: DepthCache(Last), "the cache policy is <class"),
        (lambda: Budget(2.5), r"Budget\.iterations: expected whole number, got 2\.5"),
        (lambda: Anchor(1.5, 2), r"Anchor\.first: expected whole number, got 1\.5"),
        (lambda: Scripted(3), r"depths: expected \[whole number, \.\.\.\], got 3"),
        (lambda: Scripted((1.5,)), r"depths\[0\]: expected whole number, got 1\.5"),
        (lambda: LatentDifference("a"), "threshold: expected number, got 'a'"),
        (lambda: KLDivergence(minimum=1.5), r"minimum: expected whole number, got 1\.5"),
        (lambda: MinPKL(share=2), "share is 2"),
        (lambda: Looped.whole(4.0), r"layers: expected whole number, got 4\.0"),
    ],
)
def test_values_that_mean_nothing(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_mistakes() -> None:
    model = unhosted("llama")
    with pytest.raises(ConfigError, match="layer 4 is picked, but the model's layers are 0 to 3"):
        undertow.attach(model, Looped((0,), (1, 2), (4,)))
    assert not any("recurrence" in name for name, _ in model.named_parameters())
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3\.2-1b'"):
        Looped.preset("llama-3.2-1B")
    with pytest.raises(ConfigError, match="norm is on"):
        Looped((0,), (1,), (2,), norm=True)
    with pytest.raises(ConfigError, match="depth is 0"):
        Looped((), (0,), (), depth=0)
    model = looped("llama")
    for depth in (0, -1):
        with pytest.raises(ConfigError, match="depth is"):
            run(model, tokens(1, 3), depth=depth)
    with pytest.raises(ConfigError, match="needs an exit gate"):
        run(model, tokens(1, 3), exit_rule=LearnedGate())
    with pytest.raises(ConfigError, match="without gradients"):
        model(input_ids=tokens(1, 3), exit_rule=undertow.depth.LatentDifference())
    with pytest.raises(DataError, match="static cache"):
        model.generate(
            tokens(1, 3), cache_implementation="static", max_new_tokens=2, disable_compile=True
        )


@pytest.mark.parametrize("loop", ["adapter", "whole", "dropping"])
def test_save_and_load(tmp_path: Path, loop: str) -> None:
    model, ids = looped("llama", loop), tokens(2, 5)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert difference(run(loaded, ids).logits, run(model, ids).logits) < ROUNDING
    assert (loaded.state_dict().keys()) == model.state_dict().keys()
    with pytest.raises(Exception, match="undertow"):
        import subprocess
        import sys

        program = (
            "from transformers import AutoModelForCausalLM as A; "
            f"A.from_pretrained({str(tmp_path / 'model')!r})"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        raise (
            RuntimeError(done.stderr[-600:])
            if done.returncode
            else AssertionError("it loaded without undertow")
        )


def test_lora_beside_a_loop(tmp_path: Path) -> None:
    model, ids = looped("llama"), tokens(2, 5)
    base = run(model, ids).logits
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["recurrence"], task_type="CAUSAL_LM"
    )
    wrapped = get_peft_model(model, config)
    assert difference(run(wrapped, ids, depth=4).logits, base) < ROUNDING
    wrapped(input_ids=ids, labels=ids, depth=3).loss.backward()
    gradients = [
        name
        for name, p in wrapped.named_parameters()
        if p.grad is not None and float(p.grad.abs().sum()) > 0
    ]
    assert any("lora" in name for name in gradients) and any(
        "loop.adapter" in name for name in gradients
    )


@pytest.mark.parametrize("both", [False, True], ids=["loop", "loop and T²MLR"])
def test_an_adapter_folder_brings_its_loop(both: bool, tmp_path: Path) -> None:
    def base() -> Any:
        return unhosted("llama")

    model = undertow.attach(base(), undertow.Looped((0,), (1, 2), (3,), depth=3))
    if both:
        undertow.attach(model, undertow.T2MLR(0, 0))
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["recurrence"], task_type="CAUSAL_LM"
    )
    wrapped, ids = get_peft_model(model, config).eval(), tokens(2, 5)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    assert difference(run(loaded, ids).logits, run(wrapped, ids).logits) == 0
    assert difference(run(loaded, ids, depth=1).logits, run(wrapped, ids).logits) > ROUNDING
    other = undertow.attach(base(), undertow.Looped((0,), (1, 2), (3,), depth=2))
    if both:
        undertow.attach(other, undertow.T2MLR(0, 0))
    with pytest.raises(CheckpointError, match="depth is 3, but this model's is 2"):
        PeftModel.from_pretrained(other, tmp_path)


def test_gate_objectives() -> None:
    gates = torch.tensor([[0.2, 0.5], [0.5, 0.5], [0.9, 0.1]])
    chances = exit_distribution(gates)
    assert torch.allclose(chances, torch.tensor([[0.2, 0.5], [0.4, 0.25], [0.4, 0.25]]))
    losses = torch.tensor([[3.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    entropy = -(chances * chances.log()).sum(0)
    assert math.isclose(
        float(expected_loss(losses, gates, 0.1)),
        float(((chances * losses).sum(0) - 0.1 * entropy).mean()),
        rel_tol=1e-6,
    )
    # Stage II pushes the gate open (λ down) where going on helps and shut where it does not, and
    # touches no loss.
    gates, losses = torch.full((3, 2), 0.5, requires_grad=True), losses.clone().requires_grad_(True)
    gate_loss(losses, gates).backward()
    assert losses.grad is None
    assert bool((gates.grad[:2, 0] > 0).all()) and bool((gates.grad[:2, 1] < 0).all())


def test_gate_learns_to_stop_when_nothing_is_gained() -> None:
    torch.manual_seed(0)
    gate = nn.Linear(4, 1)
    states = torch.randn(3, 64, 4)
    easy = states[0, :, 0] > 0
    losses = torch.where(
        easy, torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[3.0], [2.0], [1.0]])
    )
    states[:, :, 0] = easy.float() * 4 - 2
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        gate_loss(losses, torch.sigmoid(gate(states)[..., 0])).backward()
        optimizer.step()
    stops = torch.sigmoid(gate(states)[..., 0])[0].detach()
    assert float(stops[easy].min()) > 0.5 > float(stops[~easy].max())


def test_monitors_reveal_collapse() -> None:
    torch.manual_seed(0)
    spread, same = torch.randn(2, 20, 64), torch.randn(1, 1, 64).expand(2, 20, 64)
    healthy = state_measures(spread + 0.1 * torch.randn_like(spread), spread)
    collapsed = state_measures(same, same + 1e-4)
    assert abs(healthy["token_correlation"]) < 0.1 and 0.05 < healthy["relative_residual"] < 0.2
    assert collapsed["token_correlation"] > 0.99 and collapsed["relative_residual"] < 1e-3
    # Against the plain definition, with padding left out.
    real = torch.ones(2, 20)
    real[0, :5] = 0
    found = state_measures(spread, spread * 2, real)["token_correlation"]
    rows = []
    for row, states in enumerate(spread):
        kept = states[real[row].bool()]
        cosines = nn.functional.cosine_similarity(kept[:, None], kept[None], dim=-1)
        count = len(kept)
        rows.append(float((cosines.sum() - count) / (count * (count - 1))))
    assert math.isclose(found, sum(rows) / 2, abs_tol=1e-5)
    monitor = StateMonitor()
    run(looped("llama"), tokens(2, 6), watch=monitor)
    assert set(monitor.measures()) == {"token_correlation", "relative_residual", "state_norm"}
