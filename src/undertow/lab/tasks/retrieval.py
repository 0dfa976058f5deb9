"""S5-Retrieval: track a state, and look up its entry in a dictionary that the sequence itself
brings (T²MLR, Figure 4)."""

from __future__ import annotations

import random
import string
from typing import ClassVar, Literal

from undertow.errors import ConfigError
from undertow.lab.tasks.base import GeneratedTask, Length, Measure, check_order
from undertow.lab.tasks.example import Example
from undertow.lab.tasks.groups import Group, multiplication_table
from undertow.registry import register

# One character an element, apart from those of the entries: the letters of Latin Extended-A.
ELEMENTS = "".join(map(chr, range(0x100, 0x178)))
ENTRY_ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits
DICTIONARY_END = "|"
BLANK = " "
NO_ENTRY = "-"


@register
class GroupRetrieval(GeneratedTask):
    """A random dictionary, then random elements of a group; the labels are each running product and
    its entry.

    The dictionary is written as each key followed by its entry of `entry_length` random letters and
    digits, keys in random order, and ends with `|`. Then comes each element followed by as many
    blanks as an entry has characters. At the element's position the label is the product so far (as
    in group_tracking), at the blanks the entry of that product, character by character; the
    dictionary has no labels. So nothing that the model writes is fed back, and each state takes 1 +
    entry_length tokens: five in the paper.

    With a dictionary of fewer keys than the group has elements, keys are drawn anew for each
    sequence. Elements stay uniform, as a choice of those that lead to keys would give the state
    away; a state without an entry has the label `-` at each blank. With retrieve = "action",
    elements are drawn from the keys, so that each has an entry.

    An example's length is its number of elements, drawn uniformly.
    """

    kind: ClassVar[str] = "group_retrieval"
    measured_by: ClassVar[Measure] = "labels"

    group: Group = "S5"
    """S3 (6 elements), S5 (120), A5 (60), Z60 (60) or A4xZ5 (60); S5 in the paper."""
    min_length: Length = 1
    """Fewest elements in a sequence; at least 1."""
    max_length: Length = 32
    """Most elements in a sequence; 32 in the paper."""
    entry_length: Length = 4
    """Characters of a dictionary entry; 4 in the paper."""
    dictionary_size: int | None = None
    """Entries of the dictionary; one for each element of the group if left out, as in the paper."""
    retrieve: Literal["state", "action"] = "state"
    """Whose entry to say: the running product's, as the paper's text has it, or the element's just
    read, as one released generator does."""

    def __post_init__(self) -> None:
        check_order(self, "min_length", "max_length")
        elements = len(multiplication_table(self.group))
        if self.dictionary_size is not None and not 1 <= self.dictionary_size <= elements:
            raise ConfigError(
                f"dictionary_size is {self.dictionary_size}, but must be between 1 and the "
                f"{elements} elements of {self.group}; change it."
            )

    @property
    def longest(self) -> int:
        """See `Task.longest`."""
        return self.max_length

    def draw(self, generator: random.Random, length: int | None) -> Example:
        """Draw one dictionary and sequence; see `GeneratedTask.draw`."""
        count = generator.randint(self.min_length, self.max_length) if length is None else length
        table = multiplication_table(self.group)
        keys = generator.sample(range(len(table)), k=self.dictionary_size or len(table))
        entries = {
            key: "".join(generator.choices(ENTRY_ALPHABET, k=self.entry_length)) for key in keys
        }
        elements = generator.choices(
            keys if self.retrieve == "action" else range(len(table)), k=count
        )
        labels, state = [], 0
        for element in elements:
            state = table[state][element]
            entry = entries.get(
                element if self.retrieve == "action" else state, NO_ENTRY * self.entry_length
            )
            labels.append(ELEMENTS[state] + entry)
        dictionary = "".join(ELEMENTS[key] + entry for key, entry in entries.items())
        asked = "".join(ELEMENTS[element] + BLANK * self.entry_length for element in elements)
        return Example(dictionary + DICTIONARY_END + asked, "".join(labels), count, aligned=True)

    def characters(self) -> str:
        """See `Task.characters`."""
        elements = ELEMENTS[: len(multiplication_table(self.group))]
        return "".join(sorted(elements + ENTRY_ALPHABET + DICTIONARY_END + BLANK + NO_ENTRY))
