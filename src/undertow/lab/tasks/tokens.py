"""Documents as one long row of token ids a split: in memory, or in files that are made once and
mapped into it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, get_args

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.documents import Document, Sources, documents
from undertow.lab.tasks.encode import check_known
from undertow.lab.tasks.example import Split
from undertow.manifest import digests
from undertow.reading import expanded, read_json

SPLITS: tuple[Split, ...] = get_args(Split)
# Characters that are tokenized at a time, and the rest of their last line; and characters handed
# over in one call.
PIECE, CALL = 2**16, 2**20
ABOUT = "about.json"


class Tokens(NamedTuple):
    """The tokens of a split.

    Attributes:
        ids: every token id, ``[tokens]``, unsigned.
        starts: where each document begins in them, ``[documents]``, rising from 0.
        empty: documents that are left out, as there is nothing but blanks in them.
    """

    ids: Any
    starts: Any
    empty: int

    @property
    def total(self) -> int:
        return len(self.ids)

    @property
    def documents(self) -> int:
        return len(self.starts)

    def stretch(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """See `undertow.lab.tasks.windows.Row`."""
        ids: list[int] = self.ids[start:stop].tolist()
        first, last = np.searchsorted(self.starts, [start + 1, start + len(ids)])
        return ids, (self.starts[first:last] - start).tolist()


def tokens_of(
    sources: Sources, tokenizer: PreTrainedTokenizerBase, cache: Path | None
) -> dict[Split, Tokens]:
    """The tokens of each split; made at the first call, and with a cache only at the first one of
    any process.

    Raises:
        DataError: a document cannot be read, the tokenizer does not know a part of it, or the files
            cannot be written.
        ConfigError: documents must end, but the tokenizer has no EOS token.
    """
    return _in_memory(sources, tokenizer) if cache is None else _on_disk(sources, tokenizer, cache)


def encoded(
    found: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    empty: Counter[Split] | None = None,
) -> Iterator[tuple[Split, list[int]]]:
    """Each document's split and token ids, with an EOS token where the text ends; those without
    text are counted in `empty`.

    Raises:
        DataError, ConfigError: as `tokens_of`.
    """
    waiting: list[tuple[Document, list[str]]] = []
    for document in found:
        if document.whole and tokenizer.eos_token_id is None:
            raise ConfigError(
                "The tokenizer has no EOS token, but documents must end with one; set its "
                "eos_token."
            )
        if not document.text.strip():
            if empty is not None:
                empty[document.split] += document.whole
            continue
        waiting.append((document, list(_pieces(document.text))))
        if sum(len(each.text) for each, _ in waiting[-64:]) >= CALL or len(waiting) == 1024:
            yield from _encoded(waiting, tokenizer)
            waiting = []
    yield from _encoded(waiting, tokenizer)


def _encoded(
    waiting: list[tuple[Document, list[str]]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Split, list[int]]]:
    texts = [piece for _, pieces in waiting for piece in pieces]
    # Many in one call: fast tokenizers then use every core.
    found = iter(
        tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ()
    )
    for document, pieces in waiting:
        ids: list[int] = []
        for piece in pieces:
            ids += check_known(piece, next(found), tokenizer)
        yield document.split, [*ids, tokenizer.eos_token_id] if document.whole else ids


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of whole lines: a tokenizer's work on a text takes hundreds of times the
    text's memory."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


@lru_cache(maxsize=4)
def _in_memory(sources: Sources, tokenizer: PreTrainedTokenizerBase) -> dict[Split, Tokens]:
    parts: dict[Split, list[Any]] = {split: [] for split in SPLITS}
    empty: Counter[Split] = Counter()
    for split, ids in encoded(documents(sources), tokenizer, empty):
        parts[split].append(np.array(ids, dtype=id_type(tokenizer)))
    found = {}
    for split, arrays in parts.items():
        starts = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)[:-1]
        found[split] = Tokens(
            np.concatenate(arrays) if arrays else np.empty(0, np.uint16), starts, empty[split]
        )
    return found


@lru_cache(maxsize=4)
def _on_disk(
    sources: Sources, tokenizer: PreTrainedTokenizerBase, cache: Path
) -> dict[Split, Tokens]:
    folder = cache / _digest(sources, tokenizer)
    if not (folder / ABOUT).is_file():
        _write(sources, tokenizer, folder)
    try:
        about = read_json(folder / ABOUT)
        found = {
            split: Tokens(
                _mapped(folder / f"{split}.ids", about["id_type"]),
                _mapped(folder / f"{split}.starts", "int64"),
                about["empty"][split],
            )
            for split in SPLITS
        }
        for split, tokens in found.items():
            if len(tokens.ids) != about["tokens"][split]:
                raise ValueError(
                    f"{split}.ids holds {len(tokens.ids)} tokens instead of "
                    f"{about['tokens'][split]}"
                )
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the tokens in {folder} cannot be read ({error}); remove that folder, to make them "
            "anew."
        ) from error


def _write(sources: Sources, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Tokenize into a temporary folder, which then gets its name: one that has it is complete."""
    kind, empty = id_type(tokenizer), Counter[Split]()
    lengths = dict.fromkeys(SPLITS, 0)
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", suffix=".writing", dir=folder.parent))
        files: dict[Split, tuple[IO[bytes], IO[bytes]]] = {
            split: (
                (temporary / f"{split}.ids").open("wb"),
                (temporary / f"{split}.starts").open("wb"),
            )
            for split in SPLITS
        }
        try:
            found = tqdm(documents(sources), desc="tokenizing", unit=" documents", leave=False)
            for split, ids in encoded(found, tokenizer, empty):
                files[split][0].write(np.array(ids, dtype=kind).tobytes())
                files[split][1].write(np.int64(lengths[split]).tobytes())
                lengths[split] += len(ids)
        finally:
            for file in (file for pair in files.values() for file in pair):
                file.close()
        about = {
            "source": sources.described,
            "column": sources.column,
            "tokenizer": tokenizer.name_or_path,
            "id_type": np.dtype(kind).name,
            "tokens": lengths,
            "empty": {split: empty[split] for split in SPLITS},
        }
        (temporary / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder)
    except OSError as error:
        if not (folder / ABOUT).is_file():  # another process was not faster
            raise DataError(
                f"the tokens could not be written to {folder} ({error}); see to its disk, or set "
                "cache."
            ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _mapped(path: Path, kind: str) -> Any:
    return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.empty(0, dtype=kind)


def id_type(tokenizer: PreTrainedTokenizerBase) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def _digest(sources: Sources, tokenizer: PreTrainedTokenizerBase) -> str:
    """A name for the tokens of these texts by this tokenizer, wherever the files lie. Of a folder
    with a data set every file counts; another data set goes by its name."""
    hub = None if sources.hub is None else expanded(sources.hub.partition(":")[0])
    inside = [] if hub is None else sorted(path for path in hub.rglob("*") if path.is_file())
    files = {path: path.suffix for path, *_ in sources.files}
    files |= {path: str(path.relative_to(str(hub))) for path in inside}
    texts = list(zip(files.values(), digests(files), strict=True))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    name = None if inside else sources.hub
    told = json.dumps([texts, name, sources.column, tokenizer.eos_token_id, words])
    return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()
