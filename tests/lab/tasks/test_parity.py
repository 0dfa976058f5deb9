"""Parity answers against an independent count, and the paper's layout."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.lab.tasks import Example, Parity
from undertow.lab.tasks.base import split_of


def odd_ones(bits: str) -> str:
    odd = False
    for bit in bits:
        odd ^= bit == "1"
    return "1" if odd else "0"


@given(st.integers(0, 10**6), st.integers(1, 120), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_answers_are_right(index, length, seed):
    paper = Parity(seed=seed).example("train", index, length)
    bits = paper.prompt.split("\n")[1].removeprefix("Input: ").split(" ")
    assert len(bits) == length and set(bits) <= {"0", "1"}
    assert paper.completion == " " + odd_ones("".join(bits))
    bare = Parity(seed=seed, template="bare").example("train", index, length)
    assert len(bare.prompt) == length + 1 and bare.completion == odd_ones(bare.prompt[:-1])


def test_layout_is_the_papers():
    """Appendix A.4.1, found among the six-bit examples of the split it belongs to."""
    prompt = "Question: Output the parity of this sequence.\nInput: 1 0 0 1 0 1\nAnswer:"
    examples = (Parity().example(split_of(prompt), i, 6) for i in range(2_000))
    assert next(e for e in examples if e.prompt == prompt) == Example(prompt, " 1", 6)


def test_lengths_and_answers_are_even():
    examples = [
        Parity(min_length=3, max_length=12, template="bare").example("train", i)
        for i in range(4_000)
    ]
    lengths = Counter(e.length for e in examples)
    assert set(lengths) == set(range(3, 13))
    assert all(300 < count < 500 for count in lengths.values())
    assert 1_850 < sum(e.completion == "1" for e in examples) < 2_150
