"""A batch equals its rows alone: left and right padding, packed documents, limited recurrence, and
rows of mixed kinds."""

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from helpers import (
    ARCHITECTURES,
    CACHE,
    CHANGED,
    PATHWAYS,
    SAME,
    difference,
    generate,
    hosted,
    logits,
    recurrent_parameters,
    some,
    steps,
    taking_turns,
    tokens,
    unhosted,
)
from transformers import DynamicCache, StaticCache

import undertow
from undertow.host import forward
from undertow.host.attachment import find_attachment
from undertow.host.state import StateLayer
from undertow.host.tokens import documents, present_states

WITHOUT_POSITIONS = {"bloom", "mpt"}
# They tell documents apart by no position ids, or, as gpt_oss, do not confine attention to them.
WITHOUT_PACKING = {"bloom", "mpt", "opt", "xglm", "gpt_oss"}

LENGTHS = (11, 9, 7)  # no two rows have the same offset within a group of three tokens
ROWS = [tokens(1, length, seed=length) for length in LENGTHS]


def padded(
    rows: list[torch.Tensor], left: list[int], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as one batch, each after its number of padding tokens, and its attention mask."""
    ids = torch.full(
        (len(rows), width), 13
    )  # the mask says what is padding; no model knows this token as such
    mask = torch.zeros_like(ids)
    for index, (row, offset) in enumerate(zip(rows, left, strict=True)):
        ids[index, offset : offset + row.shape[1]] = row
        mask[index, offset : offset + row.shape[1]] = 1
    return ids, mask


def left_padded(rows: list[torch.Tensor] = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(row.shape[1] for row in rows)
    return padded(rows, [width - row.shape[1] for row in rows], width)


def positions(name: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `generate` feeds as position ids of a padded batch."""
    return {} if name in WITHOUT_POSITIONS else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def worst(batch: torch.Tensor, mask: torch.Tensor, alone: Callable[[int], torch.Tensor]) -> float:
    """The largest difference between the rows' real tokens in `batch` and each row `alone`."""
    return max(difference(batch[i][mask[i].bool()][None], alone(i)) for i in range(len(batch)))


def padding_error(name: str, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> float:
    batch = logits(model, ids, attention_mask=mask, **positions(name, mask))
    return worst(batch, mask, lambda i: logits(model, ids[i][mask[i].bool()][None]))


@pytest.mark.parametrize(("name", "pathway"), some(each=3))
def test_a_left_padded_batch_equals_its_rows_alone(name: str, pathway: str) -> None:
    model, (ids, mask) = hosted(name, pathway), left_padded()
    assert padding_error(name, model, ids, mask) < SAME


@pytest.mark.parametrize(("name", "pathway"), some(each=2))
def test_rows_with_padding_on_either_side(name: str, pathway: str) -> None:
    ids, mask = padded([*ROWS, ROWS[2]], [0, 1, 4, 2], width=11)
    assert padding_error(name, hosted(name, pathway), ids, mask) < SAME


@pytest.mark.parametrize(("name", "pathway"), some())
def test_right_padding_needs_no_mask(name: str, pathway: str) -> None:
    """As lm-eval scores continuations: right padding, no attention mask."""
    model = hosted(name, pathway)
    ids, mask = padded(ROWS, [0, 0, 0], width=11)
    assert worst(logits(model, ids), mask, lambda i: logits(model, ROWS[i])) < SAME


@pytest.mark.parametrize(("name", "pathway"), some(each=2))
def test_padded_rows_prefilled_in_chunks(name: str, pathway: str) -> None:
    """The first chunk is padding alone for the last row."""
    model, (ids, mask) = hosted(name, pathway), left_padded()
    inputs, cache, parts = positions(name, mask), DynamicCache(config=model.config), []
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        part = {key: value[:, start:stop] for key, value in inputs.items()}
        fed = {CACHE: cache, "use_cache": True, "attention_mask": mask[:, :stop]}
        parts.append(logits(model, ids[:, start:stop], **part, **fed))
    assert worst(torch.cat(parts, dim=1), mask, lambda i: logits(model, ROWS[i])) < SAME


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 4},
    "none": {"use_cache": False},
}
# Without a recurrence too: see test_decoding.py.
BROKEN = {("falcon_alibi", "static"), ("gpt_neo", "static"), ("mpt", "chunked")}


@pytest.mark.parametrize(
    ("name", "pathway", "cache"),
    [c for c in taking_turns(some(each=2), CACHES, each=1) if (c[0], c[2]) not in BROKEN],
)
def test_generating_for_a_left_padded_batch(name: str, pathway: str, cache: str) -> None:
    model, (ids, mask) = hosted(name, pathway), left_padded()
    batch = generate(model, ids, attention_mask=mask, **CACHES[cache])
    for index, row in enumerate(ROWS):
        assert torch.equal(batch[index, 11:], generate(model, row)[0, row.shape[1] :])


# --- packed documents


def packed(
    lengths: tuple[int, ...], seed: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    documents = [tokens(1, length, seed=seed + index) for index, length in enumerate(lengths)]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    return documents, torch.cat(documents, dim=1), places


def packing_error(model: Any) -> float:
    """Two rows with different boundaries, among them documents shorter than the lag."""
    first, second = packed((5, 2, 1, 4)), packed((1, 3, 8), seed=20)
    ids, places = torch.cat([first[1], second[1]]), torch.cat([first[2], second[2]])
    batch = logits(model, ids, position_ids=places)
    alone = [
        torch.cat([logits(model, d) for d in documents], dim=1)
        for documents in (first[0], second[0])
    ]
    return difference(batch, torch.cat(alone))


@pytest.mark.parametrize(
    ("name", "pathway"), some((n for n in ARCHITECTURES if n not in WITHOUT_PACKING), each=3)
)
def test_packed_documents_equal_the_documents_alone(name: str, pathway: str) -> None:
    assert packing_error(hosted(name, pathway)) < SAME


@pytest.mark.parametrize("name", sorted(WITHOUT_PACKING - WITHOUT_POSITIONS))
def test_packing_that_the_base_models_do_not_know(name: str) -> None:
    assert packing_error(unhosted(name)) > CHANGED, "it does now; take it out of WITHOUT_PACKING"


def test_a_document_that_starts_after_a_cached_one_gets_nothing_of_it() -> None:
    """A mask of the user's own keeps a document that continues a cache apart from what is
    cached."""
    mask = torch.ones(4, 5, dtype=torch.bool).tril(1)[
        None, None
    ]  # four new tokens after one that is cached
    mask[..., 1:, :2] = False
    document = documents(mask, None, [mask], None, 1, False)
    assert document is not None and document.tolist() == [[0, 1, 1, 1]]
    for lag, wanted in {1: [True, False, True, True], 3: [True, False, False, False]}.items():
        present = present_states(None, document, None, True, tokens=4, lag=lag)
        assert present is not None
        assert present.tolist() == [wanted]


@pytest.mark.parametrize(
    ("name", "pathway"), some((n for n in ARCHITECTURES if n not in WITHOUT_POSITIONS), each=1)
)
def test_positions_that_jump_within_a_document(name: str, pathway: str) -> None:
    """With a mask of ones attention looks back over the jump, and so does the state; the definition
    knows no documents."""
    model, ids = hosted(name, pathway), tokens(2, 9)
    places = torch.tensor([[0, 1, 2, 3, 4, 20, 21, 22, 23]]).expand(2, -1)
    ones = torch.ones_like(ids)
    whole = logits(model, ids, position_ids=places, attention_mask=ones)
    cache = DynamicCache(config=model.config)
    parts = []
    for at in range(9):  # one token a time there is no document to tell
        fed = {
            CACHE: cache,
            "use_cache": True,
            "attention_mask": ones[:, : at + 1],
            "position_ids": places[:, at : at + 1],
        }
        parts.append(logits(model, ids[:, at : at + 1], **fed))
    assert difference(torch.cat(parts, dim=1), whole) < SAME


def test_control_a_state_that_stops_where_positions_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = hosted("llama", "t2mlr-whole"), tokens(2, 9)
    inputs = {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 20, 21, 22, 23]]).expand(2, -1)}
    inputs["attention_mask"] = torch.ones_like(ids)
    whole = logits(model, ids, **inputs)
    cut = torch.tensor([[0] * 5 + [1] * 4] * 2)
    monkeypatch.setattr(
        forward,
        "present_states",
        lambda active, document, *rest: present_states(active, cut, *rest),
    )
    assert difference(logits(model, ids, **inputs)[:, 5:], whole[:, 5:]) > CHANGED


# --- padding between the tokens of a row


def spread_out(
    rows: list[torch.Tensor], width: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows with padding anywhere between, before and behind their tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = torch.full((len(rows), width), 13), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        places = torch.randperm(width, generator=generator)[: row.shape[1]].sort().values
        ids[index, places], mask[index, places] = row[0], 1
    return ids, mask


def without_windows(name: str, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Skip base models for which padding in the middle does count: in a sliding window, say."""
    if padding_error(name, unhosted(name), ids, mask) > SAME:
        assert name not in {"llama", "gpt2", "gpt_neox", "opt", "falcon", "granite", "deepseek_v3"}
        pytest.skip("the base model's own rows differ")


@pytest.mark.parametrize(("name", "pathway"), some(each=3))
def test_padding_in_the_middle_of_rows(name: str, pathway: str) -> None:
    model, (ids, mask) = hosted(name, pathway), spread_out(ROWS, width=16, seed=len(name))
    without_windows(name, ids, mask)
    assert padding_error(name, model, ids, mask) < SAME


SOLVERS = {
    "scan": undertow.Scan(16, 16),
    "jacobi": undertow.Jacobi(16, 16),
    "chunked": undertow.Chunked(5, undertow.Scan(5, 0)),
    "adjoint": undertow.Sequential("adjoint(16)"),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_padding_in_the_middle_with_every_solver(pathway: str, solver: str) -> None:
    """States and gradients are those of the rollout."""
    ids, mask = spread_out(ROWS, width=16, seed=2)
    labels = ids.masked_fill(mask == 0, -100)
    found = []
    for each in (undertow.Sequential(), SOLVERS[solver]):
        model = hosted("llama", pathway, solver=each)
        output = model(
            ids, attention_mask=mask, labels=labels, use_cache=False, **positions("llama", mask)
        )
        if solver != "chunked":  # whose gradients are truncated
            output.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append((output.logits.detach()[mask.bool()][None], gradients))
    assert difference(found[1][0], found[0][0]) < SAME
    for got, want in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "pathway"), some(each=2))
def test_a_second_turn_after_answers_of_different_lengths(name: str, pathway: str) -> None:
    """Prompts padded on the left, answers on the right and then the next turn, on one cache:
    padding lies in the middle."""
    model = hosted(name, pathway)
    ids, mask = left_padded()
    ids, mask = (
        torch.cat([ids, tokens(3, 9, seed=4)], dim=1),
        torch.cat([mask, torch.ones(3, 9, dtype=torch.long)], dim=1),
    )
    mask[0, 12:15] = mask[1, 13:15] = mask[2, 11:14] = mask[0, 17] = 0
    without_windows(name, ids, mask)
    places, cache, parts = positions(name, mask), DynamicCache(config=model.config), []
    for start, stop in ((0, 11), (11, 12), (12, 15), (15, 16), (16, 20)):
        part = {key: value[:, start:stop] for key, value in places.items()}
        fed = {CACHE: cache, "use_cache": True, "attention_mask": mask[:, :stop]}
        parts.append(logits(model, ids[:, start:stop], **part, **fed))
    assert (
        worst(torch.cat(parts, dim=1), mask, lambda i: logits(model, ids[i][mask[i].bool()][None]))
        < SAME
    )


def own_mask(
    mask: torch.Tensor, document: torch.Tensor, start: int, stop: int, keys: int, kind: str
) -> torch.Tensor:
    """A 4-D mask of the user's own: causal, without padding, and each document for itself."""
    room = (0, keys - mask.shape[1])
    known, document = (
        torch.nn.functional.pad(mask.bool(), room),
        torch.nn.functional.pad(document, room),
    )
    causal = torch.arange(keys) <= torch.arange(start, stop)[:, None]
    seen = causal & known[:, None] & (document[:, None] == document[:, start:stop, None])
    seen = seen[:, None]
    return (
        seen
        if kind == "bool"
        else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    )


def own_mask_error(
    pathway: str, kind: str, cache: str, solver: undertow.solvers.Solver | None = None
) -> float:
    """Two rows with padding, also as the last cached token, and two documents in the second, by a
    mask of ones own."""
    model, ids = hosted("llama", pathway), tokens(2, 12)
    undertow.set_solver(model, prefill=solver)
    mask = torch.tensor(
        [[0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1], [1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1]]
    )
    document = torch.tensor([[0] * 12, [0] * 7 + [1] * 5])
    places = torch.stack([(m.cumsum(0) - 1).clamp(min=0) for m in mask])
    places[1, 7:] -= places[1, 7].clone()
    made: Any = (
        StaticCache(model.config, 15) if cache == "static" else DynamicCache(config=model.config)
    )
    parts = []
    for start, stop in ((0, 4), (4, 7), (7, 10), (10, 12)):
        keys = 15 if cache == "static" else stop
        given = own_mask(mask[:, :stop], document[:, :stop], start, stop, keys, kind)
        fed = {
            CACHE: made,
            "use_cache": True,
            "attention_mask": given,
            "position_ids": places[:, start:stop],
        }
        parts.append(logits(model, ids[:, start:stop], **fed))
    got = torch.cat(parts, dim=1)
    rows = [(0, 0), (1, 0), (1, 1)]
    kept = [mask[row].bool() & (document[row] == number) for row, number in rows]
    return max(
        difference(got[row][keep][None], logits(model, ids[row][keep][None]))
        for (row, _), keep in zip(rows, kept, strict=True)
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_masks_of_ones_own_in_chunks(pathway: str, kind: str, cache: str) -> None:
    assert own_mask_error(pathway, kind, cache) < SAME


def test_control_a_mask_read_without_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateLayer, "since_real", lambda self: None)
    assert own_mask_error("t2mlr-whole", "bool", "dynamic") > CHANGED


@pytest.mark.parametrize("solver", [undertow.Scan(16), undertow.Jacobi(16)])
@pytest.mark.parametrize("pathway", ["turboconn-3", "t2mlr-middle", "soft-token"])
def test_a_static_cache_with_padding_and_a_parallel_prefill(
    pathway: str, solver: undertow.solvers.Solver
) -> None:
    """Its masks reach as far as it has room, the keys of a sweep as far as the tokens."""
    model, (ids, mask) = hosted("llama", pathway), left_padded()
    want = generate(model, ids, attention_mask=mask)
    undertow.set_solver(model, prefill=solver)
    assert torch.equal(
        generate(model, ids, attention_mask=mask, cache_implementation="static"), want
    )
    assert own_mask_error(pathway, "float", "static", solver) < SAME


def test_control_sweeps_with_masks_for_a_whole_static_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "narrow", lambda self, *where: self)
    with pytest.raises(RuntimeError, match="must match"):
        own_mask_error("t2mlr-middle", "float", "static", undertow.Scan(16))


def test_control_an_order_that_counts_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = hosted("llama", "t2mlr-whole"), spread_out(ROWS, width=16, seed=2)
    monkeypatch.setattr(forward, "row_order", lambda *args: None)
    assert padding_error("llama", model, ids, mask) > CHANGED


# --- recurrent_mask


LIMITED = torch.tensor(
    [[0] * 5 + [1] * 6, [1] * 11, [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1]]
)  # an answer after its prompt; everything; gaps


@pytest.mark.parametrize(("name", "pathway"), some(each=2))
def test_a_recurrent_mask_limits_the_recurrence(name: str, pathway: str) -> None:
    model, base, ids = hosted(name, pathway), unhosted(name), tokens(3, 11)
    got = logits(model, ids, recurrent_mask=LIMITED)
    with torch.no_grad():
        naive = reference.rollout(
            base, PATHWAYS[pathway], recurrent_parameters(model), ids, mask=LIMITED
        )
    assert difference(got, naive) < SAME
    whole = logits(model, ids)
    assert difference(got[1:2], whole[1:2]) < SAME, "a mask of ones is no mask"
    assert difference(got[:1], whole[:1]) > CHANGED
    nowhere = logits(model, ids, recurrent_mask=torch.zeros_like(ids))
    assert difference(nowhere, logits(base, ids)) < SAME, "without recurrence it is the base model"
    assert (
        difference(
            logits(model, ids, recurrent_mask=LIMITED[:1]),
            logits(model, ids, recurrent_mask=LIMITED[:1].expand(3, -1)),
        )
        == 0
    )


@pytest.mark.parametrize(
    ("name", "pathway", "cache"),
    [c for c in taking_turns(some(each=2), CACHES, each=1) if (c[0], c[2]) not in BROKEN],
)
def test_generate_takes_a_recurrent_mask(name: str, pathway: str, cache: str) -> None:
    """The mask covers the prompt; what is generated takes part."""
    model, ids = hosted(name, pathway), tokens(3, 11)
    sequences, decoded = steps(model, ids, new=6, recurrent_mask=LIMITED, **CACHES[cache])
    grown = torch.cat([LIMITED, LIMITED.new_ones(3, 6)], dim=1)
    assert difference(decoded, logits(model, sequences, recurrent_mask=grown)[:, 10:-1]) < SAME
    assert difference(decoded, steps(model, ids, new=6, **CACHES[cache])[1]) > CHANGED


@pytest.mark.parametrize(
    ("name", "pathway", "search"), taking_turns(some(), ["greedy", "beams"], each=1)
)
def test_padding_and_a_recurrent_mask_together(name: str, pathway: str, search: str) -> None:
    settings = {"num_beams": 3 if search == "beams" else 1}
    model, (ids, mask) = hosted(name, pathway), left_padded()
    limited = LIMITED.flip(0)
    batch = generate(model, ids, attention_mask=mask, recurrent_mask=limited, **settings)
    for index, row in enumerate(ROWS):
        own = limited[index : index + 1, 11 - row.shape[1] :]
        alone = generate(model, row, recurrent_mask=own, **settings)
        assert torch.equal(batch[index, 11:], alone[0, row.shape[1] :])


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_with_a_cache_the_mask_covers_the_new_tokens_or_all(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(3, 11)
    want = logits(model, ids, recurrent_mask=LIMITED)
    for second in (LIMITED, LIMITED[:, 4:]):
        cache = DynamicCache(config=model.config)
        fed = {CACHE: cache, "use_cache": True}
        parts = [
            logits(model, ids[:, :4], recurrent_mask=LIMITED[:, :4], **fed),
            logits(model, ids[:, 4:], recurrent_mask=second, **fed),
        ]
        assert difference(torch.cat(parts, dim=1), want) < SAME


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_generating_from_embeddings_with_a_recurrent_mask(pathway: str) -> None:
    model, ids = hosted("llama", pathway), tokens(3, 11)
    limited = LIMITED.clone()
    limited[0, -1] = 0  # what is generated takes part even if the last token of the prompt does not
    embeddings = model.get_input_embeddings()(ids)
    # More than the prompt holds: `generate()` counts the new tokens alone.
    found = model.generate(
        inputs_embeds=embeddings,
        recurrent_mask=limited,
        max_new_tokens=15,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    sequences, want = steps(model, ids, new=15, recurrent_mask=limited)
    assert torch.equal(found.sequences, sequences[:, 11:])
    assert difference(torch.stack(found.logits, dim=1), want) < SAME


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_the_first_forward_of_a_model_attached_without_weights_takes_a_recurrent_mask(
    pathway: str,
) -> None:
    """What a layer's arguments are is learned then, by forwards of the model's own."""
    model, ids = hosted("llama", pathway), tokens(3, 11)
    want = logits(model, ids, recurrent_mask=LIMITED)
    find_attachment(model).layouts = []
    assert difference(logits(model, ids, recurrent_mask=LIMITED), want) < SAME


@pytest.mark.parametrize("shape", [(3, 5), (2, 11), (11,), (3, 11, 1)])
def test_a_recurrent_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model, ids = hosted("llama", "t2mlr-whole"), tokens(3, 11)
    plain = logits(model, ids)
    with pytest.raises(undertow.DataError, match="recurrent_mask has shape"):
        logits(model, ids, recurrent_mask=torch.ones(shape))
    assert torch.equal(logits(model, ids), plain), "and the mask is forgotten"


# --- negative controls


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "falcon"])
def test_control_padding_that_takes_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = hosted(name, "t2mlr-whole"), left_padded()
    monkeypatch.setattr(forward, "real_tokens", lambda *args: None)
    assert padding_error(name, model, ids, mask) > CHANGED


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_control_states_that_leak_between_documents(
    pathway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hosted("llama", pathway)
    monkeypatch.setattr(forward, "documents", lambda *args: None)
    assert packing_error(model) > CHANGED


@pytest.mark.parametrize(
    "name", [name for name in ARCHITECTURES if name in {"llama", "bloom", "falcon", "mpt"}]
)
def test_control_a_recurrent_mask_that_is_dropped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = hosted(name, "turboconn-3"), tokens(3, 11)
    got = logits(model, ids, recurrent_mask=LIMITED)
    active_tokens = forward.active_tokens
    monkeypatch.setattr(
        forward, "active_tokens", lambda real, mask, *sizes: active_tokens(real, None, *sizes)
    )
    assert difference(logits(model, ids, recurrent_mask=LIMITED), got) > CHANGED
