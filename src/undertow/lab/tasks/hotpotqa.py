"""HotpotQA with given traces (Yang et al., 2018; T²MLR, Figure 6): questions that take several
facts, read from files."""

from __future__ import annotations

import re
import string
from typing import Any, ClassVar, Literal, NamedTuple

from undertow.errors import ConfigError, shown
from undertow.lab.tasks.base import first_line, paper_prompt
from undertow.lab.tasks.example import Example, Split
from undertow.lab.tasks.rows import LeftOutError, RowsTask
from undertow.registry import register

_QUESTION = "Answer the question."
_ANSWER_MARK = "####"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
Trace = Literal["written", "given", "none"]


@register
class HotpotQA(RowsTask):
    """Questions over several facts, with a trace of the facts that lead to the answer.

    Rows are JSON lines, or a JSON list in a .json file, with the texts `question` and `answer` and
    either `steps`, a list of texts that are the trace, or, as released (or as `datasets` has it),
    `supporting_facts` and `context`: the trace is then those sentences of the context that the
    supporting facts name, in their order. The context itself is not shown. Splits and `hub` (such
    as `hotpot_qa:distractor`) are those of `undertow.lab.tasks.rows.RowsTask`.

    A written trace is completed as ` <trace>\\n#### <answer>`. An example's length is the number of
    its trace's texts.
    """

    kind: ClassVar[str] = "hotpotqa"
    items: ClassVar[str] = "questions"
    scores_tokens: ClassVar[bool] = True

    trace: Trace = "written"
    """written: the completion is the trace and then the answer, and both carry the loss, as in the
    paper. given: the trace is in the prompt, and only the answer carries the loss. none: there is
    no trace."""
    level: Literal["easy", "medium", "hard"] | None = None
    """Only rows of this `level`, easy in the paper; others are left out, counted and reported. All
    rows if left out."""

    def parse(self, row: Any) -> _Question:
        """See `RowsTask.parse`."""
        question, answer = (
            (row.get("question"), row.get("answer")) if isinstance(row, dict) else (None, None)
        )
        if not isinstance(question, str) or not isinstance(answer, str) or not answer.strip():
            raise ValueError(
                f"expected an object with the texts 'question' and 'answer', found {shown(row)}"
            )
        if self.level is not None and not isinstance(row.get("level"), str):
            raise ValueError(
                "expected a text as 'level', which task.level asks for, found "
                f"{shown(row.get('level'))}"
            )
        if self.level is not None and row["level"] != self.level:
            raise LeftOutError(f"their level is not {self.level}")
        return _Question(
            question.strip(), () if self.trace == "none" else _trace_of(row), answer.strip()
        )

    def key(self, item: _Question) -> str:
        """The question."""
        return item.question

    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """See `Task.example`; `length` must be None."""
        if length is not None:
            raise ConfigError(
                f"length is {length}, but {self.kind} reads a file as it is; leave length out."
            )
        question, steps, answer = self.item(split, index)
        trace = " ".join(steps)
        if self.trace == "given":
            return Example(
                paper_prompt(_QUESTION, f"{question}\nReasoning: {trace}"), f" {answer}", len(steps)
            )
        written = f" {trace}\n{_ANSWER_MARK} {answer}" if self.trace == "written" else f" {answer}"
        return Example(paper_prompt(_QUESTION, question), written, len(steps))

    def score(self, example: Example, generated_text: str) -> bool:
        """Whether the generated answer is the right one but for case, punctuation, articles and
        blanks: an exact match.

        With a written trace the answer is what follows the last `####`, otherwise the first line.
        """
        if self.trace == "written":
            _, mark, generated_text = generated_text.rpartition(_ANSWER_MARK)
            if not mark:
                return False
        right = (
            example.completion.rpartition(_ANSWER_MARK)[2]
            if self.trace == "written"
            else example.completion
        )
        return _plain(first_line(generated_text)) == _plain(right)


class _Question(NamedTuple):
    question: str
    steps: tuple[str, ...]
    answer: str


def _trace_of(row: dict[str, Any]) -> tuple[str, ...]:
    if "steps" in row:
        steps = row["steps"]
        if (
            not isinstance(steps, list)
            or not steps
            or not all(isinstance(step, str) and step.strip() for step in steps)
        ):
            raise ValueError(f"expected a list of texts as 'steps', found {shown(steps)}")
        return tuple(" ".join(step.split()) for step in steps)
    try:
        facts = _pairs(row["supporting_facts"], "title", "sent_id")
        paragraphs = dict(_pairs(row["context"], "title", "sentences"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "expected a trace, as 'steps' or as 'supporting_facts' with their 'context', found "
            f"{shown(row)}"
        ) from error
    found = []
    for title, number in facts:
        sentences = paragraphs.get(title) if isinstance(title, str) else None
        if (
            not isinstance(sentences, list)
            or type(number) is not int
            or not 0 <= number < len(sentences)
        ):
            raise ValueError(
                f"the supporting fact {shown(number)} of {shown(title)} is not in the context"
            )
        found.append(" ".join(str(sentences[number]).split()))
    if not any(found):
        raise ValueError("there is no supporting fact to make a trace of")
    return tuple(found)


def _pairs(value: Any, first: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs as released, `[[title, ...], ...]`, or as `datasets` has them, a list for each of two
    names."""
    if isinstance(value, dict):
        return list(zip(value[first], value[second], strict=True))
    return [(one, other) for one, other in value]


def _plain(text: str) -> str:
    lowered = "".join(
        character for character in text.lower() if character not in string.punctuation
    )
    return " ".join(_ARTICLES.sub(" ", lowered).split())
