"""Text larger than memory to shards of tokens, by several processes; what was stopped goes on."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from itertools import groupby
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.files import remove_leftovers, sync, write_json
from undertow.lab.tasks.base import split_of
from undertow.lab.tasks.documents import Document, Sources, text_of
from undertow.lab.tasks.example import Split
from undertow.lab.tasks.rows import load_splits
from undertow.lab.tasks.shard_files import (
    INDEX,
    SPLITS,
    Part,
    check_whole,
    read_index,
    write_index,
    write_part,
)
from undertow.lab.tasks.shards import words_of
from undertow.lab.tasks.tokens import encoded, id_type
from undertow.reading import read_json

# Loaders of datasets by the ending of a file, with what they are told. Text is cut at empty lines.
LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "paragraph"}),
}
PLAN, TOKENIZER = "plan.json", "tokenizer"


class Position(NamedTuple):
    """A place in the sources: the number of a stream, where it stands, and rows read of it."""

    stream: int
    state: dict[str, Any] | None
    rows: int


class Stream(NamedTuple):
    """Rows of one source, and the split they all belong to; an empty one stands for each text's
    hash."""

    name: str
    rows: Any
    split: str
    column: str


class Chunk(NamedTuple):
    """The documents of one shard, and where the next one begins."""

    number: int
    documents: list[Document]
    after: Position


def tokenize(
    sources: Sources,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    processes: int = 1,
    shard: int = 2**26,
) -> dict[str, Any]:
    """Write shards of `shard` characters of text each into `folder`, and a list of them; what is
    there already is checked and kept. The list is returned.

    Whatever the number of processes and however often it was stopped, the shards are the same.

    Raises:
        ConfigError: the package datasets is missing, a file is of no known kind, the tokenizer has
            no EOS token, or the folder holds shards of something else.
        DataError: a source cannot be read, or nothing can be written.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no EOS token, but documents must end with one; set its eos_token."
        )
    about = {
        "source": sources.described,
        "stamps": [[str(path.resolve()), size, modified] for path, size, modified in sources.files],
        "column": sources.column,
        "shard": shard,
        "tokenizer": tokenizer.name_or_path,
        "id_type": np.dtype(id_type(tokenizer)).name,
        "words": words_of(tokenizer),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _check_plan(folder, about)
        tokenizer.save_pretrained(folder / TOKENIZER)
        if (done := _complete(folder)) is not None:
            return done
        (folder / INDEX).unlink(missing_ok=True)
        last = _write_shards(sources, folder, processes, shard, about["id_type"])
        parts: dict[Split, list[Part]] = {split: [] for split in SPLITS}
        for number in range(last):
            for split, part in read_json(_record(folder, number))["parts"].items():
                parts[split].append(Part(*part))
        if not any(part.documents for each in parts.values() for part in each):
            raise DataError(f"{sources.described} holds no text; give more.")
        return write_index(folder, about, parts)
    except OSError as error:
        raise DataError(
            f"the shards could not be written to {folder} ({error}); see to its disk, and run the "
            "same command again, which goes on from there"
        ) from error


def _check_plan(folder: Path, about: dict[str, Any]) -> None:
    """Make sure that what a folder holds belongs to the same text, tokenizer and size."""
    plan = folder / PLAN
    if plan.is_file():
        if read_json(plan) != about:
            raise ConfigError(
                f"{folder} holds shards of other text, or by another tokenizer, column or size; "
                "give another folder, or remove it"
            )
        return
    if any(folder.glob("*.ids")) or (folder / INDEX).exists():
        raise DataError(f"{folder / PLAN} is missing; give another folder, or remove this one")
    write_json(plan, about)


def _complete(folder: Path) -> dict[str, Any] | None:
    """The list of shards, if all are there and whole."""
    try:
        index = read_index(folder)
        for parts in index["parts"].values():
            for part in parts:
                check_whole(folder, part, index["id_type"])
    except DataError:
        return None
    return index


def _write_shards(sources: Sources, folder: Path, processes: int, shard: int, kind: str) -> int:
    """Write the shards that are missing; how many there are is returned."""
    ready = {n for n in _numbers(folder) if _whole(folder, n, kind)}
    first = next(n for n in range(len(ready) + 1) if n not in ready)
    start = Position(0, None, 0)
    if first:
        start = Position(*read_json(_record(folder, first - 1))["after"])
    waiting: deque[Future[None]] = deque()
    pool = (
        nullcontext()
        if processes == 1
        else ProcessPoolExecutor(
            processes, get_context("spawn"), _begin, (str(folder / TOKENIZER),)
        )
    )
    if processes == 1:
        _begin(str(folder / TOKENIZER), alone=True)
    number = first
    try:
        with pool as workers:
            try:
                for chunk in _chunks(sources, start, first, shard):
                    number = chunk.number + 1
                    if chunk.number in ready:
                        continue
                    if workers is None:
                        _write(folder, chunk, kind)
                        continue
                    waiting.append(workers.submit(_write, folder, chunk, kind))
                    if len(waiting) > processes:  # each holds a shard's text in memory
                        waiting.popleft().result()
                while waiting:
                    waiting.popleft().result()
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenizes was killed, perhaps for want of memory; take fewer processes "
            "or a smaller shard, or run the same command again, which goes on from there"
        ) from error
    return number


def _chunks(sources: Sources, start: Position, number: int, shard: int) -> Iterator[Chunk]:
    """The documents from a position on, in shards of so many characters, and of one document at
    least."""
    documents: list[Document] = []
    size = 0
    streams = _streams(sources)
    state, seen = start.state, start.rows
    for place, stream in list(enumerate(streams))[start.stream :]:
        rows = stream.rows
        if state is not None:
            rows.load_state_dict(state)
        for row in _coming(rows, stream.name, seen):
            text = text_of(row, stream.column, f"{stream.name}, row {seen}")
            seen += 1
            split: Any = stream.split or split_of(text)
            documents.append(Document(split, text, True))
            size += len(text) + 1
            if size >= shard:
                yield Chunk(number, documents, Position(place, rows.state_dict(), seen))
                documents, size, number = [], 0, number + 1
        state, seen = None, 0
    if documents:
        yield Chunk(number, documents, Position(len(streams), None, 0))


def _coming(rows: Any, name: str, seen: int) -> Iterator[Any]:
    coming = iter(rows)
    while True:
        try:
            row = next(coming)
        except StopIteration:
            return
        except Exception as error:  # hub, network and parsers raise any kind
            cause = error.__cause__ or error
            raise DataError(
                f"{name} cannot be read after row {seen} "
                f"({str(cause).partition(chr(10))[0]}); correct it, or run the same command again, "
                "which goes on from there"
            ) from error
        seen += 1
        yield row


def _streams(sources: Sources) -> list[Stream]:
    """Every source in order, as what datasets streams."""
    if sources.hub is not None:
        splits, own = load_splits(sources.hub, streaming=True)
        divided = len(own) < 3
        return [
            Stream(
                f"{sources.hub}, {theirs}", splits[theirs], "" if divided else split, sources.column
            )
            for split, theirs in own.items()
            if split == "train" or not divided
        ]
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "undertow tokenize needs the package datasets; install it with: pip install "
            '"undertow[data]"'
        ) from error
    found = []
    for path, *_ in sources.files:
        if path.suffix not in LOADERS:
            raise ConfigError(
                f"{path} is no file that can be tokenized; give it one of the endings "
                f"{', '.join(LOADERS)}"
            )
        loader, told = LOADERS[path.suffix]
        column = "text" if loader == "text" else sources.column
        try:
            rows = datasets.load_dataset(
                loader, data_files=str(path), split="train", streaming=True, **told
            )
        except Exception as error:  # parsers raise any kind
            raise DataError(
                f"{path} cannot be read ({str(error).partition(chr(10))[0]}); correct it"
            ) from error
        found.append(Stream(str(path), rows, "", column))
    return found


# In a worker

_tokenizer: Any = None


def _begin(folder: str, alone: bool = False) -> None:
    """What each worker begins with: its own tokenizer, and one thread where there are several."""
    global _tokenizer
    if not alone:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = AutoTokenizer.from_pretrained(folder)


def _end_with_parent() -> None:
    """End when the process that started this one is killed, which its pool would not notice."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write(folder: Path, chunk: Chunk, kind: str) -> None:
    """Write a shard, and last the record that says that it is whole."""
    parts = {}
    empty: Counter[Split] = Counter()
    for split, group in groupby(
        sorted(chunk.documents, key=lambda each: SPLITS.index(each.split)), lambda each: each.split
    ):
        documents = list(group)
        kept = [len(each.text) for each in documents if each.text.strip()]
        ids = (np.array(found, dtype=kind) for _, found in encoded(documents, _tokenizer, empty))
        name = f"{split}-{chunk.number:05}"
        part = write_part(folder, name, zip(kept, ids, strict=True), kind, 0)
        parts[split] = part._replace(empty=empty[split])
    sync(folder)
    write_json(_record(folder, chunk.number), {"parts": parts, "after": chunk.after})


def _record(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}.json"


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem.partition("-")[2]) for path in folder.glob("shard-*.json")]


def _whole(folder: Path, number: int, kind: str) -> bool:
    """Whether a shard's record and all that it lists are there and what was written."""
    try:
        found = json.loads(_record(folder, number).read_bytes())
        Position(*found["after"])
        for part in found["parts"].values():
            check_whole(folder, Part(*part), kind)
    except (DataError, OSError, ValueError, TypeError, KeyError):
        return False
    return True
