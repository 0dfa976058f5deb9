"""What attaching learns from a few probe forwards: the layout of the layer calls, and that
replaying them is exact."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from undertow.errors import CheckpointError
from undertow.host.arguments import find_cache, learn_layout, learn_rows
from undertow.host.attachment import Attachment
from undertow.host.collecting import OUTPUTS
from undertow.host.heads import per_token, without_pooling
from undertow.host.offloading import device_of
from undertow.host.stack import Recording, current_forward, recorders
from undertow.host.support import check_calls, check_kernels, refuse
from undertow.host.vocabulary import ExpectedEmbedding
from undertow.pathways.contract import check_pathway

# (cached, new) tokens of the two probes: every axis that counts tokens changes between them.
PROBES = ((3, 5), (4, 7))
# Rows of two more, in which every row has positions of its own.
BATCHES = (2, 3)


class Observer:
    """A forward of one backbone that runs the layers as they are. Without a stack the model runs
    untouched."""

    def __init__(self, backbone: nn.Module, stack: nn.ModuleList | None, arity: int = 0) -> None:
        self.backbone, self.stack = backbone, stack
        self.arity, self.ran = arity, False
        self.recordings: list[tuple[Recording, torch.Tensor]] = []

    def stand_ins(self, layers: list[nn.Module]) -> list[Any]:
        return recorders(self, layers)

    def run(self, recording: Recording) -> torch.Tensor:
        hidden = recording.hidden
        for index in range(len(recording.layers)):
            hidden = recording.run(index, hidden)
        self.recordings.append((recording, hidden))
        self.ran = False  # it watches several forwards
        return hidden


def learn(attachment: Attachment) -> None:
    """Fill in the attachment's layouts, and compare a replayed forward with the model's own,
    bitwise on a CPU.

    Raises:
        UnsupportedArchitectureError: the architecture cannot be hosted.
        CheckpointError: its weights give outputs that are no numbers.
        ConfigError: the pathway does not keep its contract.
    """
    model, backbone = attachment.owners.model, attachment.owners.backbone
    stack: nn.ModuleList = getattr(backbone, attachment.stack_name)
    check_kernels(model, stack)
    with quiet(model):
        attachment.arity = return_arity(model, backbone, stack)
        calls = []
        for cached, new in PROBES:
            expected = observe(model, Observer(backbone, None), cached, new)
            observer = Observer(backbone, stack, attachment.arity)
            logits = observe(model, observer, cached, new)
            same = (
                torch.equal(logits, expected)
                if logits.device.type == "cpu"
                else torch.allclose(logits, expected)
            )
            if not torch.isfinite(expected).all():
                raise CheckpointError(
                    "the model's outputs are not finite before anything is attached; its weights "
                    "are broken"
                )
            if len(observer.recordings) != 2 or not same:
                raise refuse(
                    model, "running its layers one after another does not reproduce its outputs"
                )
            calls.append(observer.recordings[1][0].calls)
            recording, hidden = observer.recordings[0]
            check_calls(model, recording.hidden, recording.calls, find_cache(recording.calls[0]))
            decode = getattr(attachment.pathway, "decode", None)
            if isinstance(decode, ExpectedEmbedding):
                recording, hidden = observer.recordings[1]
                decode.verify(
                    probe_ids(model, cached + new)[:, cached:], recording.hidden, hidden, logits
                )
        if attachment.pathway is not None:
            check_pathway(
                attachment.pathway,
                recording.hidden.shape[-1],
                recording.hidden.device,
                recording.hidden.dtype,
            )
        by_rows = []
        for rows in BATCHES:
            observer = Observer(backbone, stack, attachment.arity)
            observe(model, observer, *PROBES[-1], rows=rows, positions=True)
            by_rows.append(observer.recordings[1][0].calls)
    lengths = [new for _, new in PROBES]
    attachment.layouts = [
        learn_layout(type(model).__name__, [first, second], lengths)
        for first, second in zip(*calls, strict=True)
    ]
    for layout, narrow, wide in zip(attachment.layouts, *by_rows, strict=True):
        learn_rows(layout, (narrow, wide), BATCHES)


def observe(
    model: PreTrainedModel,
    observer: Observer,
    cached: int,
    new: int,
    rows: int = 2,
    positions: bool = False,
) -> torch.Tensor:
    """What the model says of `new` tokens after `cached` ones, in a batch whose first row is
    left-padded.

    With `positions` the rows are given their own, if the model takes any.
    """
    ids = probe_ids(model, cached + new, rows)
    model = without_pooling(model)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    given: list[dict[str, torch.Tensor]] = [{}, {}]
    if positions and "position_ids" in inspect.signature(model.forward).parameters:
        own = (mask.cumsum(-1) - 1).clamp(min=0)
        given = [{"position_ids": own[:, :cached]}, {"position_ids": own[:, cached:]}]
    token = current_forward.set(observer)
    try:
        first = model(
            input_ids=ids[:, :cached], attention_mask=mask[:, :cached], use_cache=True, **given[0]
        )
        cache = next(((k, v) for k, v in first.items() if isinstance(v, Cache)), None)
        if cache is None:
            raise refuse(model, "it returns no key-value cache")
        output = model(
            input_ids=ids[:, cached:],
            attention_mask=mask,
            use_cache=True,
            **given[1],
            **dict([cache]),
        )
    finally:
        current_forward.reset(token)
    found: torch.Tensor = per_token(output)
    return found


def probe_ids(model: Any, tokens: int, rows: int = 2) -> torch.Tensor:
    """Token ids ``[rows, tokens]`` that differ between the rows."""
    embeddings = model.get_input_embeddings()
    ids = torch.arange(rows * tokens, device=device_of(embeddings)).reshape(rows, tokens)
    return ids % int(embeddings.weight.shape[0])


def return_arity(model: PreTrainedModel, backbone: nn.Module, stack: nn.ModuleList) -> int:
    """The length of the tuple that a layer returns, 0 for a bare tensor."""
    seen: list[int] = []
    handle = next(iter(stack._modules.values())).register_forward_hook(
        lambda module, args, output: seen.append(len(output) if isinstance(output, tuple) else 0)
    )
    token = current_forward.set(Observer(backbone, None))
    try:
        without_pooling(model)(input_ids=probe_ids(model, 2), use_cache=False)
    except (TypeError, ValueError) as error:
        raise refuse(model, f"it does not take text alone ({error})") from error
    finally:
        current_forward.reset(token)
        handle.remove()
    return seen[0]


@contextmanager
def quiet(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients, named outputs but for layers' own, and all as it was
    afterwards, random numbers included."""
    training = [module for module in model.modules() if module.training]
    # Where the text after the last image stood, which Qwen's models keep for the next call.
    shifted = [
        (module, deltas)
        for module in model.modules()
        if (deltas := getattr(module, "rope_deltas", None)) is not None
    ]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    configs = {
        id(config): config for config in (model.config, model.config.get_text_config())
    }.values()
    # The library's loss of the routers fails beside a cache, for one.
    wanted: dict[str, bool] = {"return_dict": True, **{f"output_{name}": False for name in OUTPUTS}}
    asked = [
        (config, name, value)
        for config in configs
        for name in wanted
        if (value := getattr(config, name, None)) is not None and value != wanted[name]
    ]
    with torch.no_grad(), torch.random.fork_rng(devices):
        model.eval()
        for config, name, _ in asked:
            setattr(config, name, wanted[name])
        for module, _ in shifted:
            module.rope_deltas = None  # type: ignore[assignment]
        try:
            yield
        finally:
            for config, name, value in asked:
                setattr(config, name, value)
            for module in training:
                module.training = True
            for module, deltas in shifted:
                module.rope_deltas = deltas
