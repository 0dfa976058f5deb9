"""Self-speculative decoding writes what plain greedy decoding writes, and reuses its drafts."""

from typing import Any

import pytest
import torch
from helpers import unhosted
from small_huginn import VOCAB, ids, small
from small_looped import looped, padded

from undertow.depth.speculative import generate_speculative
from undertow.errors import ConfigError


@pytest.mark.parametrize("draft_depth, lookahead", [(1, 1), (2, 4), (4, 3), (7, 5)])
def test_equals_greedy(draft_depth: int, lookahead: int) -> None:
    model, tokens = small(), ids(1, 5, seed=3)
    plain = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=17, do_sample=False, depth=8
    )
    found = generate_speculative(
        model, tokens, max_new_tokens=17, depth=8, draft_depth=draft_depth, lookahead=lookahead
    )
    assert torch.equal(found.sequences, plain)
    assert found.rounds >= 16 / lookahead
    assert 0 <= found.acceptance <= 1


def test_padded_batch_with_an_end_token() -> None:
    model = small()
    tokens, mask = ids(3, 6, seed=5), torch.ones(3, 6, dtype=torch.long)
    mask[1, :2], tokens[1, :2] = 0, 0
    settings: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "depth": 6}
    free = model.generate(tokens, attention_mask=mask, **settings)
    end = int(free[0, 9])
    plain = model.generate(
        tokens, attention_mask=mask, eos_token_id=end, pad_token_id=0, **settings
    )
    found = generate_speculative(
        model,
        tokens,
        mask,
        max_new_tokens=14,
        depth=6,
        draft_depth=2,
        lookahead=3,
        eos_token_id=end,
    )
    width = min(plain.shape[1], found.sequences.shape[1])
    assert torch.equal(found.sequences[:, :width], plain[:, :width])
    assert bool((found.sequences[:, width:] == 0).all())


def test_drafts_are_reused() -> None:
    """Verification runs the iterations after the draft's, and no others."""
    model, tokens = small(), ids(1, 4)
    calls: list[int] = []
    handle = model.transformer["adapter"].register_forward_hook(
        lambda module, args, out: calls.append(out.shape[1])
    )
    try:
        found = generate_speculative(
            model, tokens, max_new_tokens=2, depth=6, draft_depth=2, lookahead=1
        )
    finally:
        handle.remove()
    assert found.rounds == 1
    assert calls == [4] * 6 + [1] * 2 + [1] * 4


def test_a_wrong_draft_state_is_noticed() -> None:
    model, tokens = small(), ids(1, 5, seed=3)
    from undertow.depth import DepthCache
    from undertow.depth.cache import rewind

    def resumed(spoil: bool) -> torch.Tensor:
        from helpers import CACHE

        cache = DepthCache()
        with torch.no_grad():
            model(tokens[:, :4], depth=6, **{CACHE: cache})
            model(tokens[:, 4:], depth=2, **{CACHE: cache})
            rewind(cache, 1)
            if spoil:
                cache.layers[-1].keys[:, :, 4] += 0.5
            return model(tokens[:, 4:], depth=6, resume=2, **{CACHE: cache}).logits

    with torch.no_grad():
        expected = model(tokens, depth=6).logits[:, 4:]
    assert torch.allclose(resumed(False), expected, atol=5e-5)
    assert not torch.allclose(resumed(True), expected, atol=2e-3)


def test_mistakes() -> None:
    model, tokens = small(), ids(1, 4)
    with pytest.raises(ConfigError, match="nothing to verify"):
        generate_speculative(model, tokens, depth=4, draft_depth=4)
    with pytest.raises(ConfigError, match="draft_depth is 0"):
        generate_speculative(model, tokens, depth=4, draft_depth=0)
    with pytest.raises(ConfigError, match="lookahead is 0"):
        generate_speculative(model, tokens, depth=4, draft_depth=2, lookahead=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom"])
def test_padded_rows_of_hosted_models(name: str) -> None:
    """Positions count from each row's first token, as in `generate()`."""
    model = looped(name)
    tokens, mask, _ = padded()
    settings: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
    }
    plain = model.generate(tokens, depth=4, eos_token_id=None, **settings)  # type: ignore[operator]
    found = generate_speculative(
        model, tokens, mask, max_new_tokens=8, depth=4, draft_depth=2, lookahead=3, eos_token_id=()
    )
    assert torch.equal(found.sequences, plain)


def test_end_and_padding_are_the_model_s_own() -> None:
    model, tokens = small(), ids(1, 5, seed=3)
    settings: dict[str, Any] = {"max_new_tokens": 14, "depth": 6}
    free = generate_speculative(model, tokens, draft_depth=2, **settings).sequences[0]
    written = free[5:].tolist()
    last = next(
        at for at in range(3, 10) if written[at] not in written[:at]
    )  # a token that comes late for the first time
    ends = [VOCAB - 1, written[last]]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, 3
    found = generate_speculative(model, tokens, draft_depth=2, lookahead=4, **settings).sequences[0]
    upto = 5 + last + 1
    assert (
        torch.equal(found[:upto], free[:upto])
        and len(found) < len(free)
        and bool((found[upto:] == 3).all())
    )
    assert torch.equal(
        generate_speculative(model, tokens, draft_depth=2, eos_token_id=(), **settings).sequences[
            0
        ],
        free,
    )


def test_a_model_without_a_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no recurrence in depth; attach undertow\.Looped first"):
        generate_speculative(unhosted("llama"), ids(1, 4))
    with pytest.raises(ConfigError, match=r"lookahead is 1\.5"):
        generate_speculative(small(), ids(1, 4), lookahead=1.5)  # type: ignore[arg-type]
