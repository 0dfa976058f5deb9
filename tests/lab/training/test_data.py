"""The order of a training's examples: pure, reshuffled every pass, bucketed by length without
losing any."""

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from undertow.errors import ConfigError, DataError
from undertow.lab.runs.recipe import TrainingSection
from undertow.lab.tasks import GSM8K, GroupTracking, Parity, Task, Text, character_tokenizer, encode
from undertow.lab.training.data import BUCKET_BATCHES, bucketed, training_set

PARITY = Parity(template="bare", max_length=12)
BITS = character_tokenizer("01=")
# Everything that a text can hold, for a task that reads a file.
TEXT = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
SECTION = TrainingSection(steps=5, batch=4, accumulate=2)


def items(
    task: Task, section: TrainingSection, seed: int = 0, tokenizer: Any = BITS
) -> list[tuple[int, ...]]:
    dataset: Any = training_set(task, tokenizer, section, seed)[0]
    return [tuple(dataset[i]["input_ids"]) for i in range(len(dataset))]


def batches(order: Sequence[Any], batch: int) -> list[Sequence[Any]]:
    return [order[i : i + batch] for i in range(0, len(order), batch)]


@pytest.fixture
def problems(tmp_path: Path) -> GSM8K:
    """Thirty word problems of different lengths, none of them held out."""
    path, valid = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    rows = [
        {"question": f"{'How many? ' * (n % 7 + 1)}{n}", "answer": f"#### {n}"} for n in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    valid.write_text(json.dumps(rows[0]))
    return GSM8K(train=str(path), valid=str(valid))


# What is trained on


def test_as_many_examples_as_the_steps_take() -> None:
    assert len(items(PARITY, SECTION)) == 5 * 4 * 2


def test_the_order_is_a_pure_function_of_its_arguments(problems: GSM8K) -> None:
    for task, tokenizer in ((PARITY, BITS), (problems, TEXT)):
        first = items(task, SECTION, 3, tokenizer)
        random.random()  # the global generator plays no part
        assert items(dataclasses.replace(task), SECTION, 3, tokenizer) == first
        assert items(task, SECTION, 4, tokenizer) != first


def test_each_seed_and_each_task_seed_draw_examples_of_their_own() -> None:
    long = Parity(template="bare", min_length=40, max_length=40)
    drawn = [set(items(long, SECTION, seed)) for seed in (0, 1, 2)]
    drawn.append(set(items(dataclasses.replace(long, seed=10), SECTION)))
    assert len(set.union(*drawn)) == 4 * 40


def test_items_are_the_training_split_encoded() -> None:
    section = dataclasses.replace(SECTION, bucket_by_length=False)
    dataset: Any = training_set(PARITY, BITS, section, seed=0)[0]
    assert [dataset[i] for i in range(8)] == [
        encode(PARITY.example("train", i), BITS) for i in range(8)
    ]


# Passes over a finite split


def test_a_finite_split_is_reshuffled_every_pass(problems: GSM8K) -> None:
    section = TrainingSection(steps=9, batch=10, bucket_by_length=False)
    passes = batches(items(problems, section, 0, TEXT), 30)
    everything = {tuple(encode(problems.example("train", i), TEXT)["input_ids"]) for i in range(30)}
    assert len(passes) == 3
    assert all(set(each) == everything for each in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_a_last_pass_may_be_cut_short(problems: GSM8K) -> None:
    order = items(problems, TrainingSection(steps=5, batch=10, bucket_by_length=False), 0, TEXT)
    assert len(order) == 50
    assert max(Counter(order).values()) == 2


def test_windows_of_text_are_reshuffled_every_pass_too(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{number}\n" for number in range(300)))
    task = Text((str(path),), context=32)
    windows = task.size("train", TEXT)
    assert windows > 20
    for bucket in (True, False):
        section = TrainingSection(steps=2, batch=windows, bucket_by_length=bucket)
        passes = batches(items(task, section, 0, TEXT), windows)
        everything = {tuple(task.encode("train", i, TEXT)["input_ids"]) for i in range(windows)}
        assert len(everything) == windows
        assert [Counter(each) for each in passes] == [Counter(everything)] * 2
        assert passes[0] != passes[1]
        assert items(task, section, 0, TEXT) != items(task, section, 1, TEXT)


def test_each_seed_draws_group_elements_of_its_own() -> None:
    task = GroupTracking(group="S3", min_length=20, max_length=24)
    tokenizer = character_tokenizer(task.characters())
    drawn = [set(items(task, SECTION, seed, tokenizer)) for seed in (0, 1)]
    assert len(drawn[0] | drawn[1]) == 2 * 40


# Examples that are too long


def test_max_tokens_counts_what_it_leaves_out(problems: GSM8K) -> None:
    sizes = [len(encode(problems.example("train", i), TEXT)["input_ids"]) for i in range(30)]
    limit = sorted(sizes)[12]
    section = TrainingSection(steps=6, batch=10, max_tokens=limit)
    dataset, skipped = training_set(problems, TEXT, section, seed=0)
    assert skipped == sum(size > limit for size in sizes) > 0
    trained: Any = [dataset[i]["input_ids"] for i in range(60)]
    assert max(map(len, trained)) == limit
    assert len(set(map(tuple, trained))) == 30 - skipped
    assert training_set(problems, TEXT, TrainingSection(steps=6, batch=10), seed=0)[1] == 0


def test_max_tokens_on_a_generated_task_still_fills_every_step() -> None:
    section = dataclasses.replace(SECTION, max_tokens=8)
    dataset, skipped = training_set(PARITY, BITS, section, seed=0)
    trained: Any = dataset
    assert len(trained) == 40 and skipped > 0
    assert max(len(trained[i]["input_ids"]) for i in range(40)) == 8


def test_what_the_model_cannot_read_is_an_error(problems: GSM8K) -> None:
    sizes = [len(encode(problems.example("train", i), TEXT)["input_ids"]) for i in range(30)]
    longest = max(sizes)
    section = TrainingSection(steps=3, batch=10)
    dataset, skipped = training_set(problems, TEXT, section, seed=0, context=longest)
    assert skipped == 0 and len(dataset) == 30
    assert max(len(dataset[i]["input_ids"]) for i in range(30)) == longest
    with pytest.raises(
        DataError, match=f"gsm8k train example .* tokens, but at most {longest - 1} may be read"
    ):
        training_set(problems, TEXT, section, seed=0, context=longest - 1)
    with pytest.raises(
        ConfigError, match=r"training\.max_tokens is 50, but the model reads 49 tokens at most"
    ):
        training_set(
            problems, TEXT, dataclasses.replace(section, max_tokens=50), seed=0, context=49
        )


@pytest.mark.parametrize("bucket", [True, False])
def test_nothing_left_is_an_error(problems: GSM8K, bucket: bool) -> None:
    section = TrainingSection(steps=2, batch=4, max_tokens=2, bucket_by_length=bucket)
    for task, tokenizer, count in ((problems, TEXT, 30), (PARITY, BITS, 8)):
        with pytest.raises(
            DataError, match=f"all {count} have more than 2 tokens; raise training.max_tokens"
        ):
            training_set(task, tokenizer, section, seed=0)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl cannot be read"):
        training_set(GSM8K(train=str(tmp_path / "absent.jsonl")), TEXT, SECTION, seed=0)
    with pytest.raises(ConfigError, match="needs the field 'train'"):
        training_set(GSM8K(), TEXT, SECTION, seed=0)


# Buckets


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    batch=st.integers(1, 7),
    seed=st.integers(0, 99),
    data=st.data(),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_bucketing_keeps_the_multiset(
    lengths: list[int], batch: int, seed: int, data: st.DataObject
) -> None:
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=150))
    assert Counter(bucketed(order, lengths, batch, random.Random(seed))) == Counter(order)


def test_batches_have_similar_lengths_and_stay_mixed() -> None:
    plain = items(PARITY, TrainingSection(steps=100, batch=8, bucket_by_length=False))
    sorted_ = items(PARITY, TrainingSection(steps=100, batch=8))
    assert Counter(sorted_) == Counter(plain)

    def padding(order: list[tuple[int, ...]]) -> float:
        filled = sum(map(len, order))
        return sum(8 * max(map(len, batch)) for batch in batches(order, 8)) / filled - 1

    assert padding(sorted_) < 0.03 < 0.3 < padding(plain)
    means = [sum(map(len, batch)) / 8 for batch in batches(sorted_, 8)]
    ups = sum(first < second for first, second in itertools.pairwise(means))
    assert 25 < ups < 75, "the batches are not in random order"


def test_buckets_mix_within_a_stretch_only() -> None:
    batch, seed = 2, 5
    order = list(range(3 * batch * BUCKET_BATCHES))
    mixed = list(bucketed(order, [index % 9 for index in order], batch, random.Random(seed)))
    stretch = batch * BUCKET_BATCHES
    for start in range(0, len(order), stretch):
        assert sorted(mixed[start : start + stretch]) == order[start : start + stretch]
