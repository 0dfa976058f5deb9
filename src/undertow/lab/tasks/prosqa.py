"""ProsQA: which of two kinds is someone? Search in a graph of `is a` (Hao et al., 2024), generated
or read from files."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.base import PromptedTask, check_split, first_line
from undertow.lab.tasks.example import Example, Split
from undertow.lab.tasks.graphs import LETTERS, Question, draw_question, question_from_row
from undertow.reading import expanded, read_json
from undertow.registry import register

_ANSWER_MARK = "###"
# Graphs drawn for one of a given path length: about one in 40 has a path of six steps.
_ATTEMPTS = 3000


@register
class ProsQA(PromptedTask):
    """A shuffled list of who is what and what is what, and the question which of two kinds someone
    is.

    A split whose field names a file is read from that file, a JSON list as released (`question`,
    `answer`, `steps`, `idx_to_symbol`, `edges`, `root`, `target`, `neg_target`); any other split is
    generated, without end, with the statistics of the released files (see
    `undertow.lab.tasks.graphs`). One of the two kinds can be reached from the root and the other
    cannot.

    The 'paper' template is the released text: `Every gerpus is a terpus. ... Is Sally a hilpus or
    sterpus?`, answered `Sally is a sterpus.`. 'bare' writes one random letter a node,
    `gt;sg;...;s?hp=`, answered `p`. An example's length is the number of steps from root to answer,
    3 or more. Guessing is right half the time.
    """

    kind: ClassVar[str] = "prosqa"
    scores_tokens: ClassVar[bool] = True

    train: str | None = None
    """Path of a file with training questions; generated if left out."""
    valid: str | None = None
    """Path of a file with validation questions; generated if left out."""
    test: str | None = None
    """Path of a file with test questions; generated if left out."""
    chain_of_thought: bool = False
    """Whether the completion holds the steps from the root before the answer."""

    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> int | None:  # type: ignore[override]
        """How many questions the split's file holds; None if the split is generated."""
        path = self._path(split)
        return None if path is None else len(_questions(path))

    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """See `Task.example`; `length` must be None where the split is read from a file."""
        path = self._path(split)
        if path is None:
            return super().example(split, index, length)
        if length is not None:
            raise ConfigError(
                f"length is {length}, but the {split} split is read from {path} as it is; leave "
                "length out."
            )
        questions = _questions(path)
        if not 0 <= index < len(questions):
            raise DataError(
                f"There is no {self.kind} example {index}, as the {split} split holds "
                f"{len(questions)}; ask for a smaller index, counted from 0."
            )
        return self._written(questions[index], random.Random(index))

    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one question; see `GeneratedTask.draw`. Raises DataError for a length that is not
        drawn."""
        for _ in range(_ATTEMPTS):
            question = draw_question(generator)
            if length is None or len(question.steps) == length:
                return self._written(question, generator)
        raise DataError(
            f"None of {_ATTEMPTS} graphs drawn for {self.kind} has an answer {length} steps from "
            "its root; ask for 3 to 6."
        )

    def score(self, example: Example, generated_text: str) -> bool:
        """Whether the final answer is the right one; with the chain of thought, what follows the
        last mark."""
        if not self.chain_of_thought:
            return super().score(example, generated_text)
        mark = "=" if self.template == "bare" else _ANSWER_MARK
        _, found, answer = generated_text.rpartition(mark)
        return bool(found) and first_line(answer) == example.completion.rpartition(mark)[2].strip()

    def characters(self) -> str | None:
        """The letters of the 'bare' template; None for 'paper', whose texts are long and want a
        pretrained tokenizer."""
        return "".join(sorted(LETTERS + ";?=")) if self.template == "bare" else None

    def _written(self, question: Question, generator: random.Random) -> Example:
        if self.template == "bare":
            letter = generator.sample(LETTERS, k=len(question.symbols))
            edges = "".join(
                f"{letter[a]}{letter[b]};"
                for a, b in generator.sample(question.edges, k=len(question.edges))
            )
            first, second = generator.sample([question.target, question.other], k=2)
            prompt = f"{edges}{letter[question.root]}?{letter[first]}{letter[second]}="
            path = (
                "".join(letter[node] for node in question.path) + "="
                if self.chain_of_thought
                else ""
            )
            return Example(prompt, path + letter[question.target], len(question.steps))
        steps = "\n".join(question.steps) + f"\n{_ANSWER_MARK} " if self.chain_of_thought else ""
        return Example(f"{question.text}\n", steps + question.answer, len(question.steps))

    def _path(self, split: Split) -> Path | None:
        check_split(split)
        path = {"train": self.train, "valid": self.valid, "test": self.test}[split]
        return None if path is None else expanded(path)


def _questions(path: Path) -> tuple[Question, ...]:
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path.") from error


@lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> tuple[Question, ...]:
    """Read a file; `modified` makes a changed file be read again."""
    rows = read_json(path, mend="give a released file.")
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path} holds no list of questions; give a released file.")
    questions = []
    for number, row in enumerate(rows):
        try:
            questions.append(question_from_row(row))
        except ValueError as error:
            raise DataError(f"{path}, question {number}: {error}; correct or remove it.") from error
    return tuple(questions)
