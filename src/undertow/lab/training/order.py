"""The order of examples that are too many to list: computed where it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

# Of the Feistel network: four make a good shuffle of many, and few take some more.
ROUNDS = 6


@dataclass(frozen=True)
class Shuffled(Sequence[int]):
    """The numbers below `size`, shuffled anew for each pass, `examples` in all.

    A pass is a Feistel network on as many bits as it takes, walked on until it is inside: a
    permutation, of which any place is known without the others. So it takes no memory, and a
    training goes on from any example.
    """

    size: int
    examples: int
    seed: int

    def __len__(self) -> int:
        return self.examples

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self.examples))]
        if not -self.examples <= index < self.examples:
            raise IndexError(index)
        passed, place = divmod(index % self.examples, self.size)
        half = (max(self.size - 1, 1).bit_length() + 1) // 2
        key = f"{self.seed}|{passed}|{self.size}".encode()
        place = _mixed(place, half, key)
        while place >= self.size:
            place = _mixed(place, half, key)
        return place


def _mixed(value: int, half: int, key: bytes) -> int:
    left, right = value >> half, value & ((1 << half) - 1)
    for turn in range(ROUNDS):
        text = b"%b|%d|%d" % (key, turn, right)
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        left, right = right, left ^ (drawn & ((1 << half) - 1))
    return left << half | right
