"""An order that is computed is a shuffle, the same wherever it is begun."""

from itertools import pairwise

import pytest

from undertow.lab.training.order import Shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 10, 64, 1000])
def test_each_pass_takes_everything_once(size: int) -> None:
    order = Shuffled(size, 3 * size, seed=5)
    passes = [order[at : at + size] for at in range(0, 3 * size, size)]
    assert all(sorted(each) == list(range(size)) for each in passes)
    assert order[size:] == list(order)[size:]
    if size > 50:
        assert passes[0] != passes[1] != list(range(size))
        assert passes[0] != Shuffled(size, size, seed=6)[:]


def test_it_looks_like_a_shuffle() -> None:
    size = 2000
    found = Shuffled(size, size, seed=0)[:]
    near = sum(abs(a - b) < size // 10 for a, b in pairwise(found)) / size
    assert near == pytest.approx(0.19, abs=0.04)  # of independent draws: 1 - 0.9 ** 2
    assert sum(found[: size // 2]) / (size // 2) == pytest.approx(size / 2, rel=0.06)


def test_a_place_is_known_without_the_others() -> None:
    order = Shuffled(10**12, 10**13, seed=0)
    assert len(order) == 10**13 and 0 <= order[9 * 10**12 + 7] < 10**12
    with pytest.raises(IndexError):
        order[10**13]
    assert str(order) == str(Shuffled(10**12, 10**13, 0)) != str(Shuffled(10**12, 10**13, 1))
