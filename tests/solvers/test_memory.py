"""What a training step keeps for its backward pass: little more than the base model's, whatever the
number of groups."""

import gc
import weakref
from typing import Any

import pytest
import reference
import torch
from helpers import randomize, recurrent_parameters, tokens
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import undertow
from undertow import T2MLR, SoftToken, TurboConn
from undertow.host.rollout_cache import Repeated, UnrepeatedHeads
from undertow.pathways import Recurrence

IDS = tokens(2, 64)
LIMIT = 1.3
HEADS = {"all heads": 4, "grouped queries": 2, "one key head": 1}
RECURRENCES: dict[str, Recurrence] = {
    "t2mlr-whole": T2MLR(0, 3),
    "turboconn-4": TurboConn(((3, 0), (2, 1), (3, 2)), lag=4, alpha=1.0, rank=8),
    "soft-token": SoftToken(0.1),
}


def build(key_heads: int, recurrence: Recurrence | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
    )
    model = LlamaForCausalLM(config).train()
    return (
        model
        if recurrence is None
        else randomize(undertow.attach(model, recurrence, undertow.Sequential()))
    )  # type: ignore[return-value]


class Kept:
    """Counts the bytes of the distinct storages that autograd keeps, those of the model left
    out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.storages: dict[
            int, torch.UntypedStorage
        ] = {}  # held, so that no address is used twice

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.storages[storage.data_ptr()] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def kept(model: LlamaForCausalLM, ids: torch.Tensor = IDS, unrepeated: bool = True) -> int:
    """The bytes that one training step keeps; with `unrepeated` off, what the library's attention
    would have it keep."""
    count = Kept(model)

    def pack(
        hooks: UnrepeatedHeads, tensor: torch.Tensor
    ) -> torch.Tensor | Repeated:  # the innermost hooks are the ones called
        packed = original(hooks, tensor) if unrepeated else tensor
        count.pack(packed.heads if isinstance(packed, Repeated) else packed)
        return packed

    original = UnrepeatedHeads.pack
    with (
        pytest.MonkeyPatch.context() as patch,
        saved_tensors_hooks(count.pack, lambda tensor: tensor),
    ):
        patch.setattr(UnrepeatedHeads, "pack", pack)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return count.bytes


def test_control_attention_with_grouped_queries_would_keep_a_copy_of_every_prefix() -> None:
    model = build(HEADS["grouped queries"], RECURRENCES["turboconn-4"])
    assert kept(model, unrepeated=False) > 1.2 * LIMIT * kept(build(HEADS["grouped queries"]))


def test_unrepeated_heads_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(HEADS["grouped queries"], RECURRENCES["turboconn-4"])

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    found = gradient()
    monkeypatch.setattr(UnrepeatedHeads, "pack", lambda hooks, tensor: tensor)
    assert torch.equal(gradient(), found)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_training_step_keeps_little_more_than_the_base_models(
    heads: str, recurrence: str
) -> None:
    base = kept(build(HEADS[heads]))
    assert kept(build(HEADS[heads], RECURRENCES[recurrence])) <= LIMIT * base


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_what_is_kept_grows_in_proportion_to_the_length(recurrence: str) -> None:
    model = build(4, RECURRENCES[recurrence])
    assert kept(model, tokens(2, 128)) <= 2.05 * kept(model, tokens(2, 64))


def test_activation_checkpointing_keeps_much_less() -> None:
    model = build(4, RECURRENCES["turboconn-4"])
    everything = kept(model)
    model.gradient_checkpointing_enable()
    assert kept(model) < 0.5 * everything


def test_control_a_cache_that_concatenates_keeps_every_prefix() -> None:
    base, hosted = build(4), build(4, T2MLR(0, 3))
    count = Kept(base)
    with saved_tensors_hooks(count.pack, lambda tensor: tensor):
        logits = reference.rollout(base, T2MLR(0, 3), dict(recurrent_parameters(hosted)), IDS)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert count.bytes > 3 * kept(build(4))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_step_frees_its_memory_at_once(recurrence: str, checkpointing: bool) -> None:
    """No cycle of references leaves the graph to the garbage collector, which comes too late for
    large tensors."""
    model = build(2, RECURRENCES[recurrence])
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = IDS[:, :24]
    kept(model, ids)  # whatever is made once is made now
    alive: list[weakref.ref[Any]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held = tensor.detach()
        alive.append(weakref.ref(held))
        return held

    gc.collect()
    gc.disable()
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert any(ref() is not None for ref in alive)
        del loss
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()
