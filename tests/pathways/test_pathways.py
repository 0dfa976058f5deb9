"""The pathways as the papers describe them: parameters, wirings, initial values, equations, and
what is refused."""

import math
from typing import Any

import pytest
import torch
from helpers import CONNECTIONS
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import undertow
from undertow import T2MLR, ConfigError, SoftToken, TurboConn
from undertow.pathways import RECURRENCES, Pathway
from undertow.pathways.t2mlr import T2MLRPathway


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def of(pathway: Pathway) -> Any:
    """A pathway's own attributes, past the type of the contract."""
    return pathway


# --- TurboConn


@pytest.mark.parametrize(("rank", "width"), [(120, 64), (7, 32), (1, 8)])
@pytest.mark.parametrize("connections", [((3, 0),), CONNECTIONS, ((5, 5), (5, 4), (4, 4))])
def test_turboconn_has_two_projections_with_biases_a_connection(
    connections: tuple[tuple[int, int], ...], rank: int, width: int
) -> None:
    pathway = TurboConn(connections, rank=rank).build(6, width)
    assert count(pathway) == len(connections) * (2 * rank * width + rank + width)
    assert pathway.state_width == len(connections) * rank


# The wirings of the paper's appendix A.5: each destination by its source.
WIRINGS: dict[str, dict[int, list[int]]] = {
    "llama-3.2-1b": {6: [0], 8: [0, 2], 10: [0, 2, 4], 12: [0, 2, 4, 6], 14: [0, 2, 4, 6, 8]},
    "llama-3.1-8b": {s: list(range(7, s - 6, 2)) for s in range(14, 31, 2)},
    "qwen3-1.7b": {
        12: [4],
        15: [4, 7],
        18: [4, 7, 10],
        21: [4, 7, 10, 13],
        24: [4, 7, 10, 13, 16],
        27: [4, 7, 10, 13, 16, 19],
    },
}
PUBLISHED = {"llama-3.2-1b": 15, "llama-3.1-8b": 45, "qwen3-1.7b": 21}
SHAPES: dict[str, tuple[Any, Any]] = {
    "llama-3.2-1b": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
        ),
    ),
    "llama-3.1-8b": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        ),
    ),
    "qwen3-1.7b": (
        Qwen3ForCausalLM,
        Qwen3Config(
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        ),
    ),
}
# Trainable parameters: connections and LoRA of rank 120 on all linear layers; LoRA of rank 140
# alone.
TRAINABLE = {
    "llama-3.2-1b": (91_946_760, 98_631_680),
    "llama-3.1-8b": (358_999_320, 367_001_600),
    "qwen3-1.7b": (141_111_768, 152_535_040),
}


@pytest.mark.parametrize("name", WIRINGS)
def test_presets_are_the_papers_wirings(name: str) -> None:
    preset = TurboConn.preset(name)
    expected = {
        (source, destination) for source, found in WIRINGS[name].items() for destination in found
    }
    assert set(preset.connections) == expected
    assert len(preset.connections) == PUBLISHED[name]
    assert (preset.lag, preset.alpha, preset.rank) == (4, 100.0, 120)
    other = TurboConn.preset(name, lag=8, alpha=1.0, rank=4)
    assert (other.lag, other.alpha, other.rank) == (8, 1.0, 4)


@pytest.mark.parametrize("name", SHAPES)
def test_presets_have_the_papers_number_of_trainable_parameters(name: str) -> None:
    kind, config = SHAPES[name]
    with torch.device("meta"):
        model = kind(config)
    per_rank = sum(
        module.in_features + module.out_features
        for place, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in place
    )
    undertow.attach(model, TurboConn.preset(name))
    connections = count(model.model.recurrence)
    assert {parameter.device.type for parameter in model.model.recurrence.parameters()} == {"meta"}
    assert connections == PUBLISHED[name] * (
        2 * 120 * config.hidden_size + 120 + config.hidden_size
    )
    assert (120 * per_rank + connections, 140 * per_rank) == TRAINABLE[name]


def test_turboconn_starts_as_nothing_and_can_learn() -> None:
    pathway = of(TurboConn(CONNECTIONS, lag=3, rank=6).build(4, 32))
    for up in pathway.up.values():
        assert bool((up.weight == 0).all())
        assert bool((up.bias == 0).all())
    for down in pathway.down.values():
        assert float(down.weight.detach().std()) > 0.05
    assert (pathway.lag, pathway.first_layer, pathway.stop_layer) == (3, 1, 4)
    assert pathway.writes == {1, 2, 3}
    assert pathway.reads == {3, 4}


def test_turboconn_reads_states_of_any_size_alike_if_it_normalises() -> None:
    plain, normal = (
        of(TurboConn(CONNECTIONS, rank=6, normalize=each).build(4, 32)).double()
        for each in (False, True)
    )
    hidden = torch.randn(2, 3, 32, dtype=torch.double)
    torch.testing.assert_close(
        normal.read(3, 1000 * hidden), normal.read(3, hidden), rtol=1e-6, atol=1e-6
    )
    assert not torch.allclose(plain.read(3, 1000 * hidden), plain.read(3, hidden))


def test_wired_takes_every_pair_that_is_far_enough_apart() -> None:
    wired = TurboConn.wired([4, 2], [0, 1], min_gap=2, lag=2, alpha=1.0, rank=3, normalize=True)
    assert set(wired.connections) == {(4, 0), (4, 1), (2, 0)}
    assert (wired.lag, wired.alpha, wired.rank, wired.normalize) == (2, 1.0, 3, True)


# --- T²MLR


@pytest.mark.parametrize("width", [8, 33])
def test_t2mlr_has_its_number_of_parameters(width: int) -> None:
    assert count(T2MLR(0, 1).build(2, width)) == 5 * width**2 + 2 * width + 2


def test_t2mlr_starts_as_the_paper_says() -> None:
    torch.manual_seed(0)
    for gain in (0.01, 1.0):
        pathway = of(T2MLR(1, 2, gate_gain=gain).build(4, 64))
        assert pathway.gamma_recurrent.item() == pathway.gamma_current.item() == 0.0
        assert bool((pathway.gates.bias == 0).all())
        xavier = gain * math.sqrt(2 / (128 + 64))
        for gate in pathway.gates.weight.detach().chunk(2):
            assert float(gate.std()) == pytest.approx(xavier, rel=0.05)
        assert float(pathway.project.weight.detach().std()) == pytest.approx(
            1 / math.sqrt(3 * 64), rel=0.05
        )
        assert pathway.project.bias is None
        assert (pathway.lag, pathway.first_layer, pathway.stop_layer) == (1, 1, 3)


def test_the_papers_numbering() -> None:
    assert T2MLR.from_paper(13, 18) == T2MLR(12, 17)
    assert T2MLR.from_paper(1, 30, norm="clamped") == T2MLR(0, 29, norm="clamped")
    assert T2MLR(12, 17).norm == "rms"
    assert not T2MLR(12, 17).detach_residual


def random_t2mlr(**settings: Any) -> Any:
    torch.manual_seed(0)
    pathway = of(T2MLR(0, 1, **settings).build(2, 16)).double()
    with torch.no_grad():
        for parameter in pathway.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return pathway


def test_the_fusion_is_the_papers_equation() -> None:
    pathway = random_t2mlr()
    h, state = torch.randn(2, 2, 3, 16, dtype=torch.double).unbind()
    p = pathway.project(state)
    recurrent = torch.sigmoid(
        torch.cat([h, p], -1) @ pathway.gates.weight[:16].T + pathway.gates.bias[:16]
    )
    current = torch.sigmoid(
        torch.cat([h, p], -1) @ pathway.gates.weight[16:].T + pathway.gates.bias[16:]
    )
    want = (
        torch.tanh(pathway.gamma_recurrent) * recurrent * p
        + torch.tanh(pathway.gamma_current) * current * h
    )
    torch.testing.assert_close(pathway.write(0, h, state), want)


def test_the_state_is_normalised() -> None:
    y, state = torch.randn(2, 2, 3, 16, dtype=torch.double).unbind()
    for pathway in (random_t2mlr(), random_t2mlr(norm="clamped")):
        new = pathway.update([y], state)
        torch.testing.assert_close(
            new.pow(2).mean(-1), torch.ones(2, 3, dtype=torch.double), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(new, pathway.update([y + state], None))


@pytest.mark.parametrize(("size", "scale"), [(1e-3, 5.0), (1.0, None), (1e3, 0.2)])
def test_the_clamped_norm_scales_within_limits(size: float, scale: float | None) -> None:
    """Beyond them it is no normalisation; the paper's norm knows none."""
    y = size * torch.nn.functional.rms_norm(torch.randn(2, 3, 16, dtype=torch.double), (16,))
    clamped = random_t2mlr(norm="clamped").update([y], None)
    torch.testing.assert_close(clamped, y * (1.0 if scale is None else scale), rtol=1e-4, atol=1e-9)
    if size >= 1:
        plain = random_t2mlr().update([y], None)
        torch.testing.assert_close(plain, y / size, rtol=1e-4, atol=1e-9)


def test_the_clamped_norms_scale_is_a_constant_in_the_backward_pass() -> None:
    y = torch.randn(1, 1, 16, dtype=torch.double, requires_grad=True)
    direction = torch.randn(16, dtype=torch.double)
    new = random_t2mlr(norm="clamped").update([y], None)
    (gradient,) = torch.autograd.grad((new * direction).sum(), y)
    torch.testing.assert_close(gradient[0, 0], direction * (new / y).mean().detach())
    (other,) = torch.autograd.grad((random_t2mlr().update([y], None) * direction).sum(), y)
    assert float((other * y.detach()).sum()) == pytest.approx(0, abs=1e-4), (
        "a true norm does not feel the length of y"
    )
    assert abs(float((gradient * y.detach()).sum())) > 0.1


@pytest.mark.parametrize("norm", ["rms", "clamped"])
@pytest.mark.parametrize("detached", [False, True])
def test_a_detached_residual_carries_no_gradient_and_the_same_value(
    detached: bool, norm: str
) -> None:
    y, state = torch.randn(2, 2, 3, 16, dtype=torch.double).unbind()
    state = state.clone().requires_grad_()
    y = y.clone().requires_grad_()
    new = random_t2mlr(norm=norm, detach_residual=detached).update([y], state)
    torch.testing.assert_close(new, random_t2mlr(norm=norm).update([y], state))
    gradient = torch.autograd.grad(new.pow(3).sum(), (y, state), allow_unused=True)
    assert gradient[0] is not None
    assert (gradient[1] is None) == detached


def test_the_gammas_stay_in_single_precision() -> None:
    model = undertow.attach(
        LlamaForCausalLM(
            LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
        ),
        T2MLR(0, 1),
    )
    gamma = model.model.recurrence.pathway.gamma_recurrent
    with torch.no_grad():
        gamma.fill_(0.123456789)
    exact = gamma.item()
    for cast in (torch.bfloat16, torch.float16, torch.float32):
        model.to(cast)
        pathway = model.model.recurrence.pathway
        assert pathway.gamma_recurrent.dtype == pathway.gamma_current.dtype == torch.float32
        assert pathway.gates.weight.dtype == cast
        assert pathway.gamma_recurrent.item() == exact, (
            "and keep their value, not one rounded on the way"
        )
        assert isinstance(pathway, T2MLRPathway)
    assert model.double().model.recurrence.pathway.gamma_current.dtype == torch.double
    half = undertow.attach(model_in_half(), T2MLR(0, 1))
    assert half.model.recurrence.pathway.gamma_current.dtype == torch.float32
    assert half.model.recurrence.pathway.project.weight.dtype == torch.bfloat16
    assert half(torch.tensor([[1, 2, 3]])).logits.dtype == torch.bfloat16


def model_in_half() -> LlamaForCausalLM:
    config = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    return LlamaForCausalLM(config).to(torch.bfloat16)


# --- soft tokens


def test_soft_tokens_mix_the_expected_embedding_in() -> None:
    pathway = SoftToken(0.25).build(4, 16, decode=lambda h: 2 * h)
    h, state = torch.randn(2, 2, 3, 16).unbind()
    torch.testing.assert_close(h + pathway.write(0, h, state), 0.75 * h + 0.25 * state)
    assert torch.equal(pathway.update([pathway.read(4, h)], state), 2 * h)
    assert count(pathway) == 0
    assert (pathway.first_layer, pathway.stop_layer, pathway.lag) == (0, 4, 1)
    assert SoftToken().weight == 0.1


# --- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TurboConn(()), "has no connections"),
        (lambda: TurboConn(((0, 3),)), "connection 0 -> 3 goes up.*swap it to 3 -> 0"),
        (lambda: TurboConn(((3, 0), (3, 0))), "3 -> 0 is listed twice"),
        (lambda: TurboConn(((3, 0),), lag=0), "lag is 0"),
        (lambda: TurboConn(((3, 0),), rank=0), "rank is 0"),
        (lambda: TurboConn.wired([3], [0, 1], min_gap=4), "no source lies 4 layers above"),
        (lambda: TurboConn.preset("llama-3.2-1B"), "did you mean 'llama-3.2-1b'"),
        (
            lambda: TurboConn(((4, 0),)).build(4, 8),
            "TurboConn's source layer 4 is outside the model",
        ),
        (lambda: TurboConn(((3, -1),)).build(4, 8), "TurboConn's destination layer -1 is outside"),
        (lambda: T2MLR(3, 2), "first_layer 3 lies above its last_layer 2"),
        (
            lambda: T2MLR(0, 4).build(4, 8),
            "last_layer 4 is outside the model, whose layers are 0 to 3",
        ),
        (lambda: T2MLR(-1, 2).build(4, 8), "first_layer -1 is outside"),
        (lambda: T2MLR.from_paper(0, 4).build(4, 8), "first_layer -1 is outside"),
        (lambda: SoftToken(-0.1), "SoftToken: weight is -0.1"),
        (lambda: SoftToken(1.5), "weight is 1.5; use 1 or less"),
        (lambda: SoftToken(0.1).build(4, 8), "needs the model's vocabulary"),
    ],
)
def test_settings_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_settings_are_values() -> None:
    assert set(RECURRENCES) == {"turboconn", "t2mlr", "soft-token"}
    assert TurboConn([[3, 0], [2, 1]]) == TurboConn(((3, 0), (2, 1)))  # type: ignore[arg-type]
    assert hash(T2MLR(0, 3)) == hash(T2MLR(0, 3))
    with pytest.raises(AttributeError):
        T2MLR(0, 3).first_layer = 2  # type: ignore[misc]
