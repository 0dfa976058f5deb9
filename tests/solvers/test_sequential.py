"""The exact rollout: its outputs and its gradients are those of the definition, for training as
well as for evaluation."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import reference
import torch
from helpers import (
    CHANGED,
    PATHWAYS,
    SAME,
    difference,
    hosted,
    logits,
    randomize,
    recurrent_parameters,
    tokens,
    unhosted,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import undertow
from undertow import T2MLR, Sequential, TurboConn
from undertow.host.rollout_cache import RolloutCache
from undertow.pathways import Recurrence

Gradients = dict[str, torch.Tensor]

IDS = tokens(2, 13)  # no multiple of any lag
# All arithmetic of these is in the precision of the parameters; the others round some of it to
# single precision.
DOUBLE = ["gpt2", "gpt_neox", "opt"]
SINGLE = [
    "llama",
    "qwen3",
    "gemma3",
    "mixtral",
    "falcon",
    "bloom",
    "granite",
    "deepseek_v2",
    "gpt_oss",
]
SETTINGS: dict[str, Recurrence] = PATHWAYS | {
    "turboconn-2": TurboConn(((3, 0), (2, 1)), lag=2, alpha=1.0, rank=4, normalize=True),
    "t2mlr-clamped": T2MLR(0, 2, norm="clamped"),
    "t2mlr-detached": T2MLR(1, 3, detach_residual=True),
}


def loss_of(logits: torch.Tensor, ids: torch.Tensor = IDS) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss(model: nn.Module) -> torch.Tensor:
    return loss_of(model(input_ids=IDS, use_cache=False).logits)


def gradients(model: nn.Module, value: torch.Tensor | None = None) -> Gradients:
    """The gradients of the loss, by the names of the parameters."""
    model.zero_grad()
    (loss(model) if value is None else value).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def definition(
    name: str, model: PreTrainedModel, recurrence: Recurrence, truncate: int | None = None
) -> tuple[torch.Tensor, Gradients]:
    """Logits and gradients of the naive rollout through an unhosted model with the weights of
    `model`."""
    base = unhosted(name).to(model.dtype)
    weights = {
        key: p.detach().clone().requires_grad_() for key, p in recurrent_parameters(model).items()
    }
    output = reference.rollout(base, recurrence, weights, IDS, truncate=truncate)
    loss_of(output).backward()
    found = {key: p.grad for key, p in base.named_parameters() if p.grad is not None}
    place = next(
        (
            key.partition("recurrence.")[0]
            for key, _ in model.named_parameters()
            if "recurrence." in key
        ),
        "",
    )
    found |= {
        f"{place}recurrence.pathway.{key}": p.grad
        for key, p in weights.items()
        if p.grad is not None
    }
    return output.detach(), found


def worst(got: Gradients, want: Gradients) -> float:
    """The largest difference of any parameter's gradient, relative to the size of that gradient."""
    assert got.keys() == want.keys(), set(got) ^ set(want)
    floor = 1e-4 * max(float(g.abs().max()) for g in want.values())
    return max(
        float((got[key] - want[key]).abs().max()) / max(float(want[key].abs().max()), floor)
        for key in want
    )


def fitting(names: list[str], pathways: list[str]) -> list[tuple[str, str]]:
    return [
        (n, p)
        for n in names
        for p in pathways
        if not (p == "soft-token" and n in ("gpt2", "opt", "bloom"))
    ]


@pytest.mark.parametrize(("name", "pathway"), fitting(DOUBLE, list(SETTINGS)))
def test_gradients_equal_the_definition(name: str, pathway: str) -> None:
    model = hosted(name, SETTINGS[pathway]).double()
    output, want = definition(name, model, SETTINGS[pathway])
    assert difference(logits(model, IDS), output) < 1e-10
    assert worst(gradients(model), want) < 1e-8


@pytest.mark.parametrize(
    ("name", "pathway"), fitting(SINGLE, ["turboconn-3", "t2mlr-whole", "soft-token"])
)
def test_gradients_equal_the_definition_in_single_precision(name: str, pathway: str) -> None:
    model = hosted(name, pathway)
    output, want = definition(name, model, PATHWAYS[pathway])
    assert difference(logits(model, IDS), output) < SAME
    assert worst(gradients(model), want) < 1e-3


@pytest.mark.parametrize(
    "pathway", [p for p in SETTINGS if p not in ("soft-token", "t2mlr-clamped", "t2mlr-detached")]
)
def test_gradients_equal_finite_differences(pathway: str) -> None:
    """Of each parameter of the recurrence and of each layer, along a random direction. (A detached
    gradient is none.)"""
    model = hosted("gpt2", SETTINGS[pathway]).double()
    found, generator = gradients(model), torch.Generator().manual_seed(0)
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        group = name if "recurrence" in name else ".".join(name.split(".")[:3])
        groups.setdefault(group, []).append((name, parameter))
    for group, parameters in groups.items():
        directions = [
            torch.randn(p.shape, generator=generator, dtype=torch.double) for _, p in parameters
        ]
        values = []
        with torch.no_grad():
            for step in (1e-6, -2e-6):
                for (_, parameter), direction in zip(parameters, directions, strict=True):
                    parameter.add_(step * direction)
                values.append(loss(model).item())
            for (_, parameter), direction in zip(parameters, directions, strict=True):
                parameter.add_(1e-6 * direction)
        analytic = sum(
            float((found[name] * d).sum())
            for (name, _), d in zip(parameters, directions, strict=True)
        )
        assert analytic == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-7), group


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("pathway", ["turboconn-1", "turboconn-2", "turboconn-3", "t2mlr-middle"])
def test_truncated_gradients_equal_the_definition_with_detached_states(
    pathway: str, steps: int
) -> None:
    model = hosted(
        "gpt2", SETTINGS[pathway], solver=Sequential(gradient=f"truncated({steps})")
    ).double()
    output, want = definition("gpt2", model, SETTINGS[pathway], truncate=steps)
    assert difference(logits(model, IDS), output) < 1e-10, "truncation changes no outputs"
    got = gradients(model)
    assert worst(got, want) < 1e-8
    undertow.set_solver(model, Sequential())
    whole = gradients(model)  # truncated to one group, `down` never gets any
    assert worst(got, {key: whole[key] for key in got}) > CHANGED, (
        "the control: the gradients are other ones"
    )


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_gradients_do_not_depend_on_the_mode(pathway: str) -> None:
    model = hosted("llama", pathway)
    in_eval, in_train = gradients(model.eval()), gradients(model.train())
    assert all(torch.equal(in_train[key], in_eval[key]) for key in in_eval)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "falcon", "mixtral", "opt"])
@pytest.mark.parametrize("pathway", ["turboconn-1", "turboconn-3", "t2mlr-middle"])
def test_activation_checkpointing_changes_no_gradient(name: str, pathway: str) -> None:
    model = hosted(name, pathway).train()
    want_loss, want = loss(model).item(), gradients(model)
    model.gradient_checkpointing_enable()
    calls = []
    handle = model.get_submodule(layers_of(model))[1].register_forward_hook(
        lambda *args: calls.append(1)
    )
    got_loss, got = loss(model).item(), gradients(model)
    handle.remove()
    assert got_loss == want_loss
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    forwards = -(-IDS.shape[1] // PATHWAYS[pathway].build(4, 32).lag)
    assert len(calls) == 3 * forwards, (
        "one forward alone, one with its backward: the layer ran again in that"
    )
    model.gradient_checkpointing_disable()
    assert all(torch.equal(g, want[key]) for key, g in gradients(model).items())


def layers_of(model: PreTrainedModel) -> str:
    return next(name for name in reference.PLACES if reference._has(model, name))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_control_the_librarys_own_checkpointing_loses_the_cache(name: str) -> None:
    """A rollout over the plain model with checkpointing on is another computation, with no
    error."""
    model = hosted(name, "t2mlr-middle")
    weights = {key: p.detach() for key, p in recurrent_parameters(model).items()}
    base = unhosted(name).train()
    want = reference.rollout(base, PATHWAYS["t2mlr-middle"], weights, IDS)
    base.gradient_checkpointing_enable()
    got = reference.rollout(base, PATHWAYS["t2mlr-middle"], weights, IDS)
    assert abs((loss_of(got) - loss_of(want)).item()) > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_two_backward_passes_through_one_graph(pathway: str, checkpointing: bool) -> None:
    model = hosted("llama", pathway).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    value = loss(model)
    model.zero_grad()
    value.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    value.backward()
    second = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_a_backward_pass_over_some_tokens_leaves_nothing_behind(pathway: str) -> None:
    """Each token's loss on its own, through one graph, sums to the gradient of their sum."""
    model = hosted("llama", pathway)
    output = model(input_ids=IDS, use_cache=False).logits
    losses = F.cross_entropy(output[:, :-1].transpose(1, 2), IDS[:, 1:], reduction="none").sum(0)
    model.zero_grad()
    for token in (7, 0, 3, 11, 8, 4, 10, 1, 6, 2, 9, 5):
        losses[token].backward(retain_graph=True)
    apart = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert worst(apart, gradients(model, losses.sum())) < 1e-3


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_gradients_of_embeddings(pathway: str) -> None:
    """Also by `autograd.grad`, which runs only the part of the graph that leads to its inputs, and
    after it, the rest."""
    model = hosted("llama", pathway)
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    value = loss_of(model(inputs_embeds=embeddings, use_cache=False).logits)
    early = embeddings.detach().clone()
    (alone,) = torch.autograd.grad(value, embeddings, retain_graph=True)
    model.zero_grad()
    value.backward()
    assert torch.equal(embeddings.grad, alone)
    step = torch.zeros_like(early)
    step[:, 2] = 1e-3
    with torch.no_grad():
        numeric = loss_of(model(inputs_embeds=early + step, use_cache=False).logits)
        numeric -= loss_of(model(inputs_embeds=early - step, use_cache=False).logits)
    assert float(alone[:, 2].sum()) == pytest.approx(float(numeric) / 2e-3, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
@pytest.mark.parametrize("pathway", ["turboconn-1", "turboconn-3", "t2mlr-middle", "t2mlr-whole"])
def test_training_the_recurrence_alone(name: str, pathway: str) -> None:
    """As with LoRA: the base model is frozen, and the prefix carries no gradient."""
    model = hosted(name, pathway)
    want = {key: g for key, g in gradients(model).items() if "recurrence" in key}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("recurrence" in key)
    got = gradients(model)
    assert worst(got, want) < 1e-4
    before = loss(model).item()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.005)
    for _ in range(3):
        gradients(model)
        optimiser.step()
    assert loss(model).item() < before


@pytest.mark.parametrize("pathway", ["turboconn-3", "t2mlr-middle", "soft-token"])
def test_training_one_layer_alone(pathway: str) -> None:
    """With a frozen recurrence the gradient still goes back through the states."""
    model = hosted("llama", pathway)
    want = {key: g for key, g in gradients(model).items() if "layers.2.mlp" in key}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2.mlp" in key)
    assert worst(gradients(model), want) < 1e-4


@pytest.mark.parametrize("pathway", ["turboconn-3", "t2mlr-whole"])
def test_an_untrained_recurrence_learns(pathway: str) -> None:
    """Zero at the start, and not stuck there: the papers' initialisation gives the recurrence a
    gradient."""
    model = undertow.attach(unhosted("llama"), PATHWAYS[pathway], undertow.Sequential())
    found = {key: g for key, g in gradients(model).items() if "recurrence" in key}
    assert any(float(g.abs().max()) > 0 for g in found.values())
    optimiser = torch.optim.Adam(recurrent_parameters(model).values(), lr=0.01)
    before = loss(model).item()
    for _ in range(5):
        gradients(model)
        optimiser.step()
    assert loss(model).item() < before
    assert all(
        float(g.abs().max()) > 0 for key, g in gradients(model).items() if "recurrence" in key
    )


def test_training_with_a_cache_and_padding_equals_training_without() -> None:
    """A model makes itself a cache unless told not to; the gradients are the same."""
    model = hosted("llama", "turboconn-3").train()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    labels = IDS.masked_fill(mask == 0, -100)
    inputs = {"input_ids": IDS, "attention_mask": mask, "labels": labels}
    without = gradients(model, model(**inputs, use_cache=False).loss)
    cached = gradients(model, model(**inputs, use_cache=True).loss)
    assert worst(cached, without) < 1e-4


@pytest.mark.parametrize(
    "gradient", ["none", "full(2)", "truncated", "truncated()", "truncated(0)", "truncated(-1)", ""]
)
def test_a_gradient_setting_that_makes_no_sense(gradient: str) -> None:
    with pytest.raises(undertow.ConfigError, match="gradient is"):
        Sequential(gradient=gradient)


@pytest.mark.parametrize("pathway", ["turboconn-3", "t2mlr-middle"])
def test_control_gradients_of_another_definition(pathway: str) -> None:
    """Gradients that stop at the states are not the gradients."""
    model = hosted("gpt2", pathway).double()
    _, want = definition("gpt2", model, PATHWAYS[pathway], truncate=2)
    assert worst(gradients(model), want) > CHANGED
    randomize(model, seed=5)
    _, other = definition("gpt2", model, PATHWAYS[pathway])
    assert worst(gradients(randomize(model)), other) > CHANGED


# --- the rollout's cache, against concatenation


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.softmax(queries @ keys.transpose(-1, -2), dim=-1) @ values


Update = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def run(
    inputs: list[torch.Tensor],
    groups: list[int],
    layers: int,
    update: Update,
    group: Callable[[int], AbstractContextManager[object]],
) -> list[torch.Tensor]:
    """A small rollout: each group's keys and values come from the last group's outputs, so that
    gradients flow in time."""
    queries, keys, values = inputs
    outputs, carried, start = [], torch.zeros_like(queries[:, :, :1]), 0
    for size in groups:
        stop = start + size
        with group(start):
            for layer in range(layers):
                k = keys[:, :, start:stop] + carried
                v = values[:, :, start:stop] * (1 + carried)
                out = attend(queries[:, :, start:stop], *update(layer, k, v))
                carried = torch.tanh(out.mean(2, keepdim=True))
        outputs.append(out)
        start = stop
    return outputs


def concatenated(inputs: list[torch.Tensor], groups: list[int], layers: int) -> list[torch.Tensor]:
    held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in held:
            k, v = torch.cat([held[layer][0], k], dim=2), torch.cat([held[layer][1], v], dim=2)
        held[layer] = k, v
        return k, v

    return run(inputs, groups, layers, update, lambda start: nullcontext())


def rolled_out(inputs: list[torch.Tensor], groups: list[int], layers: int) -> list[torch.Tensor]:
    cache = RolloutCache(layers, sum(groups))
    links: list[torch.Tensor | None] = [torch.zeros((), dtype=torch.double, requires_grad=True)]

    @contextmanager
    def group(start: int) -> Iterator[None]:
        with cache.group(start, links[-1]) as slot:
            yield
            links.append(slot.chain)

    return run(inputs, groups, layers, lambda layer, k, v: cache.update(k, v, layer), group)


rollouts = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1000),
)


@settings(max_examples=60, deadline=None)
@given(case=rollouts, data=st.data())
def test_the_rollout_cache_is_concatenation(
    case: tuple[list[int], int, int, int], data: st.DataObject
) -> None:
    """Outputs, and gradients of any of the groups' outputs, in any order, through one graph again
    and again."""
    groups, layers, heads, seed = case
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, sum(groups), 3)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.double) for _ in range(3)]
    sides = []
    for function in (concatenated, rolled_out):
        inputs = [x.clone().requires_grad_() for x in drawn]
        sides.append((inputs, function(inputs, groups, layers)))
    for want, got in zip(sides[0][1], sides[1][1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    passes = data.draw(
        st.lists(
            st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=3, unique=True),
            min_size=1,
            max_size=3,
        )
    )
    for chosen in passes:
        wanted = data.draw(st.sampled_from([(0, 1, 2), (1,), (0, 2)]))
        found = []
        for inputs, outputs in sides:
            value = sum((outputs[i] * (i + 1.5)).pow(2).sum() for i in chosen)
            leaves = [inputs[i] for i in wanted]
            found.append(torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True))
        for want, got in zip(*found, strict=True):
            want, got = (
                torch.zeros(shape, dtype=torch.double) if g is None else g for g in (want, got)
            )
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_a_backward_pass_that_stops_half_way_leaves_nothing_for_the_next() -> None:
    """`autograd.grad` of a late group's keys alone does not reach the early groups, whose slots
    must not keep its share."""
    parts = [torch.randn(1, 1, 2, 3, dtype=torch.double) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in parts]
    cache = RolloutCache(1, 6)
    chain: torch.Tensor | None = torch.zeros((), dtype=torch.double, requires_grad=True)
    total = torch.zeros((), dtype=torch.double)
    for index, leaf in enumerate(leaves):
        with cache.group(2 * index, chain) as slot:
            keys, values = cache.update(leaf, leaf * 1, 0)
            chain = slot.chain
        total = total + (keys.pow(2) + values.pow(3)).sum()
    grown = [x.clone().requires_grad_() for x in parts]
    want = torch.autograd.grad(
        sum(
            (torch.cat(grown[: i + 1], 2).pow(2) + torch.cat(grown[: i + 1], 2).pow(3)).sum()
            for i in range(3)
        ),
        grown,
    )
    (late,) = torch.autograd.grad(total, leaves[2], retain_graph=True)
    torch.testing.assert_close(late, want[2])
    for got, expected in zip(torch.autograd.grad(total, leaves), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_buffers_are_written_in_place() -> None:
    """No copy of a prefix is made: every view lies in the same memory."""
    cache = RolloutCache(1, 6)
    with cache.group(0, None):
        first, _ = cache.update(torch.rand(1, 2, 4, 3), torch.rand(1, 2, 4, 3), 0)
    with cache.group(4, None):
        second, _ = cache.update(torch.rand(1, 2, 2, 3), torch.rand(1, 2, 2, 3), 0)
    assert second.shape == (1, 2, 6, 3)
    assert second.data_ptr() == first.data_ptr()
    assert cache.get_seq_length() == 4
    assert cache.get_mask_sizes(2, 0) == (6, 0)
