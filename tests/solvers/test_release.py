"""A training step leaves nothing behind: its buffers go with its graph, without waiting for the
garbage collector."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import zoo

import undertow
from undertow.host.rollout_cache import RolloutLayer, Slot


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_rollout_is_freed_with_its_graph(
    monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    rollouts: list[weakref.ref[RolloutLayer]] = []
    original = RolloutLayer.__init__

    def noted(self: RolloutLayer, slot: Slot) -> None:
        original(self, slot)
        rollouts.append(weakref.ref(self))

    monkeypatch.setattr(RolloutLayer, "__init__", noted)
    model = undertow.attach(
        zoo.build("llama"),
        undertow.TurboConn(((3, 0), (2, 1)), lag=2, rank=4),
        undertow.Sequential(),
    ).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.arange(2, 22).reshape(2, 10)
    gc.collect()
    gc.disable()
    try:
        loss = model(ids, labels=ids, use_cache=False).loss
        assert any(ref() is not None for ref in rollouts), (
            "nothing was rolled out, or nothing kept its buffers"
        )
        loss.backward()
        del loss
        assert not any(ref() is not None for ref in rollouts)
    finally:
        gc.enable()
