"""Language modelling on text: local files, or a data set by its name."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.base import check_split
from undertow.lab.tasks.documents import Sources, documents, stamped
from undertow.lab.tasks.example import Split
from undertow.lab.tasks.tokens import Tokens, encoded, tokens_of
from undertow.lab.tasks.windows import Windows, window_of
from undertow.reading import expanded
from undertow.registry import register


@register
class Text(Windows):
    """Text to predict token by token. A model built from scratch reads characters, a pretrained one
    its own tokens.

    The documents of a split stand one after the other in one row of tokens, which is cut into
    windows of `context` tokens, always the same ones; the last may be shorter. Nothing of one
    document reaches another in its window, neither by attention nor by a recurrence: positions
    start again with each, and its first token is given and not predicted.

    A file that ends in .jsonl or .json holds a document a row, in `column`, and so does a data set.
    Such documents end with an EOS token. Each belongs to the split that a hash of its text names,
    90 % to train and 5 % each to valid and test; a data set that has validation and test splits
    keeps those. Any other file is one document of plain text, of which the first 90 % are train,
    the next 5 % valid and the last 5 % test, in characters, each cut after the last line that ends
    before that; where no line ends, it is cut inside one. It is read into memory whole.
    """

    kind: ClassVar[str] = "text"

    files: tuple[str, ...] = ()
    """Paths of files in UTF-8: plain text, JSON lines (.jsonl) or a JSON list (.json)."""
    context: Annotated[int, Field(ge=2, le=2**31 - 1)] = 128
    """Tokens of a window; at least 2, as a token is predicted from another."""
    hub: str | None = None
    """Name of a data set instead, as path or path:configuration, such as
    HuggingFaceFW/fineweb-edu:sample-10BT; or a folder that the package datasets can load. It is
    read once, as a stream."""
    column: str = "text"
    """What rows call their text."""
    cache: str | None = None
    """Folder for the token ids, in files that are made once for a text and a tokenizer. In memory
    if left out, and made anew by each process."""

    def __post_init__(self) -> None:
        if self.files and self.hub is not None:
            raise ConfigError("files and hub are both set; remove one of them.")

    def first(
        self, split: Split, tokenizer: PreTrainedTokenizerBase, count: int
    ) -> tuple[list[dict[str, list[int]]], int | None]:
        """See `Task.first`. Only as many documents are read as it takes; how many windows there are
        is then not known."""
        check_split(split)
        wanted = (document for document in documents(self._sources()) if document.split == split)
        ids: list[int] = []
        starts: list[int] = []
        for _, found in encoded(islice(wanted, 32 * count), tokenizer):
            starts.append(len(ids))
            ids += found
            if len(ids) >= count * self.context:
                break
        windows = min(count, -(-len(ids) // self.context))
        tokens = Tokens(np.array(ids, dtype=np.int64), np.array(starts, dtype=np.int64), 0)
        items = [window_of(tokens, index, self.context) for index in range(windows)]
        if not items:
            raise DataError(
                f"The {split} split of {self._sources().described} holds no text; give more."
            )
        return items, None

    def check(self, split: Split) -> None:
        """See `Task.check`. All splits have one source, which only the tokenizer tells apart."""
        self._sources()

    def characters(self) -> str:
        """Every character of the documents, sorted."""
        return "".join(
            sorted(set().union(*(document.text for document in documents(self._sources()))))
        )

    def described(self, split: Split) -> str:
        """See `Windows.described`."""
        return self._sources().described

    def tokens(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        check_split(split)
        cache = None if self.cache is None else expanded(self.cache)
        return tokens_of(self._sources(), tokenizer, cache)[split]

    def _sources(self) -> Sources:
        if not self.files and self.hub is None:
            raise ConfigError(
                f"The {self.kind} task needs the field 'files'; give it the paths of text files, "
                "or set hub to a data set."
            )
        return Sources(tuple(stamped(expanded(path)) for path in self.files), self.hub, self.column)
