"""S5-Retrieval: the dictionary, the running state, and labels where they belong."""

from typing import Any

import pytest

from undertow.errors import ConfigError
from undertow.lab.tasks import GroupRetrieval, character_tokenizer, encode, split_of
from undertow.lab.tasks.groups import multiplication_table
from undertow.lab.tasks.retrieval import ELEMENTS, ENTRY_ALPHABET


def parts(task: GroupRetrieval, example: Any) -> tuple[dict[str, str], list[str], list[str]]:
    """The dictionary, the elements and the label pieces of an example, read from its text alone."""
    step = 1 + task.entry_length
    written, bar, asked = example.prompt.partition("|")
    assert bar and len(written) % step == len(asked) % step == 0
    entries = {written[i]: written[i + 1 : i + step] for i in range(0, len(written), step)}
    assert len(entries) * step == len(written), "a key stands twice"
    assert all(
        asked[i + 1 : i + step] == " " * task.entry_length for i in range(0, len(asked), step)
    )
    labels = [example.completion[i : i + step] for i in range(0, len(example.completion), step)]
    return entries, [asked[i] for i in range(0, len(asked), step)], labels


@pytest.mark.parametrize("retrieve", ["state", "action"])
@pytest.mark.parametrize(("group", "size"), [("S5", None), ("S3", None), ("S3", 4)])
def test_labels_are_states_and_their_entries(group: Any, size: int | None, retrieve: Any) -> None:
    task = GroupRetrieval(
        group=group, dictionary_size=size, retrieve=retrieve, max_length=12, entry_length=3
    )
    table = multiplication_table(group)
    absent = 0
    for index in range(30):
        example = task.example("train", index)
        entries, elements, labels = parts(task, example)
        assert (
            len(entries) == (size or len(table)) and len(elements) == len(labels) == example.length
        )
        assert all(set(entry) <= set(ENTRY_ALPHABET) for entry in entries.values())
        assert set(example.prompt + example.completion) <= set(task.characters())
        assert split_of(example.prompt) == "train"
        state = 0
        for element, label in zip(elements, labels, strict=True):
            state = table[state][ELEMENTS.index(element)]
            assert label[0] == ELEMENTS[state]
            key = element if retrieve == "action" else ELEMENTS[state]
            assert label[1:] == entries.get(key, "---")
            absent += key not in entries
    assert bool(absent) == (size is not None and retrieve == "state")


def test_each_sequence_has_a_dictionary_of_its_own_in_an_order_of_its_own() -> None:
    task = GroupRetrieval(group="S3")
    first, second = (parts(task, task.example("train", i))[0] for i in (0, 1))
    assert first != second and list(first) != list(second) and set(first) == set(second)


def test_five_tokens_a_state_and_no_label_in_the_dictionary() -> None:
    task = GroupRetrieval()
    example = task.example("test", 0, 48)
    assert len(example.completion) == 240 and len(example.prompt) == 600 + 1 + 240
    tokenizer = character_tokenizer(task.characters())
    item = encode(example, tokenizer)
    assert len(item["input_ids"]) == len(item["labels"]) == 842
    assert item["labels"][:602] == [-100] * 602
    assert tokenizer.decode(item["labels"][602:]) == example.completion
    assert tokenizer.decode(item["input_ids"][601:606]) == example.prompt[601:606]
    assert not task.score(example, example.completion[:-1] + "|") and task.score(
        example, example.completion
    )


def test_elements_are_no_letters_of_an_entry() -> None:
    assert len(set(ELEMENTS)) == 120 and not set(ELEMENTS) & set(ENTRY_ALPHABET + "| -")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"group": "S4"}, "group: .*got 'S4'"),
        ({"retrieve": "both"}, "retrieve: expected one of 'state', 'action', got 'both'"),
        ({"entry_length": 0}, "entry_length is 0"),
        ({"min_length": 4, "max_length": 3}, "max_length is 3"),
        (
            {"group": "S3", "dictionary_size": 7},
            "dictionary_size is 7, but must be between 1 and the 6 elements of S3",
        ),
        ({"dictionary_size": 0}, "dictionary_size is 0"),
    ],
)
def test_bad_settings_are_named(fields: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GroupRetrieval(**fields)
