"""Variable assignment: follow a chain of aliases to a value (T²MLR, Figure 6; after the reasoning
primitives of Saunshi)."""

from __future__ import annotations

import random
import string
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt

from undertow.errors import ConfigError
from undertow.lab.tasks.base import PromptedTask, check_order, first_line
from undertow.lab.tasks.example import Example
from undertow.registry import register

NAMES = string.ascii_lowercase + string.ascii_uppercase
_TASK = "Variable assignment. Follow the assignments and fill in the blank."


@register
class VariableAssignment(PromptedTask):
    """Assignments in random order: values, a chain of aliases that ends at one of them, and aliases
    that lead astray.

    `values` variables hold a random digit each. At depth d the asked variable is the first of d + 1
    chain variables, each an alias of the next and the last one of a value: d + 1 alias hops and one
    look-up of a value, as in the released generator, so that depth 0 is already one hop.
    `distractors` more variables are aliases of any other variable each; they may point at each
    other in circles, and none is on the way to the answer. Every name is one letter.

    The 'paper' template writes an assignment a line and asks `x=___`, completed with ` 7` after
    `Answer:`; 'bare' writes `a=7;b=a;b=` and `7`. With the chain of thought the completion walks
    the chain, `a=7` here. An example's length is its depth, drawn uniformly from
    min_depth..max_depth. Answering with the commonest of the values shown is right about one time
    in four. Distractors matter: without them the one value whose variable has an alias is the
    answer, and no chain need be followed; of the values that have one, a random one is right about
    two times in five at the default sizes.
    """

    kind: ClassVar[str] = "variables"
    scores_tokens: ClassVar[bool] = True

    min_depth: NonNegativeInt = 5
    """Least depth; at least 0."""
    max_depth: int = 5
    """Greatest depth; 5 in the paper."""
    values: PositiveInt = 8
    """Variables that hold a digit; at least 1."""
    distractors: NonNegativeInt = 6
    """Aliases beside the chain."""
    chain_of_thought: bool = False
    """Whether the completion holds the names on the way to the value."""

    def __post_init__(self) -> None:
        check_order(self, "min_depth", "max_depth")
        self._check_names("max_depth", self.max_depth)

    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one set of assignments; see `GeneratedTask.draw`. Raises ConfigError if there are
        too few letters."""
        depth = generator.randint(self.min_depth, self.max_depth) if length is None else length
        self._check_names("length", depth)
        used = self._used(depth)
        # As few letters as do, so that a depth that fits the alphabet looks as the released
        # generator's does.
        names = generator.sample(NAMES[: max(used, 26)], k=used)
        valued = names[: self.values]
        chain = names[self.values : self.values + depth + 1]
        astray = names[used - self.distractors :]
        digits = {name: str(generator.randrange(10)) for name in valued}
        sink = generator.choice(valued)
        lines = [f"{name}={digit}" for name, digit in digits.items()]
        lines += [
            f"{name}={following}" for name, following in zip(chain, [*chain[1:], sink], strict=True)
        ]
        lines += [
            f"{name}={generator.choice([other for other in names if other != name])}"
            for name in astray
        ]
        generator.shuffle(lines)
        way = [*chain[1:], sink] if self.chain_of_thought else []
        answer = "=".join([*way, digits[sink]])
        if self.template == "bare":
            return Example(";".join(lines) + f";{chain[0]}=", answer, depth)
        text = "\n".join(lines)
        return Example(f"{_TASK}\n{text}\n{chain[0]}=___\nAnswer:", f" {answer}", depth)

    def score(self, example: Example, generated_text: str) -> bool:
        """Whether the value is right; with the chain of thought, what follows its last `=`."""
        if not self.chain_of_thought:
            return super().score(example, generated_text)
        _, found, answer = first_line(generated_text).rpartition("=")
        return bool(found) and answer == example.completion[-1]

    def characters(self) -> str:
        """See `Task.characters`."""
        around = ";=" if self.template == "bare" else f"{_TASK}\n=___\nAnswer: "
        return "".join(sorted(set(NAMES + string.digits + around)))

    def _used(self, depth: int) -> int:
        return self.values + depth + 1 + self.distractors

    def _check_names(self, name: str, depth: int) -> None:
        most = len(NAMES) - self._used(0)
        if depth > most:
            raise ConfigError(
                f"{name} is {depth}, but {len(NAMES)} letters name {self.values} values, "
                f"{self.distractors} distractors and a chain of depth {most} at most; lower it."
            )
