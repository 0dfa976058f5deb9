"""Conversations to fine-tune on, such as OpenMathReasoning: the loss on what the assistant says
(T²MLR's retrofit)."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError, shown
from undertow.lab.tasks.base import Measure
from undertow.lab.tasks.encode import IGNORED, known_ids
from undertow.lab.tasks.example import Example, Split
from undertow.lab.tasks.rows import RowsTask
from undertow.registry import register

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


@register
class Chat(RowsTask):
    """Conversations in the tokenizer's own chat template; only the assistant's tokens carry loss.

    Rows are JSON lines with `messages`, a list of objects with the texts `role` (system, user or
    assistant) and `content`, or with OpenMathReasoning's `problem` and `generated_solution`, a
    question and its answer. Splits and `hub` are those of `undertow.lab.tasks.rows.RowsTask`;
    without a `test` file, the test split is held out of train too.

    What the template puts before the assistant's turn, such as a header, is given, as when the
    model generates; what it puts after its words, such as the token that ends a turn, is to be
    learnt. The parts are tokenized apart.
    """

    kind: ClassVar[str] = "chat"
    items: ClassVar[str] = "conversations"
    holds_out_test: ClassVar[bool] = True
    measured_by: ClassVar[Measure] = "loss"

    def parse(self, row: Any) -> tuple[Message, ...]:
        """See `RowsTask.parse`."""
        if not isinstance(row, dict):
            raise ValueError(f"expected an object with 'messages', found {shown(row)}")
        if "messages" not in row and "problem" in row:
            for name in ("problem", "generated_solution"):
                if not isinstance(row.get(name), str):
                    raise ValueError(
                        f"expected the texts 'problem' and 'generated_solution', found {shown(row)}"
                    )
            return (
                {"role": "user", "content": row["problem"]},
                {"role": "assistant", "content": row["generated_solution"]},
            )
        messages = row.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"expected a list of messages as 'messages', found {shown(row)}")
        for message in messages:
            good = (
                isinstance(message, dict)
                and message.get("role") in ROLES
                and isinstance(message.get("content"), str)
            )
            if not good:
                raise ValueError(
                    f"expected a 'role' of {', '.join(ROLES)} and a text as 'content', found "
                    f"{shown(message)}"
                )
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                f"expected a message of the assistant to learn from, found {shown(messages)}"
            )
        return tuple(
            {"role": message["role"], "content": message["content"]} for message in messages
        )

    def key(self, item: tuple[Message, ...]) -> str:
        """All that is said before the assistant's first words."""
        first = next(n for n, message in enumerate(item) if message["role"] == "assistant")
        return "\n".join(message["content"] for message in item[:first])

    def encode(
        self, split: Split, index: int, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, list[int]]:
        """Return `input_ids` and `labels` of a conversation; labels are those of the assistant's
        tokens alone.

        Raises:
            ConfigError: the tokenizer has no chat template, or one that changes what it wrote when
                messages are added.
            DataError: there is no such conversation, or the template refuses it.
        """
        input_ids: list[int] = []
        labels: list[int] = []
        for text, learnt in self._parts(split, index, tokenizer):
            ids = known_ids(
                text, tokenizer, add_special_tokens=False
            )  # templates write special tokens themselves
            input_ids += ids
            labels += ids if learnt else [IGNORED] * len(ids)
        return {"input_ids": input_ids, "labels": labels}

    def rough_length(self, split: Split, index: int) -> int:
        """The characters of all messages."""
        return sum(len(message["content"]) for message in self.item(split, index))

    def example(self, split: Split, index: int, length: int | None = None) -> NoReturn:
        """There are none: raises ConfigError."""
        raise ConfigError(
            f"The {self.kind} task has conversations and no prompts with answers; use encode()."
        )

    def score(self, example: Example, generated_text: str) -> NoReturn:
        """There is nothing to score: raises ConfigError."""
        raise ConfigError(f"The {self.kind} task has no answers to score; measure its loss.")

    def _parts(
        self, split: Split, index: int, tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[str, bool]]:
        """The conversation as the template writes it, in parts that are given and parts that are
        learnt, in turn."""
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template, which the chat task needs; use an "
                "instruction-tuned model's"
            )
        messages = self.item(split, index)
        parts: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._written(messages[:number], tokenizer, True, split, index)
            through = self._written(messages[: number + 1], tokenizer, False, split, index)
            if not before.startswith(done) or not through.startswith(before):
                raise ConfigError(
                    "the tokenizer's chat template does not go on from what it wrote before, so "
                    "the assistant's part cannot be told; use a template that does"
                )
            parts += [(before[len(done) :], False), (through[len(before) :], True)]
            done = through
        return parts  # nothing is learnt of what follows the assistant's last words

    def _written(
        self,
        messages: tuple[Message, ...],
        tokenizer: PreTrainedTokenizerBase,
        prompt: bool,
        split: Split,
        index: int,
    ) -> str:
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template may raise any kind
            raise DataError(
                f"the chat template refuses {self.kind} {split} example {index}: {error}"
            ) from error
        return str(text)
