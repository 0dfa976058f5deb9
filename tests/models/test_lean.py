"""The lean block equals the block that defines it, and steps aside where that one does more."""

import copy

import pytest
import torch
from helpers import CACHE
from small_huginn import ids, small
from torch import nn

from undertow.depth import DepthCache, LatentDifference
from undertow.models.huginn import layers
from undertow.models.huginn.lean import LeanBlock, bind


def logits(
    lean: bool, monkeypatch: pytest.MonkeyPatch, rows: int = 1, **inputs: object
) -> torch.Tensor:
    """Of a prompt and three more tokens through the cache."""
    model, tokens, cache = small(), ids(rows, 8), DepthCache()
    found = []
    with monkeypatch.context() as patch, torch.no_grad():
        if not lean:
            patch.setattr(layers, "bind", lambda block, hidden: block)
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8)):
            found.append(model(tokens[:, start:stop], **{CACHE: cache}, **inputs).logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "inputs", [{"depth": 9}, {"depth": 12, "exit_rule": LatentDifference(0.12)}]
)
def test_equals_the_block(
    rows: int, inputs: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = (logits(lean, monkeypatch, rows, **inputs) for lean in (True, False))
    assert torch.allclose(fast, slow, atol=2e-5)
    assert not torch.allclose(
        fast, logits(True, monkeypatch, rows, depth=2), atol=1e-2
    )  # the depth counts


def test_without_bias_and_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, mask = small(qk_bias=False), ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    with torch.no_grad():
        fast = model(tokens, attention_mask=mask, depth=5).logits[mask.bool()]
        monkeypatch.setattr(layers, "bind", lambda block, hidden: block)
        assert torch.allclose(
            fast, model(tokens, attention_mask=mask, depth=5).logits[mask.bool()], atol=2e-5
        )


def test_steps_aside() -> None:
    """Where gradients, another precision, a hook or an adapter want the block itself, it is the
    block that runs."""
    block, hidden = copy.deepcopy(small().transformer["core_block"][0]), torch.zeros(1, 1, 32)
    assert bind(block, hidden) is block
    with torch.no_grad():
        assert isinstance(bind(block, hidden), LeanBlock)
        assert not isinstance(
            bind(copy.deepcopy(block).to(torch.bfloat16), hidden.bfloat16()), LeanBlock
        )
        with torch.autocast("cpu", torch.bfloat16):
            assert bind(block, hidden) is block
        handle = block.mlp.fc.register_forward_hook(lambda module, inputs, output: None)
        assert bind(block, hidden) is block
        handle.remove()
        assert isinstance(bind(block, hidden), LeanBlock)
        block.attn.proj = nn.Sequential(block.attn.proj)
        assert bind(block, hidden) is block
