"""GSM8K: grade-school word problems (Cobbe et al., 2021; TurboConn appendix A.4.3), read from local
files."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple

from undertow.errors import ConfigError, DataError, shown
from undertow.lab.tasks.base import first_line, paper_prompt, text_field
from undertow.lab.tasks.example import Example, Split
from undertow.lab.tasks.rows import RowsTask
from undertow.registry import register

_QUESTION = "Answer the math question."
_ANSWER_MARK = "####"
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)", re.ASCII)
_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


@register
class GSM8K(RowsTask):
    """Word problems whose answer is a number, with or without their solution steps.

    Files are JSON lines, either GSM8K's own (`question`, and `answer` with the steps, `####` and
    the number) or with a list `steps`, or a text `cot`, beside a bare `answer`; or, ending in .txt,
    lines `question||<<a+b=c>> ... #### number`. So GSM8K-Aug is read in its symbolic form (Deng et
    al., 2023; `hub: whynlp/gsm8k-aug`) and in its form in natural language (`hub:
    zen-E/GSM8k-Aug-NL`). Splits and `hub` are those of `undertow.lab.tasks.rows.RowsTask`.

    Completions are ` 1200`, or ` <steps>\\n#### 1200` with the chain of thought; answers have no
    thousands commas. An example's length is its number of solution steps.
    """

    kind: ClassVar[str] = "gsm8k"
    scores_tokens: ClassVar[bool] = True
    items: ClassVar[str] = "problems"

    chain_of_thought: bool = False
    """Whether the completion holds the solution steps before the answer."""
    calculator_marks: bool = False
    """Whether steps keep their <<48/2=24>> marks. Steps that consist of such marks only always keep
    them."""
    given_chain: bool = False
    """Whether the prompt holds the chain of thought that `undertow chains` wrote for the question,
    so that only the final answer is to be found (TurboConn, section 4.8)."""

    def __post_init__(self) -> None:
        if self.given_chain and self.chain_of_thought:
            raise ConfigError(
                "given_chain and chain_of_thought are both set, but a chain is either given or "
                "written; unset one"
            )

    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """See `Task.example`; `length` must be None."""
        if length is not None:
            raise ConfigError(
                f"length is {length}, but {self.kind} reads a file as it is; leave length out."
            )
        problem = self.item(split, index)
        if self.given_chain:
            if problem.chain is None:
                raise DataError(
                    f"{self.kind} {split} example {index} has no 'chain', which given_chain asks "
                    "for; let undertow chains write the files."
                )
            text = f"{problem.question}\nReasoning: {problem.chain}"
            return Example(paper_prompt(_QUESTION, text), f" {problem.answer}", len(problem.steps))
        return write_problem(problem, self.chain_of_thought, self.calculator_marks)

    @property
    def writes_chains(self) -> bool:
        """See `Task.writes_chains`."""
        return self.chain_of_thought

    def row(self, split: Split, index: int) -> dict[str, Any]:
        """The problem of an example as a row of a file that this task reads."""
        problem = self.item(split, index)
        return {
            "question": problem.question,
            "steps": list(problem.steps),
            "answer": problem.answer,
        }

    def score(self, example: Example, generated_text: str) -> bool:
        """See `is_right_number`."""
        return is_right_number(example, generated_text, self.chain_of_thought)

    @staticmethod
    def split_chain(generated_text: str) -> tuple[str, bool]:
        """The chain of thought in a generated text, without the answer after the last `####`, and
        whether it has one."""
        before, mark, _ = generated_text.rpartition(_ANSWER_MARK)
        return (before if mark else generated_text).strip(), bool(mark)

    def parse(self, row: Any) -> Problem:
        """See `RowsTask.parse`."""
        return _parse_text(row) if isinstance(row, str) else parse_problem(row)

    def key(self, item: Problem) -> str:
        """The question."""
        return item.question


class Problem(NamedTuple):
    """A word problem with its solution."""

    question: str
    steps: tuple[str, ...]
    separator: str
    answer: str
    chain: str | None = None


def write_problem(
    problem: Problem, chain_of_thought: bool, calculator_marks: bool = False
) -> Example:
    """Lay a problem out as the TurboConn paper does: ` 1200`, or ` <steps>\\n#### 1200`, is to
    follow the prompt."""
    completion = f" {problem.answer}"
    if chain_of_thought:
        steps = [step if calculator_marks else _without_marks(step) for step in problem.steps]
        completion = f" {problem.separator.join(steps)}\n{_ANSWER_MARK} {problem.answer}"
    return Example(paper_prompt(_QUESTION, problem.question), completion, len(problem.steps))


def is_right_number(example: Example, generated_text: str, chain_of_thought: bool) -> bool:
    """Whether the generated answer is the example's number: 1,200 equals 1200.0; `1200 dollars` is
    no number.

    With the chain of thought the answer is what follows the last `####`, otherwise the first line.
    """
    if chain_of_thought:
        _, mark, generated_text = generated_text.rpartition(_ANSWER_MARK)
        if not mark:
            return False
    found = _number(first_line(generated_text))
    return found is not None and Decimal(found) == Decimal(_answer_of(example))


def parse_problem(row: Any) -> Problem:
    """Make a problem of a row in one of the forms that `GSM8K` reads. Raises ValueError if it is
    malformed."""
    if not isinstance(row, dict):
        raise ValueError(
            f"expected an object with the texts 'question' and 'answer', found {shown(row)}"
        )
    question, answer = text_field(row, "question"), text_field(row, "answer")
    chain = row.get("chain")
    if chain is not None and not isinstance(chain, str):
        raise ValueError(f"expected a text as 'chain', found {shown(str(chain))}")
    if "steps" in row:
        if not isinstance(row["steps"], list) or not all(
            isinstance(step, str) for step in row["steps"]
        ):
            raise ValueError(
                f"expected a list of texts as 'steps', found {shown(str(row['steps']))}"
            )
        return Problem(question.strip(), tuple(row["steps"]), " ", _checked(answer), chain)
    if "cot" in row:
        if not isinstance(row["cot"], str):
            raise ValueError(f"expected a text as 'cot', found {shown(row['cot'])}")
        steps, separator = _steps_of(row["cot"])
        return Problem(question.strip(), steps, separator, _checked(answer), chain)
    solution, mark, number = answer.rpartition(_ANSWER_MARK)
    if not mark:
        raise ValueError(f"expected an answer after '####', found {shown(answer)}")
    steps = _lines(solution)
    return Problem(question.strip(), steps, "\n", _checked(number), chain)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _steps_of(text: str) -> tuple[tuple[str, ...], str]:
    """The steps of a chain of thought in one text, and what they are joined with: marks alone, or
    lines."""
    if not _CALCULATOR_MARK.sub("", text).strip():
        return tuple(_CALCULATOR_MARK.findall(text)), " "
    return _lines(text), "\n"


def _parse_text(line: str) -> Problem:
    question, bars, answer = line.rpartition("||")
    solution, mark, number = answer.rpartition(_ANSWER_MARK)
    if bars and not question.strip():
        raise ValueError("the question before '||' is empty")
    if not bars or not mark:
        raise ValueError(f"expected 'question||steps #### answer', found {shown(line)}")
    if _CALCULATOR_MARK.sub("", solution).strip():
        raise ValueError(f"expected steps of the form <<a+b=c>>, found {shown(solution)}")
    return Problem(
        question.strip(), tuple(_CALCULATOR_MARK.findall(solution)), " ", _checked(number)
    )


def _checked(text: str) -> str:
    number = _number(text)
    if number is None:
        raise ValueError(f"expected a number as the answer, found {shown(text.strip())}")
    return number


def _number(text: str) -> str | None:
    """Return the text without commas and blanks if that leaves a plain decimal number, else
    None."""
    text = text.strip().replace(",", "")
    return text if _NUMBER.fullmatch(text) else None


def _answer_of(example: Example) -> str:
    return example.completion.rpartition(_ANSWER_MARK)[2].strip()


def _without_marks(step: str) -> str:
    # In GSM8K-Aug the marks are all there is of a step.
    return _CALCULATOR_MARK.sub("", step).strip() or step
