"""A recurrence never vanishes unnoticed: its model may be copied, compiled or rebuilt, and runs it
or says it cannot."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import compile_regions
from helpers import (
    CHANGED,
    PATHWAYS,
    SAME,
    difference,
    generate,
    hosted,
    logits,
    randomize,
    some,
    tokens,
    unhosted,
)
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import undertow
from undertow.errors import ConfigError, UnsupportedArchitectureError
from undertow.host import intercept
from undertow.host.attachment import find_attachment, find_backbone
from undertow.host.stack import Stack

LOOPED = undertow.Looped((0,), (1, 2), (3,))
IDS = tokens(2, 9)
MASK = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])


def through_pickle(model: PreTrainedModel) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: PreTrainedModel) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "a copy of a copy": lambda model: copy.deepcopy(through_pickle(model)),
    "compile_regions": lambda model: compile_regions(model, backend="eager"),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_copies_have_the_recurrence(pathway: str, way: str, tmp_path: Path) -> None:
    """In a forward, in generate with a mask, and in the folder that they save."""
    model = hosted("llama", pathway)
    copied = COPIES[way](hosted("llama", pathway))
    want = logits(model, IDS)
    assert torch.equal(logits(copied, IDS), want)
    masked = generate(model, IDS, recurrent_mask=MASK)
    assert torch.equal(generate(copied, IDS, recurrent_mask=MASK), masked)
    copied.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), IDS), want)
    assert difference(want, logits(unhosted("llama"), IDS)) > CHANGED


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_another_model(way: str) -> None:
    """What one is given, or loses, the other does not."""
    model = hosted("llama", "t2mlr-whole")
    want = logits(model, IDS)
    copied = COPIES[way](model)
    if way in ("copy", "compile_regions"):  # which share their modules
        return
    undertow.detach(copied)
    assert torch.equal(logits(model, IDS), want)
    assert torch.equal(logits(copied, IDS), logits(unhosted("llama"), IDS))


@pytest.mark.parametrize(
    "solver", [undertow.Sequential(), undertow.Scan(2, 1), undertow.Auto(rollout_cost=2.0)]
)
@pytest.mark.parametrize("recurrence", [PATHWAYS["turboconn-3"], PATHWAYS["t2mlr-middle"], LOOPED])
def test_regional_compilation_trains_equally_and_does_not_compile_again(
    recurrence: Any, solver: Any
) -> None:
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    torch._dynamo.reset()
    plain, regional = hosted("llama", recurrence), hosted("llama", recurrence)
    if not isinstance(recurrence, undertow.Looped):
        undertow.set_solver(plain, solver)
        undertow.set_solver(regional, solver)
    model, counts = compile_regions(regional, backend=backend), []
    for length in (9, 7, 12, 15, 20):
        ids, found = tokens(2, length, seed=length), []
        for each in (plain, model):
            each.zero_grad()
            output = each(ids, labels=ids, use_cache=False)
            output.loss.backward()
            found.append(
                (output.logits.detach(), [p.grad for p in each.parameters() if p.grad is not None])
            )
        assert difference(found[1][0], found[0][0]) < SAME
        for got, want in zip(found[1][1], found[0][1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        counts.append(compiled)
    assert counts[0] > 0, "control: it was compiled at all"
    assert counts[1] == counts[-1], f"compiled again as lengths changed: {counts}"


@pytest.mark.parametrize(("name", "pathway"), some())
def test_a_rebuilt_list_of_layers_records_as_well(name: str, pathway: str) -> None:
    model, want = hosted(name, pathway), logits(hosted(name, pathway), IDS)
    backbone = find_backbone(model)
    stack_name = find_attachment(model).stack_name
    setattr(backbone, stack_name, nn.ModuleList(getattr(backbone, stack_name)))
    assert torch.equal(logits(model, IDS), want)


def test_control_a_rebuilt_list_that_does_not_record(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hosted("llama", "t2mlr-whole")
    model.model.layers = nn.ModuleList(model.model.layers)
    monkeypatch.setattr(intercept, "recording_list", lambda backbone, attachment: backbone.layers)
    with pytest.raises(
        UnsupportedArchitectureError, match="did not run where the recurrence was attached"
    ):
        logits(model, IDS)


def test_layers_that_are_others_are_refused() -> None:
    for layers, found in (
        (lambda model: model.model.layers[:3], "3 layers now, and was 4 layers"),
        (lambda model: nn.ModuleList([*model.model.layers, model.model.layers[0]]), "5 layers now"),
        (lambda model: nn.Sequential(*model.model.layers), "is a Sequential now"),
    ):
        model = hosted("llama", "t2mlr-whole")
        model.model.layers = layers(model)
        with pytest.raises(ConfigError, match=found):
            logits(model, IDS)
        undertow.detach(model)


def test_a_forward_that_goes_round_the_list_is_an_error() -> None:
    model = hosted("llama", "turboconn-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stack, "__iter__", lambda self: iter(list(self._modules.values())))
        patch.setattr(Stack, "__getitem__", lambda self, index: list(self._modules.values())[index])
        with pytest.raises(
            UnsupportedArchitectureError,
            match=r"its forward no longer iterates over LlamaModel\.layers",
        ):
            logits(model, IDS)
    assert difference(logits(model, IDS), logits(unhosted("llama"), IDS)) > CHANGED


def test_a_forward_that_was_replaced_is_an_error() -> None:
    model = hosted("llama", "turboconn-1")
    model.model.forward = type(model.model).forward.__get__(model.model)
    with pytest.raises(ConfigError, match="forward of LlamaModel was replaced"):
        logits(model, IDS)
    replaced = unhosted("llama")
    replaced.model.forward = type(replaced.model).forward.__get__(replaced.model)
    again = undertow.attach(replaced, PATHWAYS["turboconn-1"])
    assert difference(logits(again, IDS), logits(unhosted("llama"), IDS)) < SAME
    undertow.detach(again)
    assert "forward" in vars(replaced.model), "what stood there before is there again"


@pytest.mark.parametrize("pathway", ["t2mlr-whole", "soft-token"])
def test_a_backbone_that_was_replaced_is_an_error(pathway: str) -> None:
    """By a plain one, or by a hosted one that knows nothing of the model and so would lose what
    that is given."""
    model, want = hosted("llama", pathway), logits(hosted("llama", pathway), IDS)
    own = model.model
    for other in (unhosted("llama").model, through_pickle(own)):
        model.model = other
        for call in (lambda: logits(model, IDS, recurrent_mask=MASK), lambda: generate(model, IDS)):
            with pytest.raises(
                ConfigError, match="did not run the LlamaModel that the recurrence was attached to"
            ):
                call()
    model.model = own
    assert torch.equal(logits(model, IDS), want), "control: its own is none of these"
    model.model = unhosted("llama").model
    randomize(undertow.attach(model, PATHWAYS[pathway]))
    assert torch.equal(logits(model, IDS), want)
    assert torch.equal(logits(undertow.detach(model), IDS), logits(unhosted("llama"), IDS))


def test_a_recurrence_that_was_deleted_is_an_error() -> None:
    model = hosted("llama", "turboconn-1")
    del model.model.recurrence
    with pytest.raises(ConfigError, match=r"not by undertow\.detach"):
        logits(model, IDS)


@pytest.mark.parametrize("keep", [True, False])
def test_accelerates_wrappers_of_a_forward_come_and_go(keep: bool) -> None:
    model, want = hosted("llama", "turboconn-1"), logits(hosted("llama", "turboconn-1"), IDS)
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # one per process, which other tests may have made
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    assert difference(logits(prepared, IDS), want) < 1, "in bf16"
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep)
    if not keep:
        assert torch.equal(logits(unwrapped, IDS), want)
    masked = logits(unwrapped, IDS, recurrent_mask=MASK)
    assert difference(masked, logits(unwrapped, IDS)) > CHANGED
    AcceleratorState._reset_state(reset_partial_state=True)


def test_data_parallel_is_refused() -> None:
    """Its replicas would share one recurrence's place in the model."""
    model = hosted("llama", "turboconn-1")
    with pytest.raises(ConfigError, match="DataParallel"):
        model.model.recurrence._replicate_for_data_parallel()
