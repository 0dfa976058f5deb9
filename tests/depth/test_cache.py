"""The depth-aware cache on the native model: exactness, rows, policies, beams and memory."""

from typing import Any

import pytest
import torch
from helpers import CACHE
from small_huginn import ids, small
from transformers.cache_utils import DynamicCache

from undertow.depth import Anchor, Budget, DepthCache, Full, Last, cache_memory, ledger_of
from undertow.errors import ConfigError, DataError

POLICIES = {
    "full": Full(),
    "last": Last(),
    "budget-2": Budget(2),
    "anchor": Anchor(first=2, turning=2),
}
SAME, CHANGED = 2e-5, 1e-3


def forward(tokens: torch.Tensor, cache: Any = None, **inputs: Any) -> Any:
    with torch.no_grad():
        return small()(
            tokens, **({} if cache is None else {CACHE: cache}), **({"depth": 6} | inputs)
        )


def decode(
    tokens: torch.Tensor,
    cache: Any,
    chunks: list[int],
    mask: torch.Tensor | None = None,
    **inputs: Any,
) -> torch.Tensor:
    """Logits of all tokens, run in chunks through a cache."""
    found, start = [], 0
    for size in chunks:
        part = {} if mask is None else {"attention_mask": mask[:, : start + size]}
        found.append(forward(tokens[:, start : start + size], cache, **part, **inputs).logits)
        start += size
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [8, 1]])
def test_cached_equals_uncached(chunks: list[int]) -> None:
    tokens = ids(2, 9)
    expected = forward(tokens).logits
    assert torch.allclose(decode(tokens, DepthCache(tokens=4), chunks), expected, atol=SAME)
    assert torch.allclose(decode(tokens, DynamicCache(), chunks), expected, atol=SAME)


def test_a_cache_that_loses_an_entry_is_noticed() -> None:
    tokens = ids(1, 6)
    expected = forward(tokens).logits[:, -1]
    cache = DepthCache()
    forward(tokens[:, :5], cache)
    cache.layers[1].values[:, 3, :, 2] += 1.0  # one iteration of one core layer
    assert not torch.allclose(forward(tokens[:, 5:], cache).logits[:, -1], expected, atol=CHANGED)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cached", [True, False])
def test_padded_batch_equals_rows_alone(side: str, cached: bool) -> None:
    lengths, width = (9, 5, 7), 9
    rows = [ids(1, length, seed=length) for length in lengths]
    tokens, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for row, text in enumerate(rows):
        at = slice(width - text.shape[1], None) if side == "left" else slice(0, text.shape[1])
        tokens[row, at], mask[row, at] = text[0], 1
    logits = (
        decode(tokens, DepthCache(), [6, 1, 1, 1], mask)
        if cached
        else forward(tokens, attention_mask=mask).logits
    )
    for row, text in enumerate(rows):
        assert torch.allclose(logits[row][mask[row].bool()], forward(text).logits[0], atol=SAME)
    ignored = forward(tokens).logits[1][mask[1].bool()]
    assert not torch.allclose(ignored, forward(rows[1]).logits[0], atol=CHANGED) or side == "right"


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_and_generation_under_every_policy(policy: str) -> None:
    model = small()
    rows = [ids(1, length, seed=length) for length in (7, 4)]
    tokens, mask = torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    tokens[0], tokens[1, 3:], mask[1, :3] = rows[0][0], rows[1][0], 0
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "depth": 5}
    batch = model.generate(
        tokens, attention_mask=mask, **{CACHE: DepthCache(POLICIES[policy])}, **settings
    )
    for row, text in enumerate(rows):
        alone = model.generate(
            text,
            attention_mask=torch.ones_like(text),
            **{CACHE: DepthCache(POLICIES[policy])},
            **settings,
        )
        assert torch.equal(batch[row, 7:], alone[0, text.shape[1] :])


def test_generate_equals_no_cache_and_depth_matters() -> None:
    model, tokens = small(), ids(2, 5)
    settings: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "attention_mask": torch.ones_like(tokens),
    }
    cached = model.generate(tokens, depth=4, **settings)
    uncached = model.generate(tokens, depth=4, use_cache=False, **settings)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert torch.allclose(torch.stack(cached.logits), torch.stack(uncached.logits), atol=SAME)
    shallow = model.generate(tokens, depth=1, **settings)
    assert not torch.allclose(shallow.logits[0], cached.logits[0], atol=CHANGED)
    assert torch.equal(ledger_of(cached[CACHE]).depths, torch.full((2, 12), 4))


def test_beam_search_carries_the_cache_with_the_row() -> None:
    model, tokens = small(), ids(2, 5)
    settings: dict[str, Any] = {
        "max_new_tokens": 6,
        "num_beams": 3,
        "depth": 4,
        "num_return_sequences": 2,
    }
    cached = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    uncached = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **settings
    )
    assert torch.equal(cached, uncached)


def test_a_deeper_call_after_a_shallow_one_reads_the_deepest_entries() -> None:
    tokens = ids(1, 6)
    cache = DepthCache()
    forward(tokens[:, :5], cache, depth=2)
    found = forward(tokens[:, 5:], cache, depth=5).logits
    # The same by hand: every iteration beyond the second reads the entries of the second.
    other = DepthCache()
    forward(tokens[:, :5], other, depth=5)
    shallow = DepthCache()
    forward(tokens[:, :5], shallow, depth=2)
    for layer in (1, 2):
        for name in ("keys", "values"):
            buffer, held = getattr(other.layers[layer], name), getattr(shallow.layers[layer], name)
            for slot in range(5):
                buffer[:, slot, :, :5] = held[:, min(slot, 1), :, :5]
    for layer in (3,):
        for name in ("keys", "values"):
            getattr(other.layers[layer], name)[:, :, :, :5] = getattr(shallow.layers[layer], name)[
                :, :, :, :5
            ]
    assert torch.allclose(forward(tokens[:, 5:], other, depth=5).logits, found, atol=SAME)
    whole = DepthCache()
    forward(tokens[:, :5], whole, depth=5)
    assert not torch.allclose(forward(tokens[:, 5:], whole, depth=5).logits, found, atol=CHANGED)


def test_policies_keep_what_they_say() -> None:
    assert [Full().slot(i) for i in range(5)] == [0, 1, 2, 3, 4]
    assert [Budget(3).slot(i) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [Last().slot(i) for i in range(3)] == [0, 0, 0]
    assert [Anchor(2, 3).slot(i) for i in range(9)] == [0, 1, 2, 3, 4, 2, 3, 4, 2]
    assert [
        Anchor(8, 4).slots(32),
        Budget(4).slots(32),
        Budget(4).slots(2),
        Last().slots(32),
        Full().slots(32),
    ] == [12, 4, 2, 1, 32]
    with pytest.raises(ConfigError, match="Budget: iterations is 0"):
        Budget(0)
    with pytest.raises(ConfigError, match="Anchor"):
        Anchor(0, 4)


def test_memory_is_reported() -> None:
    tokens = ids(2, 8)
    used = {}
    for name, policy in POLICIES.items():
        cache = DepthCache(policy, tokens=8)
        forward(tokens, cache, depth=6)
        memory = cache_memory(cache)
        core, others = 2, 2  # layers; an entry is a key and a value of 32 floats
        slots = policy.slots(6)
        assert memory.used == memory.reserved == 2 * 8 * (core * slots + others) * 2 * 32 * 4
        assert memory.slots == slots
        used[name] = memory.used_per_token
    assert used["full"] > used["anchor"] > used["budget-2"] > used["last"]


def test_crop_and_continue() -> None:
    tokens = ids(1, 8)
    cache = DepthCache()
    forward(tokens[:, :6], cache)
    for layer in cache.layers:
        layer.crop(-3)
    found = forward(tokens[:, 3:], cache).logits
    assert torch.allclose(found, forward(tokens).logits[:, 3:], atol=SAME)


def test_warm_start_takes_the_last_state() -> None:
    tokens = ids(2, 5)
    cache = DepthCache()
    before = forward(tokens[:, :4], cache)
    found = forward(tokens[:, 4:], cache, warm_start=True).logits
    other = DepthCache()
    forward(tokens[:, :4], other)
    expected = forward(tokens[:, 4:], other, initial=before.states[:, -1:]).logits
    assert torch.equal(found, expected)
    cold = DepthCache()
    forward(tokens[:, :4], cold)
    assert not torch.allclose(forward(tokens[:, 4:], cold).logits, found, atol=CHANGED)


def test_a_cache_from_another_model_is_refused() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), 0)
    with pytest.raises(DataError, match="filled without the recurrence"):
        forward(ids(1, 1), cache)
