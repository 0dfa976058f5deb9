"""Tokens in shards: files that are mapped into memory and never read whole, each block of which is
checked when it is read."""

from __future__ import annotations

import json
import mmap
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from undertow.errors import DataError
from undertow.files import sync, write_json
from undertow.lab.tasks.example import Split

INDEX = "shards.json"
# Bytes that have one checksum: what is read from the disk for a window, at least.
BLOCK = 2**16
# Shards that one process keeps mapped at a time, as each takes a file handle.
OPEN = 64


class Part(NamedTuple):
    """What a shard holds of one split: its files' name without ending, and their numbers.

    `<name>.ids` has the token ids, `<name>.starts` where each document begins among them (int64),
    and `<name>.sums` the CRC-32 of every block of the ids (uint32). `check` is the CRC-32 of the
    last two, one after the other.
    """

    name: str
    tokens: int
    documents: int
    characters: int
    empty: int
    check: int


def write_part(
    folder: Path, name: str, documents: Iterable[tuple[int, Any]], kind: str, empty: int
) -> Part:
    """Write one split of a shard, of documents as (characters, ids), and bring it to the disk."""
    starts, characters, tokens = [], 0, 0
    with (folder / f"{name}.ids").open("wb") as file:
        for length, ids in documents:
            starts.append(tokens)
            characters += length
            tokens += len(ids)
            file.write(np.asarray(ids, dtype=kind).tobytes())
    content = _mapped(folder / f"{name}.ids", "uint8")
    sums = [zlib.crc32(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]
    rest = np.array(starts, dtype=np.int64).tobytes(), np.array(sums, dtype=np.uint32).tobytes()
    for ending, found in zip(("starts", "sums"), rest, strict=True):
        (folder / f"{name}.{ending}").write_bytes(found)
    for ending in ("ids", "starts", "sums"):
        sync(folder / f"{name}.{ending}")
    return Part(
        name, tokens, len(starts), characters, empty, zlib.crc32(rest[1], zlib.crc32(rest[0]))
    )


class Mapped(NamedTuple):
    """A part of a shard in memory: its bytes are read from the disk as they are asked for."""

    path: Path
    content: Any
    ids: Any
    starts: Any
    sums: Any

    def read(self, start: int, stop: int) -> Any:
        """Ids from `start` to `stop`; raises DataError if a block of them is not what was
        written."""
        size = self.ids.itemsize
        first, last = start * size // BLOCK, -(-stop * size // BLOCK)
        for block in range(first, last):
            at = block * BLOCK
            if zlib.crc32(self.content[at : at + BLOCK]) != self.sums[block]:
                raise damaged(self.path, f"bytes {at:,} and on are not what was written")
        found = self.ids[start:stop].copy()
        if hasattr(mmap, "MADV_DONTNEED") and isinstance(self.content, np.memmap):
            # What was read would count as this process's until others want the memory.
            area: Any = self.content._mmap  # type: ignore[attr-defined]
            area.madvise(
                mmap.MADV_DONTNEED, first * BLOCK, min(last * BLOCK, len(area)) - first * BLOCK
            )
        return found


@lru_cache(maxsize=OPEN)
def opened(folder: Path, part: Part, kind: str) -> Mapped:
    """Map a part of a shard.

    Raises:
        DataError: a file is missing or damaged.
    """
    path = folder / f"{part.name}.ids"
    check_sizes(folder, part, kind)
    try:
        content = _mapped(path, "uint8")
        starts = _mapped(folder / f"{part.name}.starts", "int64")
        sums = np.fromfile(folder / f"{part.name}.sums", dtype=np.uint32)
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if zlib.crc32(sums.tobytes(), zlib.crc32(starts.tobytes())) != part.check:
        raise damaged(path.with_suffix(".starts"), "it or the file of sums is not what was written")
    return Mapped(path, content, content.view(kind), starts, sums)


def check_sizes(folder: Path, part: Part, kind: str) -> None:
    """Raise DataError if a file of a part is missing, or has another size than was written."""
    size = part.tokens * np.dtype(kind).itemsize
    sizes = {"ids": size, "starts": 8 * part.documents, "sums": 4 * -(-size // BLOCK)}
    for ending, expected in sizes.items():
        path = folder / f"{part.name}.{ending}"
        try:
            found = path.stat().st_size
        except OSError as error:
            raise damaged(path, f"it cannot be read ({error.strerror})") from error
        if found != expected:
            raise damaged(path, f"it has {found:,} bytes and not {expected:,}")


def check_whole(folder: Path, part: Part, kind: str) -> None:
    """Read all of a part; raises DataError if anything of it is not what was written."""
    opened.cache_clear()  # what is checked is on the disk, not what was mapped before
    opened(folder, part, kind).read(0, part.tokens)


def damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"the shard {path} is damaged: {why}; the same undertow tokenize as before makes it anew"
    )


@dataclass(frozen=True)
class ShardedRow:
    """The tokens of one split in all shards, one after the other; see
    `undertow.lab.tasks.windows.Row`."""

    folder: Path
    kind: str
    parts: tuple[Part, ...]
    begins: tuple[int, ...]
    """Where each part begins in the row."""
    total: int
    documents: int
    empty: int

    def stretch(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """See `undertow.lab.tasks.windows.Row`. Raises DataError for a damaged shard."""
        stop = min(stop, self.total)
        ids: list[int] = []
        borders: list[int] = []
        number = bisect_right(self.begins, start) - 1
        while len(ids) < stop - start:
            begin, part = self.begins[number], self.parts[number]
            if part.tokens:
                shard = opened(self.folder, part, self.kind)
                low = start + len(ids) - begin
                high = min(stop - begin, part.tokens)
                first, last = np.searchsorted(shard.starts, [low, high])
                borders += (shard.starts[first:last] + (begin - start)).tolist()
                ids += shard.read(low, high).tolist()
            number += 1
        return ids, [border for border in borders if border > 0]


def row_of(folder: Path, kind: str, parts: Iterable[Part]) -> ShardedRow:
    """The row of a split; raises DataError if a file is missing or was cut off."""
    parts, begins, count = tuple(parts), [], 0
    for part in parts:
        check_sizes(folder, part, kind)
        begins.append(count)
        count += part.tokens
    documents, empty = sum(part.documents for part in parts), sum(part.empty for part in parts)
    return ShardedRow(folder, kind, parts, tuple(begins), count, documents, empty)


def write_index(
    folder: Path, about: dict[str, Any], parts: dict[Split, list[Part]]
) -> dict[str, Any]:
    """Write the list of all shards, with which they are complete; it is returned."""
    counted = ("tokens", "documents", "characters", "empty")
    totals = {
        split: {name: sum(getattr(part, name) for part in each) for name in counted}
        for split, each in parts.items()
    }
    index = {**about, "totals": totals, "parts": parts}
    write_json(folder / INDEX, index)
    sync(folder / INDEX)
    sync(folder)
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """The list of all shards.

    Raises:
        DataError: there is none, or it is damaged.
    """
    try:
        text = (folder / INDEX).read_bytes()
    except OSError as error:
        raise DataError(
            f"{folder} holds no complete shards, as {INDEX} cannot be read ({error.strerror}); "
            f"make them by undertow tokenize, which also goes on where it was stopped"
        ) from error
    try:
        index = json.loads(text)
        kind, words = index["id_type"], index["words"]
        parts = {split: [Part(*part) for part in each] for split, each in index["parts"].items()}
        if kind in ("uint16", "uint32") and isinstance(words, str) and set(parts) == set(SPLITS):
            return {**index, "parts": parts}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise damaged(folder / INDEX, "it is not what was written")


SPLITS: tuple[Split, ...] = ("train", "valid", "test")


def _mapped(path: Path, kind: str) -> Any:
    return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.empty(0, dtype=kind)
