"""Tasks whose items are the rows of local files, or of a data set that the package datasets
loads."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.base import Task, check_split, split_of
from undertow.lab.tasks.example import Split
from undertow.reading import MalformedError, expanded, parse_json, read_json, read_lines
from undertow.settings import settings


class LeftOutError(Exception):
    """What `RowsTask.parse` raises for a row that is well-formed but no item; its text says why,
    for the count."""


class Loaded(NamedTuple):
    """The items of a split, and how many of its rows are none, by reason."""

    items: tuple[Any, ...]
    left_out: Mapping[str, int]


@settings
class RowsTask(Task):
    """A task that reads rows: JSON lines, a JSON list in a .json file, or lines of text in a .txt
    file.

    Without a `valid` file, the valid split is the twentieth of the train file whose `key`
    `undertow.lab.tasks.base.split_of` puts into 'valid', and the train split is the rest. Instead
    of files, `hub` names a data set whose rows have the same fields; it needs the package datasets.
    Its validation split, if it has one, is the valid split.
    """

    items: ClassVar[str] = "rows"
    """What messages call what a file holds."""
    holds_out_test: ClassVar[bool] = False
    """Whether the test split, if there is none, is held out of train like the valid one."""

    train: str | None = None
    """Path of the file with what is trained on."""
    test: str | None = None
    """Path of the file with what is tested on."""
    valid: str | None = None
    """Path of a file for validation. If absent, a fixed twentieth of the train file is held out."""
    hub: str | None = None
    """Name of a data set of the Hugging Face hub, for the splits without a file: path,
    path:configuration or, where what is to be trained on is not called train,
    path:configuration:split. Or a folder that datasets can load."""

    @abstractmethod
    def parse(self, row: Any) -> Any:
        """Make an item of a row: what JSON or datasets gives, or a line of a .txt file.

        Raises:
            ValueError: the row is malformed; the text says what was expected and found.
            LeftOutError: the row is none of this task's.
        """

    @abstractmethod
    def key(self, item: Any) -> str:
        """The text of an item that decides whether it is held out."""

    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
        """How many items the split holds; see `Task.size`."""
        return len(self._loaded(split).items)

    def left_out(
        self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Mapping[str, int]:
        """See `Task.left_out`."""
        return self._loaded(split).left_out

    def item(self, split: Split, index: int) -> Any:
        """Item `index` of the split. Raises DataError if there is none."""
        items = self._loaded(split).items
        if not 0 <= index < len(items):
            raise DataError(
                f"There is no {self.kind} example {index}, as the {split} split holds "
                f"{len(items)}; ask for a smaller index, counted from 0."
            )
        return items[index]

    def characters(self) -> str | None:
        """None: rows are free text."""
        return None

    def _loaded(self, split: Split) -> Loaded:
        check_split(split)
        paths: dict[str, str | None] = {"train": self.train, "valid": self.valid, "test": self.test}
        may_be: tuple[Split, ...] = ("valid", "test") if self.holds_out_test else ("valid",)
        held = tuple(each for each in may_be if paths[each] is None)
        name = "train" if split in held else split
        path = paths[name]
        if path is None and self.hub is not None:
            return _load_hub(self, self.hub, split, held)
        if path is None:
            raise ConfigError(
                f"The {split} split needs the field {name!r} of {self.kind}; give it the path of a "
                "file."
            )
        try:
            file = expanded(path)
            return _load_file(
                self, file, file.stat().st_mtime_ns, split if name == "train" else None, held
            )
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error.strerror}); check the path of the {name} file."
            ) from error


@lru_cache(maxsize=8)
def _load_file(
    task: RowsTask, path: Path, modified: int, part: Split | None, held: tuple[Split, ...] = ()
) -> Loaded:
    """Read a file, or a part of the train file; `modified` makes a changed one be read again."""
    if part is not None and held:
        return _part_of(task, _load_file(task, path, modified, None), part, held)
    found = _parsed(task, rows_of(path), "; correct or remove the line.")
    if not found.items:
        raise DataError(
            f"{path} holds no {task.items}{_why(found.left_out)}; give a file with one a line."
        )
    return found


@lru_cache(maxsize=8)
def _load_hub(task: RowsTask, name: str, split: Split, held: tuple[Split, ...]) -> Loaded:
    """Read one split of a data set of the hub. The `held` ones that it does not have are held out
    of train."""
    splits, own = load_splits(name)
    held = tuple(each for each in held if each not in own)
    theirs = own.get("train" if split in held else split)
    if theirs is None:
        raise DataError(
            f"the data set {name} has no {split} split, but {', '.join(splits)}; give a file for "
            "it."
        )
    found = _parsed(
        task, ((f"{name}, {theirs} row {n}", row) for n, row in enumerate(splits[theirs])), "."
    )
    if not found.items:
        raise DataError(
            f"the {theirs} split of {name} holds no {task.items}{_why(found.left_out)}; give "
            "another data set."
        )
    return _part_of(task, found, split, held) if theirs == own["train"] and held else found


def _parsed(task: RowsTask, rows: Iterable[tuple[str, Any]], mend: str) -> Loaded:
    items, left_out = [], Counter[str]()
    for where, row in rows:
        try:
            items.append(task.parse(row))
        except LeftOutError as reason:
            left_out[str(reason)] += 1
        except ValueError as error:
            raise DataError(f"{where}: {error}{mend}") from error
    return Loaded(tuple(items), dict(left_out))


def _part_of(task: RowsTask, whole: Loaded, part: Split, held: tuple[Split, ...]) -> Loaded:
    """The train part of all rows, or one that is held out of them."""
    splits = (split_of(task.key(item)) for item in whole.items)
    kept = tuple(
        item
        for item, own in zip(whole.items, splits, strict=True)
        if (own if own in held else "train") == part
    )
    return Loaded(kept, whole.left_out if part == "train" else {})


def _why(left_out: Mapping[str, int]) -> str:
    return "".join(f" ({count:,} left out: {reason})" for reason, count in left_out.items())


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Every row of a file with the words for where it stands; empty lines are passed over.

    Raises:
        DataError: the file is no UTF-8 text, or a row is no JSON.
        OSError: it cannot be read.
    """
    if path.suffix == ".json":
        yield from _rows_of_list(path)
        return
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = line if path.suffix == ".txt" else parse_json(line)
        except MalformedError as error:
            raise DataError(f"{where}: {error}; correct or remove the line.") from error
        yield where, row


def _rows_of_list(path: Path) -> Iterator[tuple[str, Any]]:
    rows = read_json(path, mend="give JSON lines the ending .jsonl.")
    if not isinstance(rows, list):
        raise DataError(
            f"{path} holds no list; give a JSON list of rows, or JSON lines with the ending .jsonl."
        )
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def load_splits(name: str, streaming: bool = False) -> tuple[Any, dict[Split, str]]:
    """The splits of a data set by name, of the hub or of a folder, and what it calls those of ours
    that it has.

    `name` is path, path:configuration or path:configuration:split, where split is what stands for
    train.

    Raises:
        ConfigError: the package datasets is missing.
        DataError: there is no such data set.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "hub needs the package datasets; install it with: pip install datasets"
        ) from error
    path, _, rest = name.partition(":")
    configuration, _, train = rest.partition(":")
    try:
        splits = datasets.load_dataset(path, configuration or None, streaming=streaming)
    except Exception as error:  # hub, network and parser raise any kind
        raise DataError(
            f"the data set {name} cannot be loaded: {str(error).partition(chr(10))[0]}"
        ) from error
    train = train or "train"
    if train not in splits:
        raise DataError(
            f"the data set {name} has no {train} split, but {', '.join(splits)}; name one as "
            "path:configuration:split."
        )
    own: dict[Split, str] = {"train": train}
    others: tuple[tuple[str, Split], ...] = (
        ("validation", "valid"),
        ("valid", "valid"),
        ("test", "test"),
    )
    for theirs, split in others:
        if theirs in splits and theirs != train:
            own.setdefault(split, theirs)
    return splits, own
