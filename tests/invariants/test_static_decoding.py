"""A decoded token on a static cache goes the short way, eagerly and compiled to one graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from helpers import (
    CACHE,
    PATHWAYS,
    ROUNDING,
    SAME,
    difference,
    hosted,
    some,
    steps,
    tokens,
    unhosted,
)
from transformers import CompileConfig, StaticCache

from undertow.errors import ConfigError
from undertow.host import decoding, intercept
from undertow.host.attachment import find_attachment


@contextmanager
def counting(lean: bool = True) -> Iterator[list[int]]:
    """The lengths that the caches of the short way's forwards had; there are none unless `lean`."""
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        begin = decoding.Decoding.begin

        def counted(step: decoding.Decoding, hidden: torch.Tensor) -> None:
            begin(step, hidden)
            taken.append(step.past)

        patch.setattr(decoding.Decoding, "begin", counted)
        if not lean:
            patch.setattr(intercept, "one_more_token", lambda *_: None)
        yield taken


def both(work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What `work` gives with lean steps and by the general continuation, and the former's."""
    with counting() as taken:
        lean = work()
    with counting(lean=False) as none:
        general = work()
    assert not none
    return lean, general, taken


HOLES = torch.ones(2, 12, dtype=torch.long)
HOLES[0, 6] = HOLES[1, 9] = 0


# What these cannot do without a recurrence either (`test_decoding.py`).
STATIC = [n for n in zoo.ARCHITECTURES if n not in ("mpt", "falcon_alibi", "gpt_neo")]
# All of their layers have sliding windows, so that nothing says how many states there may be.
SLIDING = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
STATIC_CACHE = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize(("name", "pathway"), some(STATIC))
def test_a_static_cache_goes_by_lean_steps(name: str, pathway: str) -> None:
    model, ids = hosted(name, pathway), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"attention_mask": mask} | STATIC_CACHE
    lean, general, taken = both(lambda: steps(model, ids, new=5, **given)[1])
    assert difference(lean, general) < ROUNDING
    by_itself = name in SLIDING or find_attachment(model).collects_itself
    assert taken == ([] if by_itself else [8, 9, 10, 11])


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_padding_among_tokens_on_a_static_cache(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(2, 12)

    @torch.no_grad()
    def continued() -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=12)
        parts = []
        for start, stop in [(0, 5), *((t, t + 1) for t in range(5, 12))]:
            given = {"attention_mask": HOLES[:, :stop], CACHE: cache}
            parts.append(model(ids[:, start:stop], use_cache=True, **given).logits)
            parts[-1][HOLES[:, start:stop] == 0] = 0
        return torch.cat(parts, dim=1)

    lean, general, taken = both(continued)
    assert difference(lean, general) < ROUNDING
    assert taken == [5], "and none once a row has padding among its tokens"


class Graphs:
    """A backend of `torch.compile` that counts what it is given and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: Any) -> "Graphs":
        return self  # `generate` copies its settings

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def compiled(model: Any, ids: torch.Tensor, mask: torch.Tensor, graphs: Graphs) -> torch.Tensor:
    settings = CompileConfig(fullgraph=True, mode=None, backend=graphs)
    settings._compile_all_devices = True  # `generate` compiles on accelerators alone otherwise
    given = {"cache_implementation": "static", "compile_config": settings}
    return steps(model, ids, new=7, attention_mask=mask, **given)[1]


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_it_compiles_to_one_graph_for_all_tokens(pathway: str) -> None:
    torch._dynamo.reset()
    model, ids, graphs = hosted("llama", pathway), tokens(2, 8), Graphs()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    want = steps(model, ids, new=7, attention_mask=mask)[1]
    assert difference(compiled(model, ids, mask, graphs), want) < SAME
    assert graphs.count == 1, "one graph for tokens of every place"
    other = tokens(2, 8, seed=5)
    want = steps(model, other, new=7, attention_mask=mask)[1]
    assert difference(compiled(model, other, mask, graphs), want) < SAME
    assert graphs.count == 1, "and for the next call"


def test_control_the_general_continuation_is_not_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(intercept, "one_more_token", lambda *_: None)
    model, ids = hosted("llama", "t2mlr-middle"), tokens(2, 8)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model, ids, torch.ones_like(ids), Graphs())


def test_a_backbone_that_was_replaced_is_noticed_while_it_is_compiled() -> None:
    torch._dynamo.reset()
    model, other = hosted("llama", "t2mlr-middle"), unhosted("llama")
    ids = tokens(2, 8)
    cache = StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE: cache})
        model.model = other.model
        call = torch.compile(model, backend="eager")
        with pytest.raises(ConfigError, match="did not run the LlamaModel"):
            call(ids[:, :1], use_cache=True, **{CACHE: cache})
