"""Language modelling on text: local files, or a data set by its name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, NoReturn

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.base import Measure, Task, check_split
from undertow.lab.tasks.documents import Sources, documents, stamped
from undertow.lab.tasks.encode import IGNORED
from undertow.lab.tasks.example import Example, Split
from undertow.lab.tasks.tokens import Tokens, encoded, tokens_of
from undertow.reading import expanded
from undertow.registry import register


@register
class Text(Task):
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
    measured_by: ClassVar[Measure] = "loss"
    windows: ClassVar[bool] = True

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

    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
        """How many windows the split holds; see `Task.size`. Raises DataError if the text is too
        short for one."""
        if tokenizer is None:
            raise ConfigError(
                f"The {self.kind} task counts windows of tokens; give size() the tokenizer."
            )
        tokens = len(self._tokens(split, tokenizer).ids)
        whole, rest = divmod(tokens, self.context)
        windows = whole + (rest > 1)  # from a single token nothing is predicted
        if not windows:
            raise DataError(
                f"The {split} split of {self._sources().described} holds {tokens} tokens, too few "
                "for a window; give more text."
            )
        return windows

    def encode(
        self, split: Split, index: int, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, list[int]]:
        """Return window `index` as `input_ids` and, the same but for the first tokens of documents,
        as `labels`.

        Where a document begins inside the window, there are `position_ids` too, which start again
        there.
        """
        windows = self.size(split, tokenizer)
        if not 0 <= index < windows:
            raise DataError(
                f"There is no {self.kind} window {index}, as the {split} split holds {windows}; "
                f"ask for a smaller index, counted from 0."
            )
        return self._window(self._tokens(split, tokenizer), index)

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
        items = [self._window(tokens, index) for index in range(windows)]
        if not items:
            raise DataError(
                f"The {split} split of {self._sources().described} holds no text; give more."
            )
        return items, None

    def check(self, split: Split) -> None:
        """See `Task.check`. All splits have one source, which only the tokenizer tells apart."""
        self._sources()

    def left_out(
        self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Mapping[str, int]:
        """See `Task.left_out`."""
        if tokenizer is None:
            raise ConfigError(
                f"The {self.kind} task counts what it tokenizes; give left_out() the tokenizer."
            )
        empty = self._tokens(split, tokenizer).empty
        return {"there is no text in them": empty} if empty else {}

    def has_documents(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """See `Task.has_documents`: in windows, where any split has several."""
        splits: tuple[Split, ...] = ("train", "valid", "test")
        return any(len(self._tokens(split, tokenizer).starts) > 1 for split in splits)

    def rough_length(self, split: Split, index: int) -> int:
        """The context, as windows are alike."""
        return self.context

    def example(self, split: Split, index: int, length: int | None = None) -> NoReturn:
        """There are none: raises ConfigError."""
        raise ConfigError(
            f"The {self.kind} task has windows of text and no prompts with answers; use encode()."
        )

    def score(self, example: Example, generated_text: str) -> NoReturn:
        """There is nothing to score: raises ConfigError."""
        raise ConfigError(f"The {self.kind} task has no answers to score; measure its loss.")

    def characters(self) -> str:
        """Every character of the documents, sorted."""
        return "".join(
            sorted(set().union(*(document.text for document in documents(self._sources()))))
        )

    def _window(self, tokens: Tokens, index: int) -> dict[str, list[int]]:
        start = index * self.context
        window: list[int] = tokens.ids[start : start + self.context].tolist()
        labels = list(window)
        first, last = np.searchsorted(tokens.starts, [start + 1, start + len(window)])
        borders = (tokens.starts[first:last] - start).tolist()
        item: dict[str, Any] = {"input_ids": window, "labels": labels}
        if borders:
            for border in borders:
                labels[border] = IGNORED
            spans = zip([0, *borders], [*borders, len(window)], strict=True)
            item["position_ids"] = [
                position for begin, end in spans for position in range(end - begin)
            ]
        return item

    def _tokens(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Tokens:
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
