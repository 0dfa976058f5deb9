"""Group tables against what is known of the groups, and the sequences and labels that are made from
them."""

from collections import Counter
from itertools import permutations, product
from math import gcd
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import Example, GroupTracking, character_tokenizer, encode, split_of
from undertow.lab.tasks.groups import SYMBOLS, multiplication_table

GROUPS: Any = ("S3", "S5", "A5", "Z60", "A4xZ5")
# How many elements of each order a group has: for S5, say, 10 + 15 of order 2.
ELEMENT_ORDERS = {
    "S3": {1: 1, 2: 3, 3: 2},
    "S5": {1: 1, 2: 25, 3: 20, 4: 30, 5: 24, 6: 20},
    "A5": {1: 1, 2: 15, 3: 20, 5: 24},
    "Z60": Counter(60 // gcd(number, 60) for number in range(60)),
    "A4xZ5": {1: 1, 2: 3, 3: 8, 5: 4, 10: 12, 15: 32},
}
# The orders of the derived series, until it stays: a group is solvable if it ends with 1.
DERIVED_SERIES = {"S3": [6, 3, 1], "S5": [120, 60], "A5": [60], "Z60": [60, 1], "A4xZ5": [60, 4, 1]}


def order_of(table: Any, element: int) -> int:
    power, order = element, 1
    while power:
        power, order = table[power][element], order + 1
    return order


def derived(table: Any, elements: set[int]) -> set[int]:
    """The subgroup that the commutators of these elements generate."""
    inverse = {a: next(b for b in elements if table[a][b] == 0) for a in elements}
    commutators = {
        table[table[a][b]][table[inverse[a]][inverse[b]]] for a in elements for b in elements
    }
    found = {0} | commutators
    while True:
        more = {table[a][b] for a in found for b in commutators} - found
        if not more:
            return found
        found |= more


# The tables


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_a_group(group: Any) -> None:
    table = torch.tensor(multiplication_table(group))
    size = len(table)
    every = torch.arange(size)
    assert table.shape == (size, size)
    assert torch.equal(table[0], every) and torch.equal(table[:, 0], every), (
        "element 0 is no identity"
    )
    for line in (*table, *table.T):  # so that there are inverses, to both sides
        assert torch.equal(line.sort().values, every)
    assert torch.equal(table[table], table[every[:, None, None], table[None]]), (
        "(a b) c is not a (b c)"
    )


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_the_group_that_its_name_says(group: Any) -> None:
    table = multiplication_table(group)
    assert len(table) == {"S3": 6, "S5": 120, "A5": 60, "Z60": 60, "A4xZ5": 60}[group]
    assert (
        Counter(order_of(table, element) for element in range(len(table))) == ELEMENT_ORDERS[group]
    )
    series, now = [len(table)], set(range(len(table)))
    while len(following := derived(table, now)) < len(now):
        series.append(len(following))
        now = following
    assert series == DERIVED_SERIES[group]
    commutes = all(table[a][b] == table[b][a] for a, b in product(range(len(table)), repeat=2))
    assert commutes == (group == "Z60")


def test_a5_lies_in_s5() -> None:
    """As its even permutations: those whose matrix has the determinant 1."""
    every = list(permutations(range(5)))
    even = [p for p in every if torch.linalg.det(torch.eye(5)[list(p)]) > 0]
    inner, outer = multiplication_table("A5"), multiplication_table("S5")
    for a, b in product(range(60), repeat=2):
        assert every[outer[every.index(even[a])][every.index(even[b])]] == even[inner[a][b]]


@pytest.mark.parametrize(("group", "count"), [("S3", 3), ("S5", 5)])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_the_state_is_rearranged_by_each_element(group: Any, count: int, seed: int) -> None:
    """The published definition: the new state is [state[i] for i in element]."""
    elements = list(permutations(range(count)))
    example = GroupTracking(group=group, seed=seed).example("train", 0)
    state = list(range(count))
    for symbol, label in zip(example.prompt, example.completion, strict=True):
        state = [state[i] for i in elements[SYMBOLS.index(symbol)]]
        assert elements[SYMBOLS.index(label)] == tuple(state)


def test_the_order_of_composition_matters() -> None:
    table, elements = multiplication_table("S3"), list(permutations(range(3)))
    swap, turn = elements.index((1, 0, 2)), elements.index((1, 2, 0))
    # First turn, then swap: 0 -> 1 -> 0, 1 -> 2 -> 2, 2 -> 0 -> 1.
    assert elements[table[swap][turn]] == (0, 2, 1)
    assert elements[table[turn][swap]] == (2, 1, 0)


# Examples


@pytest.mark.parametrize("group", GROUPS)
def test_labels_are_the_running_products(group: Any) -> None:
    task, table = (
        GroupTracking(group=group, min_length=2, max_length=9),
        multiplication_table(group),
    )
    lengths = Counter()
    for index in range(200):
        example = task.example("train", index)
        lengths[example.length] += 1
        assert example.aligned and len(example.prompt) == len(example.completion) == example.length
        assert split_of(example.prompt) == "train"
        assert set(example.prompt + example.completion) <= set(task.characters())
        numbers = [SYMBOLS.index(symbol) for symbol in example.prompt]
        labels = [SYMBOLS.index(symbol) for symbol in example.completion]
        assert labels[0] == numbers[0]
        assert labels[1:] == [
            table[before][x] for before, x in zip(labels, numbers[1:], strict=False)
        ]
    assert set(lengths) == set(range(2, 10))


def test_elements_are_drawn_uniformly() -> None:
    task = GroupTracking(group="S3", min_length=50, max_length=50)
    drawn = Counter("".join(task.example("train", index).prompt for index in range(120)))
    assert set(drawn) == set(task.characters()) and len(drawn) == 6
    assert all(850 < count < 1150 for count in drawn.values()), drawn


@pytest.mark.parametrize(("group", "count"), [("S3", 4), ("S5", 11)])
def test_swaps_reach_every_state(group: Any, count: int) -> None:
    task, table = (
        GroupTracking(group=group, swaps=True, min_length=400, max_length=400),
        multiplication_table(group),
    )
    examples = [task.example("train", i) for i in range(4)]
    drawn = {SYMBOLS.index(symbol) for one in examples for symbol in one.prompt}
    assert len(drawn) == count
    assert all(table[element][element] == 0 for element in drawn)  # each is its own inverse
    assert len({symbol for one in examples for symbol in one.completion}) == len(table)


def test_symbols_are_distinct_tokens() -> None:
    assert len(set(SYMBOLS)) == len(SYMBOLS) >= 120
    assert all(symbol.isprintable() and not symbol.isspace() for symbol in SYMBOLS)
    characters = GroupTracking().characters()
    assert len(characters) == 120 and "".join(sorted(characters)) == characters
    tokenizer = character_tokenizer(characters)
    ids = tokenizer(characters)["input_ids"]
    assert len(set(ids)) == 120 and tokenizer.decode(ids) == characters


def test_examples_are_pure_and_longer_ones_can_be_asked_for() -> None:
    task = GroupTracking(group="A5")
    assert task.example("test", 5) == GroupTracking(group="A5").example("test", 5)
    assert task.example("test", 5) != GroupTracking(group="A5", seed=1).example("test", 5)
    assert task.example("valid", 0, 200).length == 200
    assert task.size("train") is None


def test_splits_share_no_sequence() -> None:
    prompts = {
        split: {
            GroupTracking(group="S3", max_length=5, seed=seed).example(split, i).prompt
            for seed in (0, 1)
            for i in range(200)
        }
        for split in ("train", "valid", "test")
    }
    assert all(prompts.values())
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not prompts[first] & prompts[second]


def test_a_split_without_such_a_sequence_is_an_error() -> None:
    """None of the six sequences of one element happens to be a test one."""
    assert "test" not in {split_of(symbol) for symbol in GroupTracking(group="S3").characters()}
    with pytest.raises(
        DataError, match=r"None of .* draws of group_tracking at length 1 falls in the test split"
    ):
        GroupTracking(group="S3").example("test", 0, 1)


def test_all_labels_must_be_right() -> None:
    task = GroupTracking(group="S3")
    example = task.example("train", 0, 6)
    assert task.score(example, example.completion)
    assert not task.score(example, example.completion[:-1])
    assert not task.score(
        example, example.completion[:-1] + ("1" if example.completion[-1] == "0" else "0")
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"group": "S4"}, "group: expected one of 'S3', 'S5', 'A5', 'Z60', 'A4xZ5', got 'S4'"),
        ({"group": "Z60", "swaps": True}, "swaps is true, but Z60 has no swap"),
        ({"min_length": 0}, "min_length is 0"),
        ({"min_length": 5, "max_length": 4}, "max_length is 4"),
    ],
)
def test_bad_settings_are_named(fields: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GroupTracking(**fields)


# Encoded


def test_each_symbol_is_scored_against_its_own_label() -> None:
    task = GroupTracking(group="S5")
    tokenizer = character_tokenizer(task.characters())
    example = task.example("train", 1)
    item = encode(example, tokenizer)
    assert tokenizer.decode(item["input_ids"]) == example.prompt + "<eos>"
    assert item["labels"][0] == -100
    # A causal model's loss takes the output at t against the label of t + 1.
    shifted = item["labels"][1:]
    assert tokenizer.decode(shifted) == example.completion and len(shifted) == example.length


def test_a_tokenizer_that_joins_symbols_is_refused() -> None:
    class Joining:
        eos_token_id, unk_token_id, bos_token_id = 1, 0, None

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [5] * -(-len(text) // 2)}

    tokenizer: Any = Joining()
    with pytest.raises(DataError, match="does not make one token of each symbol of '0123'"):
        encode(Example("0123", "0123", 4, aligned=True), tokenizer)
    assert encode(Example("0123", "0123", 4), tokenizer)["input_ids"] == [5, 5, 5, 5, 1]
