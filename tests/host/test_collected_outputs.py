"""Hidden states, attentions and router logits are those of one pass of each layer, whatever the
solver ran."""

from typing import Any

import pytest
import torch
import zoo
from helpers import CACHE, CHANGED, PATHWAYS, SAME, difference, hosted, tokens, unhosted
from transformers import PreTrainedModel

import undertow
from undertow import ConfigError, Looped, UnsupportedArchitectureError
from undertow.depth import LatentDifference
from undertow.lab.inspections.probes import recording
from undertow.solvers import Auto, Chunked, Jacobi, Scan, Sequential, Solver

SOLVERS: dict[str, Solver] = {
    "sequential": Sequential(),
    "adjoint": Sequential("adjoint(1)"),
    "jacobi": Jacobi(4, 2),
    "scan": Scan(2, 1),
    "chunked": Chunked(4, Scan(1, 0)),
    "chunked-sequential": Chunked(4, Sequential()),
    "auto": Auto(rollout_cost=4.0),
}
# Not those that collect in their own loop over the layers.
COLLECTING = [
    "llama",
    "qwen3_swa",
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "opt",
]
MIXTURES = {"mixtral", "gpt_oss", "deepseek_v2"}
NAMES = ("hidden_states", "attentions", "router_logits")
LOOP = Looped((0,), (1, 2), (3,), depth=3, injection="none")


def eager(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


def collected(model: PreTrainedModel, ids: torch.Tensor, **inputs: Any) -> Any:
    asked = {"output_hidden_states": True, "output_attentions": True} | (
        {"output_router_logits": True} if moe(model) else {}
    )
    return model(input_ids=ids, **({"use_cache": False} | asked | inputs))


def moe(model: PreTrainedModel) -> bool:
    return hasattr(model.config, "output_router_logits")


def same(got: Any, want: Any, real: torch.Tensor | None = None) -> None:
    """At tokens that are `real` ``[B, T]``: what padding attends to is anything."""
    for name in NAMES:
        if name not in want:
            continue
        assert len(got[name]) == len(want[name]), name
        for one, other in zip(got[name], want[name], strict=True):
            assert one.shape == other.shape, name
            if real is not None:
                one, other = of_tokens(name, one, real), of_tokens(name, other, real)
            assert difference(one.detach(), other.detach()) < SAME, name


def of_tokens(name: str, output: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    if name == "attentions":
        return output.transpose(1, 2)[real]
    return output[real] if name == "hidden_states" else output[real.flatten()]


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("name", "pathway"), [("llama", "turboconn-3"), ("mixtral", "t2mlr-middle")]
)
def test_a_recurrence_that_starts_at_zero_returns_what_the_base_model_does(
    name: str, pathway: str, solver: str, learning: bool
) -> None:
    model, ids = eager(unhosted(name)), tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.set_grad_enabled(learning):
        want = collected(model, ids, attention_mask=mask)
        assert len(want.hidden_states) == 5
        assert [list(a.shape) for a in want.attentions] == [[2, 4, 11, 11]] * 4
        undertow.attach(model, PATHWAYS[pathway], SOLVERS[solver])
        if not learning:
            undertow.set_solver(model, prefill=Scan(2, 0) if solver == "auto" else SOLVERS[solver])
        same(collected(model, ids, attention_mask=mask), want, mask.bool())


@pytest.mark.parametrize("name", COLLECTING)
def test_every_kind_of_model_that_collects_by_hooks(name: str) -> None:
    model, ids = eager(unhosted(name)), tokens(2, 9)
    with torch.no_grad():
        want = collected(model, ids)
        assert len(want.hidden_states) == 5 and len(want.attentions) == 4
        assert (len(want.get("router_logits") or ()) > 0) == (name in MIXTURES)
        undertow.attach(model, PATHWAYS["t2mlr-middle"])
        same(collected(model, ids), want)


@pytest.mark.parametrize("pathway", ["turboconn-3", "t2mlr-middle", "t2mlr-whole"])
def test_they_are_those_of_the_solution(pathway: str) -> None:
    """The exact rollout's, of which no pass covers all tokens, equal those of one pass at its
    states."""
    model, ids = eager(hosted("llama", pathway)), tokens(2, 9)
    with torch.no_grad():
        exact = collected(model, ids)
        undertow.set_solver(model, prefill=Scan(9, 0))
        same(collected(model, ids), exact)
        base = collected(undertow.detach(model), ids)
    assert torch.equal(exact.hidden_states[0], base.hidden_states[0]), (
        "the embeddings, before the recurrence writes"
    )
    assert difference(exact.hidden_states[3], base.hidden_states[3]) > CHANGED
    assert difference(model.lm_head(exact.hidden_states[-1]), exact.logits) < SAME


def test_tokens_after_a_cache() -> None:
    """Groups of tokens that continue a cache, with a window that has moved on."""
    base, ids = eager(unhosted("qwen3_swa")), tokens(2, 14)
    model = undertow.attach(eager(unhosted("qwen3_swa")), PATHWAYS["turboconn-3"])
    with torch.no_grad():
        found = []
        for each in (base, model):
            first = collected(each, ids[:, :9], use_cache=True)
            found.append(
                (first, collected(each, ids[:, 9:], use_cache=True, **{CACHE: first[CACHE]}))
            )
    for want, got in zip(*found, strict=True):
        same(got, want)
    assert [a.shape[-2] for a in found[1][1].attentions] == [5] * 4


def test_selected_hidden_states() -> None:
    model, ids = unhosted("llama"), tokens(2, 7)
    with torch.no_grad():
        want = model(ids, output_hidden_states=[0, -2]).hidden_states
        got = undertow.attach(model, PATHWAYS["turboconn-1"])(
            ids, output_hidden_states=[0, -2]
        ).hidden_states
    assert (
        [state is None for state in got]
        == [state is None for state in want]
        == [False, True, True, False, True]
    )
    assert all(difference(got[i], want[i]) < SAME for i in (0, 3))


def test_generation_returns_them_for_each_step() -> None:
    model, ids = hosted("llama", "t2mlr-middle"), tokens(1, 5)
    asked: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "do_sample": False,
    }
    states = model.generate(ids, max_new_tokens=3, **asked).hidden_states
    assert [[list(state.shape) for state in step] for step in states] == [
        [[1, n, 32]] * 5 for n in (5, 1, 1)
    ]


# --- losses


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("solver", ["sequential", "scan", "auto"])
def test_the_loss_of_the_routers(solver: str, checkpointing: bool) -> None:
    """A model whose config asks for it, from before attaching on."""
    model, ids = unhosted("mixtral"), tokens(2, 9)
    model.config.output_router_logits, model.router_aux_loss_coef = True, 1.0
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def losses() -> tuple[float, torch.Tensor]:
        model.zero_grad()
        output = model(ids, attention_mask=mask, labels=ids, use_cache=False)
        output.loss.backward()
        (gradient,) = [
            p.grad.clone()
            for n, p in model.named_parameters()
            if n.endswith("layers.1.mlp.gate.weight")
        ]
        return float(output.aux_loss), gradient

    want, gradient = losses()
    undertow.attach(model, PATHWAYS["t2mlr-middle"], SOLVERS[solver])
    assert model.config.output_router_logits is True
    got, own = losses()
    assert got == pytest.approx(want, rel=1e-5)
    assert difference(own, gradient) < SAME
    model.config.output_router_logits = False
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    (without,) = [
        p.grad for n, p in model.named_parameters() if n.endswith("layers.1.mlp.gate.weight")
    ]
    assert difference(without, gradient) > SAME, "control: the routers' loss has a gradient"


# --- loops


@pytest.mark.parametrize("pathway", [None, "t2mlr-middle"])
def test_a_looped_layers_are_those_of_its_last_iteration(pathway: str | None) -> None:
    ids = tokens(2, 7)
    model = undertow.attach(eager(unhosted("llama")), LOOP)
    if pathway is not None:
        undertow.attach(model, undertow.T2MLR(0, 3))
    with torch.no_grad():
        with recording(list(model.model.layers)) as calls:
            got = collected(model, ids)
        assert [list(h.shape) for h in got.hidden_states] == [[2, 7, 32]] * 5
        assert [list(a.shape) for a in got.attentions] == [[2, 4, 7, 7]] * 4
        # In order, a rollout's tokens one by one; of each run of the loop the last iteration.
        last = torch.cat(calls[2][LOOP.depth - 1 :: LOOP.depth], dim=1)
        assert difference(got.hidden_states[3], last) < SAME
        once = collected(model, ids, depth=1)
        same(once, collected(eager(unhosted("llama")), ids))
        assert difference(got.hidden_states[3], once.hidden_states[3]) > CHANGED


def test_a_layer_that_the_loop_leaves_out_passes_its_input_on() -> None:
    model, ids = (
        undertow.attach(eager(unhosted("llama")), Looped((0,), (2,), (3,), depth=2)),
        tokens(2, 7),
    )
    with torch.no_grad():
        got = collected(model, ids)
    assert len(got.hidden_states) == 5 and len(got.attentions) == 3
    assert torch.equal(got.hidden_states[2], got.hidden_states[1])


# --- what is refused


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo", "mpt"])
def test_a_model_that_collects_in_its_own_loop_is_refused(name: str) -> None:
    model, ids = undertow.attach(unhosted(name), PATHWAYS["t2mlr-middle"]), tokens(2, 7)
    want = model(ids).logits
    for asked in ("output_hidden_states", "output_attentions"):
        with pytest.raises(UnsupportedArchitectureError, match=f"{asked}.*leave {asked} out"):
            model(ids, **{asked: True})
    assert torch.equal(model(ids).logits, want), "and works without"
    model.config.output_hidden_states = True
    with pytest.raises(UnsupportedArchitectureError, match="output_hidden_states"):
        model(ids)


def test_an_exit_rule_is_refused() -> None:
    model = undertow.attach(unhosted("llama"), LOOP)
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match="output_hidden_states and exit_rule are both given"),
    ):
        model(tokens(2, 7), output_hidden_states=True, exit_rule=LatentDifference(0.1))


@pytest.mark.slow
def test_control_the_zoo_has_no_other_model_that_collects_in_its_own_loop() -> None:
    """Each either collects by hooks or is refused: none returns wrong outputs."""
    ids = tokens(2, 6)
    refused = []
    for name in zoo.ARCHITECTURES:
        model = undertow.attach(unhosted(name), PATHWAYS["turboconn-3"])
        try:
            with torch.no_grad():
                states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        except UnsupportedArchitectureError:
            refused.append(name)
            continue
        with torch.no_grad():
            want = undertow.detach(model)(
                ids, output_hidden_states=True, use_cache=False
            ).hidden_states
        same({"hidden_states": states}, {"hidden_states": want})
    assert {"bloom", "falcon", "gpt_neo", "mpt"} <= set(refused) and len(refused) < 8, refused
