"""GSM-Symbolic: word problems of GSM8K with names and numbers drawn anew (Mirzadeh et al., 2024),
by reasoning-gym."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.base import GeneratedTask
from undertow.lab.tasks.example import Example
from undertow.lab.tasks.gsm8k import is_right_number, parse_problem, write_problem
from undertow.registry import register

# About one problem in 100 takes as many steps as the longest does.
_ATTEMPTS = 5000


@register
class GSMSymbolic(GeneratedTask):
    """Problems drawn from some 85 templates of grade-school mathematics, in GSM8K's layout and
    scored as `GSM8K` is.

    They are those of the package reasoning-gym, which this task needs, so other versions of it may
    draw other problems. The splits share no question, but they do share templates: a model is
    tested on new numbers, not on new stories.

    Completions are ` 70`, or ` <steps>\\n#### 70` with the chain of thought. An example's length is
    its number of solution steps.
    """

    kind: ClassVar[str] = "gsm_symbolic"
    scores_tokens: ClassVar[bool] = True

    chain_of_thought: bool = False
    """Whether the completion holds the solution steps before the answer."""

    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one problem; see `GeneratedTask.draw`.

        Raises:
            ConfigError: reasoning-gym is missing.
            DataError: no problem has that many steps.
        """
        for _ in range(_ATTEMPTS):
            drawn = _one_of_reasoning_gym(generator.getrandbits(31))
            row = {"question": drawn["question"], "answer": drawn["metadata"]["answer_cot"]}
            example = write_problem(parse_problem(row), self.chain_of_thought)
            if length is None or example.length == length:
                return example
        raise DataError(
            f"None of {_ATTEMPTS} problems of {self.kind} takes {length} steps; ask for 2 to 5."
        )

    def score(self, example: Example, generated_text: str) -> bool:
        """See `undertow.lab.tasks.gsm8k.is_right_number`."""
        return is_right_number(example, generated_text, self.chain_of_thought)

    def characters(self) -> None:
        """None: problems are free text."""


def _one_of_reasoning_gym(seed: int) -> dict[str, Any]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"{GSMSymbolic.kind} needs the package reasoning-gym; install it with: pip install "
            "'undertow[reasoning-gym]'"
        ) from error
    entry: dict[str, Any] = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=1)[0]
    return entry
