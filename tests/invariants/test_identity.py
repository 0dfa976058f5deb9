"""A recurrence whose weights are still zero leaves the model as it was; detaching gives it back."""

import copy

import pytest
import torch
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
    some,
    steps,
    tokens,
    unhosted,
)
from torch import nn

import undertow
from undertow import SoftToken
from undertow.pathways import Recurrence


def untrained(pathway: str) -> Recurrence:
    return SoftToken(0.0) if pathway == "soft-token" else PATHWAYS[pathway]


@pytest.mark.parametrize(("name", "pathway"), some(each=3))
def test_an_untrained_recurrence_changes_no_logits(name: str, pathway: str) -> None:
    model, ids = unhosted(name), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    plain, padded = logits(model, ids), logits(model, ids, attention_mask=mask)
    undertow.attach(model, untrained(pathway))
    assert difference(logits(model, ids), plain) < 1e-4
    assert difference(logits(model, ids, attention_mask=mask)[:, 3:], padded[:, 3:]) < 1e-4
    if pathway != "soft-token":
        assert difference(logits(randomize(model), ids), plain) > CHANGED, (
            "the control: trained, it does"
        )


# mpt generates without a cache, and so runs its layers on more and more tokens.
@pytest.mark.parametrize(
    ("name", "pathway"), some((n for n in ARCHITECTURES if n != "mpt"), each=2)
)
def test_where_the_same_kernels_run_the_logits_are_bitwise_equal(name: str, pathway: str) -> None:
    """From a single token on, every step runs each layer on one token, hosted or not."""
    model, ids = unhosted(name), tokens(2, 1)
    sequences, plain = steps(model, ids, new=8)
    undertow.attach(model, untrained(pathway))
    hosted_sequences, hosted_logits = steps(model, ids, new=8)
    assert torch.equal(hosted_sequences, sequences)
    assert torch.equal(hosted_logits, plain)


def test_tokens_within_the_lag_run_as_in_the_base_model() -> None:
    model, ids = unhosted("llama"), tokens(2, 3)
    plain = logits(model, ids)
    randomize(undertow.attach(model, PATHWAYS["turboconn-3"]))
    assert torch.equal(logits(model, ids), plain), "no token has one three back"
    assert (
        difference(
            logits(model, tokens(2, 4))[:, 3:], logits(unhosted("llama"), tokens(2, 4))[:, 3:]
        )
        > CHANGED
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_detaching_gives_back_the_base_model(name: str) -> None:
    model, ids = unhosted(name), tokens(2, 7)
    plain, keys, modules = (
        logits(model, ids),
        list(model.state_dict()),
        [n for n, _ in model.named_modules()],
    )
    attributes = set(vars(model))
    randomize(undertow.attach(model, PATHWAYS["t2mlr-middle"]))
    assert difference(logits(model, ids), plain) > CHANGED
    assert [key for key in model.state_dict() if ".recurrence." not in key] == keys
    assert undertow.detach(model) is model
    assert torch.equal(logits(model, ids), plain)
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == modules
    assert set(vars(model)) == attributes
    assert {type(m) for m in model.modules() if isinstance(m, nn.ModuleList)} <= {nn.ModuleList}
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_attaching_keeps_the_class_the_modes_and_the_random_numbers() -> None:
    model = unhosted("qwen3").train()
    model.model.layers[1].eval()
    model.model.layers[2].requires_grad_(False)
    modes = [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    kind = type(model)
    torch.manual_seed(5)
    undertow.attach(model, SoftToken(0.2))  # draws no initial weights
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    assert type(model) is kind
    recurrence = {id(m) for m in model.model.recurrence.modules()}
    assert [m.training for m in model.modules() if id(m) not in recurrence] == modes
    assert [p.requires_grad for p in model.parameters()] == wanted


def test_a_model_can_be_given_another_recurrence() -> None:
    ids = tokens(2, 7)
    model = hosted("llama", "t2mlr-whole")
    undertow.detach(model)
    randomize(undertow.attach(model, PATHWAYS["turboconn-3"]))
    assert difference(logits(model, ids), logits(hosted("llama", "turboconn-3"), ids)) < ROUNDING


def test_two_hosted_models_do_not_meet() -> None:
    """Also when one runs inside the forward of the other, and after one failed in the middle of a
    forward."""
    first, second, ids = (
        hosted("llama", "t2mlr-whole"),
        hosted("llama", "turboconn-1"),
        tokens(2, 7),
    )
    alone = logits(first, ids), logits(second, ids)
    inner: list[torch.Tensor] = []
    handle = first.model.layers[2].register_forward_pre_hook(
        lambda module, args: None if inner else inner.append(logits(second, ids))
    )
    assert torch.equal(logits(first, ids), alone[0])
    assert torch.equal(inner[0], alone[1])
    handle.remove()

    def fail(module: nn.Module, args: object) -> None:
        raise KeyboardInterrupt

    handle = first.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits(first, ids)
    handle.remove()
    assert torch.equal(logits(second, ids), alone[1])
    assert torch.equal(logits(first, ids), alone[0])


def test_a_deep_copy_stands_alone() -> None:
    model, ids = hosted("llama", "turboconn-3"), tokens(2, 8)
    before, text = logits(model, ids), generate(model, ids)
    twin = copy.deepcopy(model)
    assert difference(logits(twin, ids), before) < ROUNDING
    randomize(twin, seed=9)
    changed = logits(twin, ids)
    assert difference(changed, before) > CHANGED
    assert torch.equal(logits(model, ids), before)
    undertow.detach(model)
    assert torch.equal(logits(twin, ids), changed)
    assert torch.equal(generate(randomize(twin), ids), text)


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_the_report_says_what_the_solver_did(pathway: str) -> None:
    model = undertow.attach(unhosted("llama"), PATHWAYS[pathway])
    assert undertow.report(model) is None
    logits(model, tokens(2, 7))
    report = undertow.report(model)
    assert report is not None
    assert (report.solver, report.tokens, report.sweeps) == ("sequential", 7, 1)
    assert (report.exact_prefix, report.residual) == (7, 0.0)
