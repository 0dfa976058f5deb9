"""Accuracy by length: counted exactly, whatever the batches, greedy and sampled."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from undertow.errors import ConfigError, DataError
from undertow.lab.evaluation import Accuracy, accuracy_by_length
from undertow.lab.evaluation.accuracy import generate
from undertow.lab.tasks import GSM8K, Example, GroupTracking, Parity, Text, character_tokenizer
from undertow.lab.training.build import build

PARITY = Parity(template="bare", max_length=12)
TOKENIZER = character_tokenizer("01=")


class Scripted(nn.Module):
    """A model whose answer to a prompt is what a function says; it keeps what it was asked."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.answer, self.device = answer, torch.device("cpu")
        self.calls: list[dict[str, Any]] = []

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        self.calls.append({"shape": tuple(input_ids.shape), "training": self.training} | settings)
        assert torch.equal(attention_mask, (input_ids != TOKENIZER.pad_token_id).long())
        assert attention_mask[:, -1].all(), "the padding must stand to the left"
        new = []
        for row in input_ids:
            text = self.answer(TOKENIZER.decode(row, skip_special_tokens=True))
            ids = [*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id]
            new.append(ids + [TOKENIZER.pad_token_id] * (settings["max_new_tokens"] - len(ids)))
        return torch.cat([input_ids, torch.tensor(new)], dim=1)


def parity(prompt: str) -> str:
    return str(prompt.count("1") % 2)


def measure(
    answer: Callable[[str], str], lengths: Sequence[int] = (8, 12), **settings: Any
) -> list[Accuracy]:
    return accuracy_by_length(
        Scripted(answer), TOKENIZER, PARITY, lengths, **({"examples": 30} | settings)
    )


@pytest.fixture(scope="module")
def hosted() -> Any:
    """A tiny model with a recurrence, and weights that make it write all sorts of text."""
    model, _ = build(tiny.recipe(Path("unused"), recurrence=tiny.TURBOCONN | {"lag": 2}), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.suppress_tokens = [
        0,
        1,
        2,
    ]  # it must not end before it has written something
    return model


MIXED = [
    PARITY.example("test", index, length) for index, length in enumerate((8, 9, 12, 25, 10, 8, 17))
]


# Counting


def test_right_answers_are_counted_for_each_length() -> None:
    assert measure(parity) == [Accuracy(8, 0.0, 30, 30), Accuracy(12, 0.0, 30, 30)]
    assert [result.share for result in measure(lambda prompt: "=")] == [0.0, 0.0]


def test_some_right_and_some_wrong() -> None:
    def answer(prompt: str) -> str:
        right = parity(prompt)
        return right if prompt.startswith("1") or len(prompt) == 9 else str(1 - int(right))

    expected = sum(PARITY.example("test", index, 12).prompt.startswith("1") for index in range(30))
    assert 0 < expected < 30
    assert measure(answer) == [Accuracy(8, 0.0, 30, 30), Accuracy(12, 0.0, expected, 30)]


def test_without_lengths_the_split_is_taken_as_it_is() -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return parity(prompt)

    assert measure(answer, lengths=(), split="valid") == [Accuracy(None, 0.0, 30, 30)]
    assert asked == [PARITY.example("valid", index).prompt for index in range(30)]


def test_a_data_set_is_no_larger_than_it_is(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "1", "answer": "#### 10"}\n' * 5)
    task = GSM8K(test=str(path))
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    model, _ = build(tiny.recipe(Path("unused")), seed=0)
    model.resize_token_embeddings(len(tokenizer))
    (result,) = accuracy_by_length(model, tokenizer, task, examples=100)
    assert (result.length, result.total) == (None, 5)


def test_what_cannot_be_asked_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match="parity at length 1 falls in the test split, which seems to hold no such prompt",
    ):
        measure(parity, lengths=[8, 1])
    with pytest.raises(DataError, match="does not know a part of"):
        accuracy_by_length(Scripted(parity), character_tokenizer("01"), PARITY, [8])
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "1", "answer": "#### 10"}')
    with pytest.raises(
        ConfigError, match="length is 8, but gsm8k reads a file as it is; leave length out"
    ):
        accuracy_by_length(Scripted(parity), TOKENIZER, GSM8K(test=str(path)), [8])


# How answers are generated


def test_batches_and_lengths_of_answers() -> None:
    model = Scripted(parity)
    model.train()
    accuracy_by_length(model, TOKENIZER, PARITY, [8], examples=10, batch=4)
    assert [call["shape"] for call in model.calls] == [(4, 9), (4, 9), (2, 9)]
    # A digit, the end, and room to see that it does not stop in time.
    assert {call["max_new_tokens"] for call in model.calls} == {3}
    assert not any(call["training"] or call["do_sample"] for call in model.calls)
    assert model.training, "the mode must be as it was"
    accuracy_by_length(model, TOKENIZER, PARITY, [8], examples=1, max_new_tokens=9)
    assert model.calls[-1]["max_new_tokens"] == 9


def test_rows_of_a_padded_batch_are_answered_as_each_alone(hosted: Any) -> None:
    alone = generate(hosted, TOKENIZER, MIXED, batch=1, temperature=0, max_new_tokens=10)
    assert len(set(alone)) >= 4 and max(map(len, alone)) > 3, f"too alike to show anything: {alone}"
    for batch in (2, 3, 100):
        assert generate(hosted, TOKENIZER, MIXED, batch, temperature=0, max_new_tokens=10) == alone
    # The answers belong to their prompts.
    backwards = generate(hosted, TOKENIZER, MIXED[::-1], batch=3, temperature=0, max_new_tokens=10)
    assert backwards == alone[::-1]


def test_greedy_does_not_depend_on_the_seed_and_sampling_does(hosted: Any) -> None:
    task = Parity(template="bare", max_length=12)
    examples = [Example(f"{index:012b}=", "0", 12) for index in range(40)]

    def texts(temperature: float, seed: int) -> list[str]:
        torch.manual_seed(seed)
        return generate(hosted, TOKENIZER, examples, 40, temperature, 6)

    greedy = texts(0, 0)
    assert texts(0, 1) == greedy
    assert texts(1.0, 0) == texts(1.0, 0) != texts(1.0, 1)
    assert texts(1.0, 0) != greedy
    assert texts(1e-4, 0) == greedy, "a cold sample is the likeliest text"
    hot = "".join(texts(100.0, 0))
    assert all(character in hot for character in "01="), (
        "every token can be drawn, however unlikely"
    )

    state = torch.random.get_rng_state()
    sampled: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 1}
    results = [
        accuracy_by_length(hosted, TOKENIZER, task, [8], 100, **sampled, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.random.get_rng_state(), state), (
        "the caller's random numbers must go on as they were"
    )
    assert results[0] == results[1] and results[0][0].temperature == 1.0
    assert 0 < results[0][0].correct < 100


def test_settings_saved_with_a_model_do_not_change_what_is_measured(hosted: Any) -> None:
    def texts(temperature: float) -> list[str]:
        torch.manual_seed(0)
        return generate(hosted, TOKENIZER, MIXED, 7, temperature, 8)

    greedy, sampled = texts(0), texts(1.0)
    assert greedy != sampled
    kept = hosted.generation_config
    try:
        saved = {"do_sample": True, "temperature": 50.0, "top_k": 1, "top_p": 0.01}
        hosted.generation_config = type(kept)(**(kept.to_dict() | saved))
        assert texts(0) == greedy
        assert texts(1.0) == sampled
    finally:
        hosted.generation_config = kept


# Labels at every position

CYCLIC = GroupTracking(group="Z60", min_length=3, max_length=9)
SYMBOLS = character_tokenizer(CYCLIC.characters())
# as the sums modulo 60 are written
NUMBERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwx"


class Labeller(nn.Module):
    """A model that labels with running sums modulo 60, but for those of its tokens that a function
    says are wrong."""

    def __init__(
        self, wrong: Callable[[int, int, int], bool] = lambda row, position, length: False
    ) -> None:
        super().__init__()
        self.wrong, self.device, self.calls = wrong, torch.device("cpu"), 0
        self.rows = 0

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool
    ) -> Any:
        assert not use_cache and not self.training and not torch.is_grad_enabled()
        assert torch.equal(attention_mask, (input_ids != SYMBOLS.pad_token_id).long())
        assert attention_mask[:, 0].all(), "the padding must stand to the right"
        self.calls += 1
        logits = torch.zeros(*input_ids.shape, len(SYMBOLS))
        for row in range(len(input_ids)):
            text = SYMBOLS.decode(input_ids[row], skip_special_tokens=True)
            total = 0
            for position, symbol in enumerate(text):
                total += NUMBERS.index(symbol)
                told = total + self.wrong(self.rows, position, len(text))
                logits[row, position, SYMBOLS.convert_tokens_to_ids(NUMBERS[told % 60])] = 1
            self.rows += 1
        return type("Output", (), {"logits": logits})


def test_labels_are_compared_at_their_own_positions() -> None:
    assert accuracy_by_length(Labeller(), SYMBOLS, CYCLIC, [5, 8], examples=12) == [
        Accuracy(5, 0.0, 12, 12, 60, 60),
        Accuracy(8, 0.0, 12, 12, 96, 96),
    ]


@pytest.mark.parametrize("batch", [1, 4, 128])
def test_labels_are_counted_one_by_one_and_whole(batch: int) -> None:
    """Lengths are mixed, so that batches are padded; each third sequence has its last label wrong,
    each sixth two."""
    model = Labeller(
        lambda row, position, length: (
            row % 3 == 0 and position in (length - 1, 0 if row % 6 == 0 else -1)
        )
    )
    examples = [CYCLIC.example("test", index) for index in range(12)]
    assert len({example.length for example in examples}) > 3
    symbols = sum(example.length for example in examples)
    model.train()
    assert accuracy_by_length(model, SYMBOLS, CYCLIC, examples=12, batch=batch) == [
        Accuracy(None, 0.0, 8, 12, symbols - 6, symbols)
    ]
    assert model.calls == -(-12 // batch) and model.training


def test_only_the_label_of_the_same_position_is_right() -> None:
    """Labels that come a position late, as a generating model's would, are wrong."""
    late = Labeller()
    original = late.forward
    late.forward = lambda **inputs: type(
        "Output", (), {"logits": original(**inputs).logits.roll(1, dims=1)}
    )  # type: ignore
    (result,) = accuracy_by_length(late, SYMBOLS, CYCLIC, [9], examples=20)
    assert result.correct == 0 and result.symbol_share is not None and result.symbol_share < 0.1


def test_a_padded_hosted_model_labels_as_its_rows_alone() -> None:
    task = {"kind": "group_tracking", "group": "S3", "min_length": 3, "max_length": 12}
    recipe = tiny.recipe(Path("unused"), task=task, recurrence=tiny.T2MLR)
    model, tokenizer = build(recipe, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    found = [
        accuracy_by_length(model, tokenizer, recipe.task, examples=24, batch=batch)
        for batch in (1, 5, 24)
    ]
    assert found[0] == found[1] == found[2]
    assert 0 < (found[0][0].right_symbols or 0) < (found[0][0].symbols or 0)


def test_nothing_is_sampled_for_labels_and_text_has_neither(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"temperature is 0\.5, but nothing is sampled for group_tracking; leave it out",
    ):
        accuracy_by_length(Labeller(), SYMBOLS, CYCLIC, [5], temperature=0.5)
    path = tmp_path / "a.txt"
    path.write_text("0123\n" * 30)
    task = Text((str(path),))
    with pytest.raises(ConfigError, match="no prompts with answers"):
        accuracy_by_length(Labeller(), character_tokenizer(task.characters()), task)


def test_results_are_added_up() -> None:
    labels = [Accuracy(4, 0.0, 1, 3, 9, 12), Accuracy(4, 0.0, 2, 5, 11, 20)]
    assert Accuracy.together(labels) == Accuracy(4, 0.0, 3, 8, 20, 32)
    assert Accuracy.together(labels).symbol_share == 0.625
    answers = Accuracy.together([Accuracy(None, 1.0, 1, 3), Accuracy(None, 1.0, 2, 5)])
    assert answers == Accuracy(None, 1.0, 3, 8) and answers.symbol_share is None


def test_more_than_the_model_can_read_is_refused(hosted: Any) -> None:
    assert hosted.config.max_position_embeddings == 64
    accuracy_by_length(
        hosted, TOKENIZER, PARITY, [61], 2
    )  # a sign after the digits, and an answer of up to three tokens
    with pytest.raises(
        DataError,
        match=r"example 0, '[01]{62}=', takes 65 tokens .* but the model reads 64 at most",
    ):
        accuracy_by_length(hosted, TOKENIZER, PARITY, [62], 2)
    task = GroupTracking(group="S3", min_length=8, max_length=80)
    tokenizer = character_tokenizer(task.characters())
    with pytest.raises(DataError, match="takes 81 tokens"):
        accuracy_by_length(hosted, tokenizer, task, [80], 2)
