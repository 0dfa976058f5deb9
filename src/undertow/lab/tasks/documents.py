"""Where text comes from: text files, rows of JSON files, or a data set that the package datasets
loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from undertow.errors import DataError, shown
from undertow.lab.tasks.base import split_of
from undertow.lab.tasks.example import Split
from undertow.lab.tasks.rows import load_splits, rows_of
from undertow.reading import read_text

OF_ROWS = (".jsonl", ".json")


class Document(NamedTuple):
    """A text that has nothing to do with the one before it."""

    split: Split
    text: str
    whole: bool
    """Whether the text ends here; not so where a file is cut into splits."""


class Sources(NamedTuple):
    """Files, each with its size and the time of its last change, or a data set; and the column with
    the text of a row."""

    files: tuple[tuple[Path, int, int], ...]
    hub: str | None
    column: str

    @property
    def described(self) -> str:
        return self.hub or ", ".join(str(path) for path, *_ in self.files)


def stamped(path: Path) -> tuple[Path, int, int]:
    """A file with its size and the time of its last change, by which a changed one is known.

    Raises:
        DataError: it cannot be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return path, found.st_size, found.st_mtime_ns


def documents(sources: Sources) -> Iterator[Document]:
    """Every document in order; those with nothing but blanks too.

    Raises:
        DataError: a file cannot be read, is empty or no UTF-8, or a row has no text, which is
            named.
    """
    if sources.hub is not None:
        yield from _of_hub(sources.hub, sources.column)
    for path, _, modified in sources.files:
        if path.suffix not in OF_ROWS:
            text = _read(path, modified)
            train = _cut(text, 0, 90)
            valid = _cut(text, train, 95)
            yield Document("train", text[:train], False)
            yield Document("valid", text[train:valid], False)
            yield Document("test", text[valid:], False)
            continue
        try:
            for where, row in rows_of(path):
                text = text_of(row, sources.column, where)
                yield Document(split_of(text), text, True)
        except OSError as error:
            raise _unreadable(path, error) from error


def _of_hub(name: str, column: str) -> Iterator[Document]:
    """A data set's own validation and test splits if it has both, or else its train split, divided
    by each text's hash."""
    splits, own = load_splits(name, streaming=True)
    divided = len(own) < 3
    for split, theirs in own.items():
        if split == "train" or not divided:
            for number, row in enumerate(streamed(splits[theirs], name)):
                text = text_of(row, column, f"{name}, {theirs} row {number}")
                yield Document(split_of(text) if divided else split, text, True)


def streamed(rows: Iterable[Any], name: str) -> Iterator[Any]:
    """The rows of a data set as they come; raises DataError where the hub or the network fails on
    the way."""
    coming = iter(rows)
    while True:
        try:
            row = next(coming)
        except StopIteration:
            return
        except Exception as error:  # hub, network and parser raise any kind
            raise DataError(
                f"the data set {name} stopped coming: {str(error).partition(chr(10))[0]}; try again"
            ) from error
        yield row


def text_of(row: object, column: str, where: str) -> str:
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f"{where}: expected an object with a text as {column!r}, found {shown(row)}; correct "
            "it or set column."
        )
    return text


@lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> str:
    try:
        text = read_text(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not text:
        raise DataError(f"{path} is empty; give a file with text.")
    return text


def _cut(text: str, start: int, percent: int) -> int:
    """Where a split from `start` on ends: behind its last line break in the first `percent` of the
    text, if any."""
    limit = len(text) * percent // 100
    return text.rfind("\n", start, limit) + 1 or limit


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror}); check the paths in files.")
