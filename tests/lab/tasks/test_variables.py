"""Variable assignment: the chain has the hops that its depth says, and the answer follows from it
alone."""

from collections import Counter
from typing import Any

import pytest

from undertow.errors import ConfigError
from undertow.lab.tasks import VariableAssignment, character_tokenizer, encode, split_of


def solved(example: Any, template: str) -> tuple[dict[str, str], list[str]]:
    """The assignments and the names on the way from the asked one to its value."""
    if template == "bare":
        *lines, asked = example.prompt.rstrip("=").split(";")
    else:
        _, *lines, blank, _ = example.prompt.split("\n")
        asked = blank.removesuffix("=___")
    assigned = dict(line.split("=") for line in lines)
    assert len(assigned) == len(lines), "a name is assigned twice"
    way = [asked]
    while not assigned[way[-1]].isdigit():
        way.append(assigned[way[-1]])
        assert len(way) <= len(assigned), "a circle on the way to the answer"
    return assigned, way


@pytest.mark.parametrize("template", ["paper", "bare"])
@pytest.mark.parametrize("depth", [0, 1, 5, 11, 30])
def test_depth_is_hops_less_one(depth: int, template: Any) -> None:
    task = VariableAssignment(template=template, min_depth=depth, max_depth=depth)
    for index in range(40):
        example = task.example("train", index)
        assigned, way = solved(example, template)
        assert example.length == depth and len(way) - 1 == depth + 1
        assert example.completion.strip() == assigned[way[-1]]
        assert len(assigned) == 8 + depth + 1 + 6
        assert sum(value.isdigit() for value in assigned.values()) == 8
        assert set(example.prompt + example.completion) <= set(task.characters())
        assert split_of(example.prompt) == "train"
        assert task.score(example, example.completion) and not task.score(example, "x")


@pytest.mark.parametrize("template", ["paper", "bare"])
def test_the_chain_of_thought_walks_the_chain(template: Any) -> None:
    task = VariableAssignment(template=template, min_depth=0, max_depth=6, chain_of_thought=True)
    for index in range(40):
        example = task.example("train", index)
        assigned, way = solved(example, template)
        assert example.completion.strip().split("=") == [*way[1:], assigned[way[-1]]]
        assert task.score(example, example.completion) and task.score(
            example, f"x=y={assigned[way[-1]]}\nmore"
        )
        for wrong in (
            assigned[way[-1]],
            "",
            "=",
            example.completion + "1",
            f"{example.completion[:-1]}x",
        ):
            assert not task.score(example, wrong)


def test_nothing_gives_the_answer_away() -> None:
    """Neither the asked name, nor the first line's value, nor the number of distractors on a
    value."""
    task = VariableAssignment(template="bare", min_depth=2, max_depth=2)
    right, pointed = 0, 0
    answers: Counter[str] = Counter()
    for index in range(1500):
        example = task.example("train", index)
        assigned, _ = solved(example, "bare")
        values = [value for value in assigned.values() if value.isdigit()]
        answers[example.completion] += 1
        right += values[0] == example.completion
        aliased = Counter(
            value for value in assigned.values() if value in assigned and assigned[value].isdigit()
        )
        pointed += len(aliased) > 1
    assert all(100 < answers[str(digit)] < 200 for digit in range(10)), answers
    assert 0.15 < right / 1500 < 0.29  # one in eight, or the same digit by chance
    assert pointed > 1000  # mostly, other values have aliases too


def test_lengths_are_depths() -> None:
    task = VariableAssignment(min_depth=1, max_depth=3)
    assert {task.example("train", i).length for i in range(60)} == {1, 2, 3}
    assert task.example("test", 0, 7).length == 7
    tokenizer = character_tokenizer(task.characters())
    assert encode(task.example("valid", 0), tokenizer)["labels"][-1] == tokenizer.eos_token_id


def test_letters_run_out_with_a_clear_message() -> None:
    with pytest.raises(
        ConfigError,
        match=r"max_depth is 38, but 52 letters .* a chain of depth 37 at most; lower it",
    ):
        VariableAssignment(max_depth=38)
    with pytest.raises(ConfigError, match="length is 38"):
        VariableAssignment().example("train", 0, 38)
    assert VariableAssignment().example("train", 0, 37).length == 37


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_depth": -1}, "min_depth is -1"),
        ({"values": 0}, "values is 0"),
        ({"distractors": -1}, "distractors is -1"),
        ({"min_depth": 6}, "max_depth is 5"),
        ({"template": "x"}, "template: .*got 'x'"),
    ],
)
def test_bad_settings_are_named(fields: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        VariableAssignment(**fields)
