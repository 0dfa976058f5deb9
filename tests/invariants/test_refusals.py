"""What cannot carry a recurrence is refused by name, and left as it was."""

import pytest
import torch
import zoo
from helpers import PATHWAYS, WITHOUT_SOFT_TOKENS, difference, hosted, logits, tokens, unhosted
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import undertow
from undertow import T2MLR, ConfigError, SoftToken, TurboConn, UnsupportedArchitectureError
from undertow.host.attachment import find_pathway


def untouched(model: nn.Module, keys: list[str], kinds: list[type]) -> bool:
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks, *module._forward_pre_hooks)
    ]
    own = {"save_pretrained", "prepare_inputs_for_generation"} & set(vars(model))
    return (
        list(model.state_dict()) == keys
        and [type(m) for m in model.modules()] == kinds
        and not hooks
        and not own
    )


@pytest.mark.parametrize("pathway", ["turboconn-3", "t2mlr-middle"])
@pytest.mark.parametrize("name", zoo.UNSUPPORTED)
def test_an_unsupported_architecture_is_refused_by_name(name: str, pathway: str) -> None:
    model = zoo.build(name)
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedArchitectureError, match=type(model).__name__):
        undertow.attach(model, PATHWAYS[pathway])
    assert untouched(model, keys, kinds)


@pytest.mark.parametrize("name", sorted(set(zoo.ARCHITECTURES)))
def test_soft_tokens_need_a_first_layer_that_sees_embeddings(name: str) -> None:
    model = unhosted(name)
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    if name not in WITHOUT_SOFT_TOKENS:
        undertow.attach(model, SoftToken(0.2))
        return
    with pytest.raises(UnsupportedArchitectureError, match=f"{type(model).__name__}.*soft tokens"):
        undertow.attach(model, SoftToken(0.2))
    assert untouched(model, keys, kinds)


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("name", "changes", "scale"),
    [
        ("gemma2", {"hidden_size": 48}, 48**0.5),
        ("granite", {"embedding_multiplier": 3.3}, 3.3),
        ("llama", {}, 1.0),
    ],
)
def test_soft_tokens_know_the_embeddings_scale_in_half_precision(
    name: str, changes: dict[str, float], scale: float, dtype: torch.dtype
) -> None:
    """Neither scale is a number of half precision; Gemma rounds its own to one."""
    plain = unhosted(name)
    plain.config.update(changes)
    torch.manual_seed(0)
    model = undertow.attach(type(plain)(plain.config).to(dtype).eval(), SoftToken(0.2))
    if name == "gemma2":
        scale = float(torch.tensor(scale).to(dtype))
    assert find_pathway(model).decode.scale == pytest.approx(scale, rel=2e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("factor", [1.0, 1.03])
def test_soft_tokens_need_one_scale_for_all_channels(factor: float, dtype: torch.dtype) -> None:
    model = unhosted("gemma2").to(dtype)
    factors = torch.ones(32, dtype=dtype)
    factors[::2] = factor
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: output * factors
    )
    if factor == 1:
        undertow.attach(model, SoftToken(0.2))
        return
    with pytest.raises(UnsupportedArchitectureError, match="its first layer sees more"):
        undertow.attach(model, SoftToken(0.2))


def test_an_attention_that_takes_a_mask_of_tokens_is_refused_with_the_mend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As flash attention does."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: None,
        **inputs: object,
    ) -> object:
        return sdpa(module, q, k, v, None, **inputs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "tokens", attention)
    monkeypatch.setitem(
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "tokens", flash_attention_mask
    )
    model = unhosted("llama")
    model.set_attn_implementation("tokens")
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(
        UnsupportedArchitectureError,
        match=r'attention, tokens, takes .* attn_implementation="sdpa"',
    ):
        undertow.attach(model, PATHWAYS["t2mlr-whole"])
    assert untouched(model, keys, kinds)
    model.set_attn_implementation("sdpa")
    undertow.attach(model, PATHWAYS["t2mlr-whole"])


def test_a_second_recurrence_is_refused() -> None:
    model, ids = hosted("llama", "t2mlr-whole"), tokens(2, 7)
    before = logits(model, ids)
    with pytest.raises(ConfigError, match="already has a recurrence"):
        undertow.attach(model, PATHWAYS["turboconn-1"])
    assert torch.equal(logits(model, ids), before)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a transformers model, not a Linear"):
        undertow.attach(nn.Linear(2, 2), PATHWAYS["t2mlr-whole"])
    wrapped = get_peft_model(unhosted("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="attach before PEFT wraps it"):
        undertow.attach(wrapped, PATHWAYS["t2mlr-whole"])


@pytest.mark.parametrize(
    "recurrence", [TurboConn(((4, 0),)), TurboConn(((3, -1),)), T2MLR(0, 4), T2MLR(-1, 2)]
)
def test_a_layer_outside_the_model_is_refused(recurrence: undertow.pathways.Recurrence) -> None:
    model = unhosted("llama")
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ConfigError, match="outside the model, whose layers are 0 to 3"):
        undertow.attach(model, recurrence)
    assert untouched(model, keys, kinds)


def test_a_plain_model_has_no_recurrence_to_speak_of() -> None:
    model = unhosted("llama")
    with pytest.raises(ConfigError, match="has no recurrence"):
        undertow.detach(model)
    with pytest.raises(ConfigError, match="has no recurrence"):
        undertow.report(model)
    with pytest.raises(ConfigError, match="has no recurrence"):
        undertow.set_solver(model, undertow.Sequential())


def test_what_is_no_solver_is_refused() -> None:
    model = hosted("llama", "t2mlr-whole")
    with pytest.raises(ConfigError, match=r"give one such as undertow\.Sequential"):
        undertow.set_solver(model, "sequential")  # type: ignore[arg-type]


def test_a_model_whose_layers_do_not_run_once_each_is_refused() -> None:
    """A loop over the layers that skips one, or visits them in another order, is no plain stack."""
    model = unhosted("llama")
    backbone, forward = model.model, model.model.forward

    def skipping(*args: object, **kwargs: object) -> object:
        layers = backbone.layers
        backbone._modules["layers"] = [layers[0], layers[2], layers[3]]
        try:
            return forward(*args, **kwargs)
        finally:
            backbone._modules["layers"] = layers

    backbone.forward = skipping
    with pytest.raises(UnsupportedArchitectureError):
        undertow.attach(model, PATHWAYS["t2mlr-whole"])


def test_control_a_supported_architecture_is_not_refused() -> None:
    model, ids = unhosted("llama"), tokens(2, 7)
    plain = logits(model, ids)
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    undertow.attach(model, PATHWAYS["turboconn-3"])
    assert not untouched(model, keys, kinds)
    assert difference(logits(model, ids), plain) < 1e-4
