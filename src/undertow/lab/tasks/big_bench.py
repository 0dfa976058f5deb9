"""BIG-Bench Hard's multi-step arithmetic (Suzgun et al., 2022), read from its own file: for testing
only."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError, shown
from undertow.lab.tasks.base import (
    Task,
    Template,
    check_split,
    first_line,
    paper_prompt,
    text_field,
)
from undertow.lab.tasks.example import Example, Split
from undertow.reading import expanded, read_json
from undertow.registry import register

_EXPRESSION = re.compile(r"[-+*()\d =]+", re.ASCII)
_NUMBER = re.compile(r"[-+]?\d{1,1000}", re.ASCII)


@register
class BigBenchArithmetic(Task):
    """250 expressions of signed digits, + - * and parentheses, such as `((-1 + 2 + 9 * 5) - (-2 +
    -4 + -4 * -7)) =`.

    The file is the benchmark's `multistep_arithmetic_two.json`: an object with a list `examples` of
    objects with the texts `input` and `target`. Prompts are those of `arithmetic`, and the answer
    is the value modulo 10, so that a model trained on that task can be tested; with `modulo: false`
    it is the value itself, as in the benchmark. Unlike that task's, these expressions leave out
    parentheses that the order of operations makes needless.

    An example's length is its number of operands.
    """

    kind: ClassVar[str] = "bbh-arithmetic"

    test: str | None = None
    """Path of the benchmark's JSON file."""
    modulo: bool = True
    """Whether the answer is the value modulo 10, or the value."""
    template: Template = "paper"
    """Layout of the prompt, as of `arithmetic`."""

    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
        """How many expressions the test split holds; raises ConfigError for the others."""
        return len(self._expressions(split))

    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """See `Task.example`; `length` must be None."""
        if length is not None:
            raise ConfigError(
                f"length is {length}, but {self.kind} reads a file as it is; leave length out."
            )
        expressions = self._expressions(split)
        if not 0 <= index < len(expressions):
            raise DataError(
                f"There is no {self.kind} example {index}, as the file holds {len(expressions)}; "
                "ask for a smaller index, counted from 0."
            )
        text, value = expressions[index]
        answer = value % 10 if self.modulo else value
        operands = len(re.findall(r"\d+", text))
        if self.template == "bare":
            return Example(text.replace(" ", ""), str(answer), operands)
        question = (
            "Evaluate this expression modulo 10." if self.modulo else "Evaluate this expression."
        )
        return Example(paper_prompt(question, text), f" {answer}", operands)

    def score(self, example: Example, generated_text: str) -> bool:
        """Whether the first line of the generated text is the answer and nothing else but
        blanks."""
        return first_line(generated_text) == example.completion.strip()

    def choices(self) -> tuple[str, ...]:
        """See `Task.choices`."""
        return tuple("0123456789") if self.modulo else ()

    def characters(self) -> str:
        """See `Task.characters`."""
        alphabet = "0123456789+-*()="
        if self.template == "paper":
            alphabet = paper_prompt("Evaluate this expression modulo 10.", alphabet)
        return "".join(sorted(set(alphabet)))

    def _expressions(self, split: Split) -> tuple[_Expression, ...]:
        check_split(split)
        if split != "test":
            raise ConfigError(
                f"{self.kind} is a benchmark and has no {split} split; train on arithmetic and "
                "test on this."
            )
        if self.test is None:
            raise ConfigError(
                f"The test split needs the field 'test' of {self.kind}; give it the path of the "
                "JSON file."
            )
        file = expanded(self.test)
        try:
            return _read(file, file.stat().st_mtime_ns)
        except OSError as error:
            raise DataError(
                f"{self.test} cannot be read ({error.strerror}); check the path of the test file."
            ) from error


class _Expression(NamedTuple):
    text: str
    value: int


@lru_cache(maxsize=2)
def _read(path: Path, modified: int) -> tuple[_Expression, ...]:
    """Read the file; `modified` makes a changed one be read again."""
    content = read_json(path, mend="give the benchmark's JSON file.")
    rows = content.get("examples") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path} holds no list 'examples'; give the benchmark's JSON file.")
    found = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, example {number}: expected the texts 'input' and 'target', found "
                f"{str(row)[:80]!r}."
            )
        try:
            text, target = text_field(row, "input"), text_field(row, "target")
        except ValueError as error:
            raise DataError(f"{path}, example {number}: {error}; correct or remove it.") from error
        if not _EXPRESSION.fullmatch(text):
            raise DataError(
                f"{path}, example {number}: expected numbers, + - * and () as 'input', found "
                f"{text[:80]!r}."
            )
        if not _NUMBER.fullmatch(target.strip()):
            raise DataError(
                f"{path}, example {number}: expected a whole number as 'target', found "
                f"{shown(target)}."
            )
        found.append(_Expression(text.strip(), int(target)))
    return tuple(found)
