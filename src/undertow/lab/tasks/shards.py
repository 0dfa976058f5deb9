"""Language modelling on shards of tokens, which `undertow tokenize` makes of text larger than
memory."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.base import check_split
from undertow.lab.tasks.example import Split
from undertow.lab.tasks.shard_files import INDEX, ShardedRow, opened, read_index, row_of
from undertow.lab.tasks.windows import Windows
from undertow.reading import expanded
from undertow.registry import register


@register
class Shards(Windows):
    """Text that `undertow tokenize` made into shards of token ids, to predict token by token.

    Nothing of it is read into memory but the windows of a batch. What is read is checked against
    the sums that were written beside it. The order of the windows is computed and not kept, so
    memory does not grow with the text.
    """

    kind: ClassVar[str] = "shards"
    ordered_lazily: ClassVar[bool] = True

    folder: str | None = None
    """Folder that `undertow tokenize` wrote."""
    context: Annotated[int, Field(ge=2, le=2**31 - 1)] = 128
    """Tokens of a window; at least 2, as a token is predicted from another."""

    def tokens(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> ShardedRow:
        """See `Windows.tokens`. Raises DataError if another tokenizer made the shards."""
        check_split(split)
        found, words, name = self._rows()
        if words != words_of(tokenizer):
            raise DataError(
                f"the shards in {self.folder} were made with another tokenizer, {name}; set it as "
                "model.tokenizer or model.path, or tokenize again."
            )
        return found[split]

    def described(self, split: Split) -> str:
        """See `Windows.described`."""
        return f"the shards in {self.folder}"

    def check(self, split: Split) -> None:
        """See `Task.check`: all shards are there now, in their sizes."""
        _rows.cache_clear()
        opened.cache_clear()
        self._rows()

    def characters(self) -> None:
        """None: the shards have a tokenizer."""

    def _rows(self) -> tuple[dict[Split, ShardedRow], str, str]:
        if self.folder is None:
            raise ConfigError(
                f"The {self.kind} task needs the field 'folder'; give it one that undertow "
                "tokenize wrote."
            )
        folder = expanded(self.folder)
        try:
            modified = (folder / INDEX).stat().st_mtime_ns
        except OSError:
            modified = 0  # which reading it explains
        return _rows(folder, modified)


@lru_cache(maxsize=4)
def _rows(folder: Path, modified: int) -> tuple[dict[Split, ShardedRow], str, str]:
    """The rows of a folder's splits; `modified` makes a changed one be read again."""
    index = read_index(folder)
    rows = {s: row_of(folder, index["id_type"], parts) for s, parts in index["parts"].items()}
    return rows, index["words"], str(index.get("tokenizer"))


@lru_cache(maxsize=4)
def words_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of a tokenizer's vocabulary and EOS token, alike wherever it is loaded from."""
    told = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
    return hashlib.sha256(told.encode()).hexdigest()
