"""What holds for every generated task: determinism, disjoint splits, exact scoring, complete
alphabets."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import TASKS, Example, MultiStepArithmetic, Parity, split_of

SPLITS = ("train", "valid", "test")

generated = st.builds(
    lambda cls, template, seed: cls(template=template, seed=seed),
    st.sampled_from([Parity, MultiStepArithmetic]),
    st.sampled_from(["paper", "bare"]),
    st.integers(0, 2**40),
)
indices = st.integers(0, 10**9)


@given(generated, st.sampled_from(SPLITS), indices)
@settings(max_examples=60, deadline=None)
def test_example_is_pure_and_lies_in_its_split(task, split, index):
    example = task.example(split, index)
    assert example == type(task)(template=task.template, seed=task.seed).example(split, index)
    assert split_of(example.prompt) == split
    assert task.size(split) is None
    assert 1 <= example.length <= (70 if task.kind == "parity" else 30)
    assert set(example.prompt + example.completion) <= set(task.characters())


@given(generated, indices, st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_length_is_exact_also_beyond_the_trained_range(task, index, length):
    assert task.example("train", index, length).length == length


def test_splits_are_disjoint_across_seeds():
    prompts = {
        split: {
            Parity(max_length=8, seed=seed).example(split, i).prompt
            for seed in (0, 1)
            for i in range(300)
        }
        for split in SPLITS
    }
    assert all(prompts.values())
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not prompts[first] & prompts[second]


def test_seed_index_and_split_change_the_example():
    task = Parity(min_length=40)
    prompts = [task.example("train", i).prompt for i in range(50)]
    prompts += [task.example("valid", i).prompt for i in range(50)]
    prompts += [Parity(min_length=40, seed=1).example("train", i).prompt for i in range(50)]
    assert len(set(prompts)) == 150


def test_split_shares():
    splits = [split_of(str(i)) for i in range(20_000)]
    assert splits.count("train") / 20_000 == pytest.approx(0.90, abs=0.01)
    assert splits.count("valid") / 20_000 == pytest.approx(0.05, abs=0.01)


def test_examples_stay_the_same_for_ever():
    """Pinned, as results of different days and machines are compared; Python's own hash() would
    fail here."""
    assert Parity(template="bare").example("test", 0, 9) == Example("011110111=", "1", 9)


@given(generated, indices, st.text(max_size=8))
@settings(max_examples=60, deadline=None)
def test_score_takes_the_right_answer_only(task, index, noise):
    example = task.example("train", index)
    assert task.score(example, example.completion)
    assert task.score(example, f"\n{example.completion} \nQuestion: something else")
    assert not task.score(example, "")
    for wrong in set("0123456789") - {example.completion.strip()}:
        assert not task.score(example, wrong)
        assert not task.score(example, f"{wrong}\n{example.completion}")
    assert not task.score(example, example.completion + example.completion.strip())
    assume(noise.strip().partition("\n")[0].strip() != example.completion.strip())
    assert not task.score(example, noise)


@pytest.mark.parametrize(
    "arguments", [("training", 0), ("train", -1), ("train", 0, 0), ("train", 0, -3)], ids=str
)
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(ConfigError):
        Parity().example(*arguments)


def test_split_without_such_a_prompt_is_an_error_not_a_loop():
    assert {Parity().example("train", i, 1).prompt.split("\n")[1] for i in range(20)} == {
        "Input: 0",
        "Input: 1",
    }
    with pytest.raises(DataError, match=r"parity at length 1 .* test split"):
        Parity().example("test", 0, 1)
    with pytest.raises(DataError, match="configured lengths"):
        Parity(max_length=1).example("test", 0)


@pytest.mark.parametrize(
    ("cls", "fields", "named"),
    [
        (Parity, {"min_length": 0}, "min_length is 0"),
        (Parity, {"min_length": 5, "max_length": 4}, "max_length is 4"),
        (Parity, {"template": "papers"}, "template: expected one of 'paper', 'bare', got 'papers'"),
        (MultiStepArithmetic, {"min_operands": 0}, "min_operands is 0"),
        (MultiStepArithmetic, {"min_operands": 9, "max_operands": 8}, "max_operands is 8"),
        (MultiStepArithmetic, {"template": ""}, "'paper', 'bare', got ''"),
    ],
)
def test_bad_settings_are_named(cls, fields, named):
    with pytest.raises(ConfigError, match=named):
        cls(**fields)


def test_registry_names_each_kind():
    assert {"parity", "arithmetic", "group_tracking", "gsm8k", "text"} < set(TASKS)
    assert all(cls.kind == kind for kind, cls in TASKS.items())
