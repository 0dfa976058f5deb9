"""Conversations: the template's words are given, the assistant's are learnt, and every malformed
row is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import Chat, character_tokenizer
from undertow.lab.tasks.encode import IGNORED

TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
TOKENIZER.chat_template = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + eos_token + '\n' }}{% endfor "
    "%}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [
    said("system", "Be brief."),
    said("user", "2+2?"),
    said("assistant", "4."),
    said("user", "3+3?"),
    said("assistant", "6."),
]


def written(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def learnt(item: dict[str, list[int]]) -> str:
    return TOKENIZER.decode([token for token in item["labels"] if token != IGNORED])


def test_only_the_assistants_tokens_are_learnt(tmp_path: Path) -> None:
    task = Chat(test=written(tmp_path / "a.jsonl", {"messages": TALK}))
    item = task.encode("test", 0, TOKENIZER)
    whole = TOKENIZER.apply_chat_template(TALK, tokenize=False)
    assert TOKENIZER.decode(item["input_ids"]) == whole
    assert learnt(item) == "4.<eos>\n6.<eos>\n"
    assert all(
        label in (IGNORED, token)
        for label, token in zip(item["labels"], item["input_ids"], strict=True)
    )
    prompt = TOKENIZER.apply_chat_template(TALK[:2], tokenize=False, add_generation_prompt=True)
    assert item["labels"].index(TOKENIZER.convert_tokens_to_ids("4")) == len(
        TOKENIZER(prompt)["input_ids"]
    )


def test_what_follows_the_assistants_last_words_is_left_out(tmp_path: Path) -> None:
    task = Chat(test=written(tmp_path / "a.jsonl", {"messages": [*TALK, said("user", "more?")]}))
    assert "more" not in TOKENIZER.decode(task.encode("test", 0, TOKENIZER)["input_ids"])


def test_open_math_reasonings_columns(tmp_path: Path) -> None:
    row = {
        "problem": "2+2?",
        "generated_solution": "4.",
        "expected_answer": "4",
        "messages_of_others": 1,
    }
    task = Chat(test=written(tmp_path / "a.jsonl", row))
    assert learnt(task.encode("test", 0, TOKENIZER)) == "4.<eos>\n"


def test_three_splits_of_one_file_share_no_question(tmp_path: Path) -> None:
    rows = [
        {"messages": [said("user", f"{i // 2}?"), said("assistant", f"{i}")]} for i in range(400)
    ]
    task = Chat(train=written(tmp_path / "a.jsonl", *rows))
    splits: Any = ("train", "valid", "test")
    asked = {s: {task.key(task.item(s, i)) for i in range(task.size(s))} for s in splits}
    assert sum(task.size(s) for s in splits) == 400 and all(asked.values())
    assert (
        not asked["train"] & asked["valid"]
        and not asked["train"] & asked["test"]
        and not asked["valid"] & asked["test"]
    )
    own = Chat(train=task.train, test=task.train)
    assert own.size("test") == 400 and own.size("train") + own.size("valid") == 400


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "expected an object with 'messages'"),
        ({"text": "x"}, "expected a list of messages as 'messages'"),
        ({"messages": []}, "expected a list of messages as 'messages'"),
        ({"messages": [said("user", "?")]}, "expected a message of the assistant to learn from"),
        ({"messages": [said("robot", "?")]}, "expected a 'role' of system, user, assistant"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "expected a 'role' of .* and a text as 'content'",
        ),
        ({"problem": "?"}, "expected the texts 'problem' and 'generated_solution'"),
    ],
)
def test_a_malformed_row_is_named(row: Any, message: str, tmp_path: Path) -> None:
    task = Chat(test=written(tmp_path / "bad.jsonl", {"messages": TALK}, row))
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 2: {message}"):
        task.size("test")


def test_templates_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    task = Chat(test=written(tmp_path / "a.jsonl", {"messages": TALK}))
    other = character_tokenizer("abc")
    for template, error, message in (
        (None, ConfigError, "has no chat template"),
        ("{{ messages[-1]['content'] }}", ConfigError, "does not go on from what it wrote"),
        (
            "{{ raise_exception('no system turn') }}",
            DataError,
            "refuses chat test example 0: no system turn",
        ),
    ):
        other.chat_template = template
        with pytest.raises(error, match=message):
            task.encode("test", 0, other)
