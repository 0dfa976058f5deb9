"""Exit rules on the native model: rows and tokens apart, cached and uncached alike, and what is no
longer computed."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from helpers import CACHE
from small_huginn import ids, small
from small_looped import looped

from undertow.depth import (
    ArgmaxStability,
    Budget,
    Cosine,
    DepthCache,
    EntropyDifference,
    Evidence,
    ExitRule,
    KLDivergence,
    Last,
    LatentDifference,
    LearnedGate,
    MinPKL,
    Scripted,
    depths_of,
    ledger_of,
)
from undertow.errors import ConfigError

LIMIT = 12
# Thresholds at which the small model's tokens stop at different depths.
RULES: dict[str, ExitRule] = {
    "latent": LatentDifference(0.12),
    "cosine": Cosine(0.02),
    "kl": KLDivergence(1e-2),
    "min-p-kl": MinPKL(2e-2),
    "entropy": EntropyDifference(5e-3),
    "argmax": ArgmaxStability(3),
    "scripted": Scripted((2, 5, 3, 7, 1, 4)),
    "late": LatentDifference(0.12, minimum=4),
}
SAME = 2e-5


def forward(tokens: torch.Tensor, cache: Any = None, **inputs: Any) -> Any:
    with torch.no_grad():
        return small()(
            tokens, **({} if cache is None else {CACHE: cache}), **({"depth": LIMIT} | inputs)
        )


@pytest.mark.parametrize("name", RULES)
def test_cached_equals_uncached_and_rows_alone(name: str) -> None:
    rule = RULES[name]
    lengths, width = (9, 6, 8), 9
    tokens, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    rows = [ids(1, length, seed=20 + length) for length in lengths]
    for row, text in enumerate(rows):
        tokens[row, width - text.shape[1] :], mask[row, width - text.shape[1] :] = text[0], 1
    whole = forward(tokens, attention_mask=mask, exit_rule=rule)
    cache, logits, depths = DepthCache(), [], []
    for start, stop in ((0, 5), (5, 6), (6, 8), (8, 9)):
        part = forward(tokens[:, start:stop], cache, attention_mask=mask[:, :stop], exit_rule=rule)
        logits.append(part.logits)
        depths.append(part.depths)
    real = mask.bool()
    assert torch.equal(torch.cat(depths, dim=1), whole.depths)
    assert torch.equal(ledger_of(cache).depths, whole.depths)
    assert torch.allclose(torch.cat(logits, dim=1)[real], whole.logits[real], atol=SAME)
    assert bool((whole.depths[~real] == 0).all())
    for row, text in enumerate(rows):
        alone = forward(text, exit_rule=rule)
        assert torch.equal(whole.depths[row][real[row]], alone.depths[0])
        assert torch.allclose(whole.logits[row][real[row]], alone.logits[0], atol=SAME)
    assert len(set(whole.depths[real].tolist())) > 1  # the rule does tell tokens apart
    if name == "late":
        assert int(whole.depths[real].min()) >= 4


def test_scripted_tokens_read_the_deepest_entries_there_are() -> None:
    """One row by hand: a token that stopped is read at its own depth by deeper ones."""
    model, tokens = small(), ids(1, 3, seed=8)
    found = forward(tokens, exit_rule=Scripted((2, 5, 3)))
    assert found.depths.tolist() == [[2, 5, 3]]
    cache = DepthCache()
    for position, depth in enumerate((2, 5, 3)):
        part = forward(tokens[:, position : position + 1], cache, depth=depth)
        assert torch.allclose(part.logits[:, 0], found.logits[:, position], atol=SAME)
    assert not torch.allclose(forward(tokens, depth=5).logits[:, 2], found.logits[:, 2], atol=1e-3)
    assert model.config.n_layers_in_recurrent_block == 2


def test_a_rule_that_never_fires_is_the_fixed_depth() -> None:
    tokens = ids(2, 6)
    for rule in (LatentDifference(1e-30), ArgmaxStability(LIMIT + 1)):
        adaptive = forward(tokens, exit_rule=rule)
        assert torch.allclose(adaptive.logits, forward(tokens).logits, atol=SAME)
        assert bool((adaptive.depths == LIMIT).all())


def test_rows_that_exit_stop_computing() -> None:
    model, tokens = small(), ids(4, 1)
    computed = []
    handle = model.transformer["adapter"].register_forward_hook(
        lambda module, args, out: computed.append(out.shape[0])
    )
    try:
        forward(
            tokens,
            position_ids=torch.tensor([[0], [1], [2], [3]]),
            exit_rule=Scripted((1, 3, 3, 6)),
        )
    finally:
        handle.remove()
    assert computed == [4, 3, 3, 1, 1, 1]


def test_generate_reports_steps_and_batch_equals_rows() -> None:
    model = small()
    rows = [ids(1, length, seed=length) for length in (7, 4)]
    tokens, mask = torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    tokens[0], tokens[1, 3:], mask[1, :3] = rows[0][0], rows[1][0], 0
    for rule in (RULES["latent"], RULES["kl"]):
        settings: dict[str, Any] = {
            "max_new_tokens": 7,
            "do_sample": False,
            "depth": LIMIT,
            "exit_rule": rule,
            "return_dict_in_generate": True,
        }
        batch = model.generate(tokens, attention_mask=mask, **settings)
        depths = ledger_of(batch[CACHE]).depths
        assert depths.shape == (2, 13)
        assert 1 < float(depths[:, 7:].float().mean()) < LIMIT
        for row, text in enumerate(rows):
            alone = model.generate(text, attention_mask=torch.ones_like(text), **settings)
            assert torch.equal(batch.sequences[row, 7:], alone.sequences[0, text.shape[1] :])
            assert torch.equal(depths[row, 7 - text.shape[1] :], ledger_of(alone[CACHE]).depths[0])


@pytest.mark.parametrize("policy", [Budget(3), Last()])
def test_exits_under_a_smaller_cache(policy: Any) -> None:
    """Rows alone and batched agree; a token that exits early leaves the entries that it has."""
    tokens = ids(3, 6, seed=4)
    rule = RULES["latent"]
    cache = DepthCache(policy)
    batched = [forward(tokens[:, i : i + 1], cache, exit_rule=rule) for i in range(6)]
    for row in range(3):
        alone_cache = DepthCache(policy)
        for i in range(6):
            alone = forward(tokens[row : row + 1, i : i + 1], alone_cache, exit_rule=rule)
            assert torch.equal(alone.depths[0], batched[i].depths[row])
            assert torch.allclose(alone.logits[0], batched[i].logits[row], atol=SAME)


def test_mistakes() -> None:
    tokens = ids(1, 3)
    with pytest.raises(ConfigError, match="exit gate"):
        forward(tokens, exit_rule=LearnedGate())
    with pytest.raises(ConfigError, match="without gradients"):
        small()(tokens, exit_rule=LatentDifference())
    with pytest.raises(ConfigError, match="exit_rule is 'kl'"):
        forward(tokens, exit_rule="kl")
    for make, match in (
        (lambda: LatentDifference(0.0), "threshold is 0"),
        (lambda: LatentDifference(minimum=0), "minimum is 0"),
        (lambda: ArgmaxStability(0), "times is 0"),
        (lambda: Scripted(()), "depths is"),
        (lambda: Scripted((0,)), "depths holds 0"),
        (lambda: LearnedGate(0.0), "quantile is 0"),
    ):
        with pytest.raises(ConfigError, match=match):
            make()


def test_logit_rules_refuse_where_no_logits_are_computed() -> None:
    state = torch.zeros(1, 1, 4)
    with pytest.raises(ConfigError, match="none are computed"):
        KLDivergence().decide(Evidence(1, state, state, None, torch.zeros(1, 1), None), {})


@dataclass(frozen=True)
class Confident(ExitRule):
    """A rule of one's own: the likeliest token has had this probability twice in a row."""

    kind: ClassVar[str] = "confident"
    needs_logits: ClassVar[bool] = True
    share: float = 0.5

    def decide(self, evidence: Evidence, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        assert evidence.logits is not None
        sure = evidence.logits.softmax(-1).amax(-1) >= self.share
        before = memory.get("sure", torch.zeros_like(sure))
        memory["sure"] = sure
        return sure & before


@pytest.mark.parametrize("model", [small(), looped("llama")], ids=["huginn", "looped"])
def test_a_rule_of_one_s_own(model: Any) -> None:
    """Each token stops where its predictions of a fixed number of iterations say so, and rows are
    decoded together as alone."""
    tokens, limit = ids(5, 5, seed=4), 8
    firsts = tokens[:, :1]
    with torch.no_grad():
        outputs = [model(input_ids=firsts, depth=depth) for depth in range(1, limit)]
        likeliest = [output.logits[:, 0].softmax(-1).amax(-1) for output in outputs]
        twice = [torch.minimum(*pair) for pair in pairwise(likeliest)]  # at depth 2, 3, ...
        sure = 0.999 * float(twice[0].median())
        output = model(input_ids=firsts, depth=limit, exit_rule=Confident(sure))
    expected = [
        next((depth for depth, share in enumerate(shares, 2) if share >= sure), limit)
        for shares in zip(*twice, strict=True)
    ]
    assert depths_of(model, output)[:, 0].tolist() == expected and len(set(expected)) > 1
    settings: dict[str, Any] = {"depth": limit, "exit_rule": Confident(sure), "max_new_tokens": 4}
    whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    for row in range(5):
        alone = tokens[row : row + 1]
        found = model.generate(alone, attention_mask=torch.ones_like(alone), **settings)
        assert torch.equal(found[0], whole[row])
