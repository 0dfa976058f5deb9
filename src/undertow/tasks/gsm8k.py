"""GSM8K: grade-school word problems (Cobbe et al., 2021; TurboConn appendix A.4.3), read from local files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.tasks.base import Task, check_split, first_line, paper_prompt, split_of, text_field
from undertow.tasks.example import Example, Split

_QUESTION = "Answer the math question."
_ANSWER_MARK = "####"
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)", re.ASCII)
_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class GSM8K(Task):
    """Word problems whose answer is a number, with or without their solution steps.

    Files are JSON lines, either GSM8K's own (`question`, and `answer` with the steps, `####` and the
    number) or with a list `steps` beside a bare `answer`; or, ending in .txt, lines `question||<<a+b=c>>
    ... #### number` (GSM8K-Aug; Deng et al., 2023). Without a `valid` file, the valid split is the
    twentieth of the train file whose questions `undertow.tasks.base.split_of` puts into 'valid', and the
    train split is the rest.

    Instead of files, `hub` names a data set whose rows have the same fields; it needs the package datasets. Its
    validation split, if it has one, is the valid split.

    Completions are ` 1200`, or ` <steps>\\n#### 1200` with the chain of thought; answers have no thousands
    commas. An example's length is its number of solution steps.
    """

    kind: ClassVar[str] = "gsm8k"

    train: str | None = None
    """Path of the file with the training problems."""
    test: str | None = None
    """Path of the file with the test problems."""
    valid: str | None = None
    """Path of a file with validation problems. If absent, a fixed twentieth of the train file is held out."""
    hub: str | None = None
    """Name of a data set of the Hugging Face hub, for the splits without a file: whynlp/gsm8k-aug, or openai/gsm8k:main."""
    chain_of_thought: bool = False
    """Whether the completion holds the solution steps before the answer."""
    calculator_marks: bool = False
    """Whether steps keep their <<48/2=24>> marks. Steps that consist of such marks only always keep them."""
    given_chain: bool = False
    """Whether the prompt holds the chain of thought that `undertow chains` wrote for the question, so that only the final
    answer is to be found (TurboConn, section 4.8)."""

    def __post_init__(self) -> None:
        if self.given_chain and self.chain_of_thought:
            raise ConfigError(
                "given_chain and chain_of_thought are both set, but a chain is either given or written; unset one"
            )

    def size(self, split: Split, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
        """How many problems the split holds; see `Task.size`."""
        return len(self._problems(split))

    def example(self, split: Split, index: int, length: int | None = None) -> Example:
        """See `Task.example`; `length` must be None."""
        if length is not None:
            raise ConfigError(f"length is {length}, but {self.kind} reads a file as it is; leave length out.")
        problems = self._problems(split)
        if not 0 <= index < len(problems):
            raise DataError(
                f"There is no {self.kind} example {index}, as the {split} split holds {len(problems)}; "
                f"ask for a smaller index, counted from 0."
            )
        problem = problems[index]
        completion = f" {problem.answer}"
        if self.given_chain:
            if problem.chain is None:
                raise DataError(
                    f"{self.kind} {split} example {index} has no 'chain', which given_chain asks for; "
                    "let undertow chains write the files."
                )
            text = f"{problem.question}\nReasoning: {problem.chain}"
            return Example(paper_prompt(_QUESTION, text), completion, len(problem.steps))
        if self.chain_of_thought:
            steps = [step if self.calculator_marks else _without_marks(step) for step in problem.steps]
            completion = f" {problem.separator.join(steps)}\n{_ANSWER_MARK} {problem.answer}"
        return Example(paper_prompt(_QUESTION, problem.question), completion, len(problem.steps))

    def row(self, split: Split, index: int) -> dict[str, Any]:
        """The problem of an example as a row of a file that this task reads."""
        self.example(split, index)
        problem = self._problems(split)[index]
        return {"question": problem.question, "steps": list(problem.steps), "answer": problem.answer}

    def score(self, example: Example, generated_text: str) -> bool:
        """Whether the generated answer is the same number: 1,200 equals 1200.0; `1200 dollars` is no number.

        With the chain of thought the answer is what follows the last `####`, otherwise the first line.
        """
        if self.chain_of_thought:
            _, mark, generated_text = generated_text.rpartition(_ANSWER_MARK)
            if not mark:
                return False
        found = _number(first_line(generated_text))
        return found is not None and Decimal(found) == Decimal(_answer_of(example))

    @staticmethod
    def split_chain(generated_text: str) -> tuple[str, bool]:
        """The chain of thought in a generated text, without the answer after the last `####`, and whether it has one."""
        before, mark, _ = generated_text.rpartition(_ANSWER_MARK)
        return (before if mark else generated_text).strip(), bool(mark)

    def characters(self) -> None:
        """None: the problems are free text."""
        return None

    def _problems(self, split: Split) -> tuple[_Problem, ...]:
        check_split(split)
        paths: dict[str, str | None] = {"train": self.train, "valid": self.valid, "test": self.test}
        if paths[split] is None and self.hub is not None and (split != "valid" or self.train is None):
            return _of_hub(self.hub, split)
        name = "train" if split == "valid" and self.valid is None else split
        path = paths[name]
        if path is None:
            raise ConfigError(f"The {split} split needs the field {name!r} of {self.kind}; give it the path of a file.")
        part = split if name == "train" and self.valid is None else None
        file = Path(path).expanduser()
        try:
            return _read(file, file.stat().st_mtime_ns, part)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no UTF-8 text; give a .jsonl or .txt file.") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); check the path of the {name} file.") from error


class _Problem(NamedTuple):
    question: str
    steps: tuple[str, ...]
    separator: str
    answer: str
    chain: str | None = None


@lru_cache(maxsize=8)
def _read(path: Path, modified: int, part: Split | None) -> tuple[_Problem, ...]:
    """Read a file, or the train or valid part of one; `modified` makes a changed file be read again."""
    if part is not None:
        return _part_of(_read(path, modified, None), part)
    parse = _parse_text if path.suffix == ".txt" else _parse_json
    found: list[_Problem] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found.append(parse(line))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}; correct or remove the line.") from error
    if not found:
        raise DataError(f"{path} holds no problems; give a file with one problem a line.")
    return tuple(found)


@lru_cache(maxsize=8)
def _of_hub(name: str, split: Split) -> tuple[_Problem, ...]:
    """Read one split of a data set of the hub. Without a validation split, the valid one is held out of train."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("hub needs the package datasets; install it with: pip install datasets") from error
    path, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(path, configuration or None)
    except Exception as error:  # hub, network and parser raise any kind
        raise DataError(f"the data set {name} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    held_out = next((each for each in ("validation", "valid") if each in splits), None)
    theirs = {"train": "train", "valid": held_out or "train", "test": "test"}[split]
    if theirs not in splits:
        raise DataError(f"the data set {name} has no {theirs} split, but {', '.join(splits)}; give a file for it.")
    found: list[_Problem] = []
    for number, row in enumerate(splits[theirs]):
        try:
            found.append(_parse_row(row, str(row)))
        except ValueError as error:
            raise DataError(f"{name}, {theirs} row {number}: {error}.") from error
    return _part_of(tuple(found), split) if held_out is None and theirs == "train" else tuple(found)


def _part_of(problems: tuple[_Problem, ...], part: Split) -> tuple[_Problem, ...]:
    return tuple(p for p in problems if (split_of(p.question) == "valid") == (part == "valid"))


def _parse_json(line: str) -> _Problem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON, found {_shown(line)}") from error
    return _parse_row(row, line)


def _parse_row(row: object, line: str) -> _Problem:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with the texts 'question' and 'answer', found {_shown(line)}")
    question, answer = text_field(row, "question"), text_field(row, "answer")
    chain = row.get("chain")
    if chain is not None and not isinstance(chain, str):
        raise ValueError(f"expected a text as 'chain', found {_shown(str(chain))}")
    if "steps" in row:
        if not isinstance(row["steps"], list) or not all(isinstance(step, str) for step in row["steps"]):
            raise ValueError(f"expected a list of texts as 'steps', found {_shown(str(row['steps']))}")
        return _Problem(question.strip(), tuple(row["steps"]), " ", _checked(answer), chain)
    solution, mark, number = answer.rpartition(_ANSWER_MARK)
    if not mark:
        raise ValueError(f"expected an answer after '####', found {_shown(answer)}")
    steps = tuple(step.strip() for step in solution.splitlines() if step.strip())
    return _Problem(question.strip(), steps, "\n", _checked(number), chain)


def _parse_text(line: str) -> _Problem:
    question, bars, answer = line.rpartition("||")
    solution, mark, number = answer.rpartition(_ANSWER_MARK)
    if bars and not question.strip():
        raise ValueError("the question before '||' is empty")
    if not bars or not mark:
        raise ValueError(f"expected 'question||steps #### answer', found {_shown(line)}")
    if _CALCULATOR_MARK.sub("", solution).strip():
        raise ValueError(f"expected steps of the form <<a+b=c>>, found {_shown(solution)}")
    return _Problem(question.strip(), tuple(_CALCULATOR_MARK.findall(solution)), " ", _checked(number))


def _checked(text: str) -> str:
    number = _number(text)
    if number is None:
        raise ValueError(f"expected a number as the answer, found {_shown(text)}")
    return number


def _number(text: str) -> str | None:
    """Return the text without commas and blanks if that leaves a plain decimal number, else None."""
    text = text.strip().replace(",", "")
    return text if _NUMBER.fullmatch(text) else None


def _answer_of(example: Example) -> str:
    return example.completion.rpartition(_ANSWER_MARK)[2].strip()


def _without_marks(step: str) -> str:
    # In GSM8K-Aug the marks are all there is of a step.
    return _CALCULATOR_MARK.sub("", step).strip() or step


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 80 else text[:80] + "...")
