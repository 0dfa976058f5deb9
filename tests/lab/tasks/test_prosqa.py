"""ProsQA: generated questions have one right answer and the statistics of the released files, which
can be read too."""

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import ProsQA, character_tokenizer, encode, split_of
from undertow.lab.tasks.graphs import Question, distances_from, draw_question, question_from_row

# The folder that holds the released prosqa_valid.json and prosqa_test.json.
DATA = Path(os.environ.get("UNDERTOW_DATA", Path(__file__).parents[4] / "shared" / "data"))
FILES = [DATA / "prosqa_valid.json", DATA / "prosqa_test.json"]
released = pytest.mark.skipif(
    not all(path.is_file() for path in FILES), reason=f"no prosqa_valid.json in {DATA}"
)


@pytest.fixture(scope="module")
def drawn() -> list[Question]:
    generator = random.Random(5)
    return [draw_question(generator) for _ in range(800)]


def check(question: Question) -> None:
    """The graph bears out the question, its steps and its answer, and no other answer."""
    reached, others = (
        distances_from(question.edges, root) for root in (question.root, 1 - question.root)
    )
    assert question.target in reached and question.target not in others
    assert question.other in others and question.other not in reached
    assert not {question.target, question.other} & {a for a, _ in question.edges}, (
        "an answer is no leaf"
    )
    assert len(question.steps) == len(question.path) == reached[question.target], "no shortest path"
    assert all(
        edge in question.edges
        for edge in zip((question.root, *question.path), question.path, strict=False)
    )
    named = {b for _, b in question.edges}
    for node, symbol in enumerate(question.symbols):
        assert symbol[0].isupper() == (node not in named)
    *sentences, asked = question.text.replace("? ", "?").split(". ")
    who = [symbol if symbol[0].isupper() else f"Every {symbol}" for symbol in question.symbols]
    assert Counter(sentences) == Counter(
        f"{who[a]} is a {question.symbols[b]}" for a, b in question.edges
    )
    names = [question.symbols[node] for node in (question.root, question.target, question.other)]
    assert asked in (
        f"Is {names[0]} a {names[1]} or {names[2]}?",
        f"Is {names[0]} a {names[2]} or {names[1]}?",
    )
    assert question.answer == f"{names[0]} is a {names[1]}."
    assert all(f"{step[:-1]}" in sentences for step in question.steps)


def statistics(questions: Sequence[Question]) -> dict[str, float]:
    """What must agree between generated and released questions."""
    count, found = len(questions), Counter[str]()
    nodes = 0
    for question in questions:
        degrees = Counter(b for _, b in question.edges)
        found["nodes"] += len(question.symbols)
        found["edges"] += len(question.edges)
        found["second root"] += question.root
        found[f"path of {len(question.steps)}"] += 1
        found["distance of the wrong answer"] += distances_from(question.edges, 1 - question.root)[
            question.other
        ]
        for node in range(2, len(question.symbols)):
            nodes += 1
            found[f"in-degree {min(degrees[node], 4)}"] += 1
    return {
        name: value / (nodes if name.startswith("in-degree") else count)
        for name, value in found.items()
    }


def test_generated_questions_have_one_right_answer(drawn: list[Question]) -> None:
    for question in drawn:
        check(question)


@released
def test_generated_questions_have_the_statistics_of_the_released_ones(
    drawn: list[Question],
) -> None:
    rows = [row for path in FILES for row in json.loads(path.read_text())]
    questions = [question_from_row(row) for row in rows]
    for question in questions:
        check(question)
    expected, got = statistics(questions), statistics(drawn)
    tolerance = {
        "nodes": 0.35,
        "edges": 0.9,
        "distance of the wrong answer": 0.12,
        "second root": 0.08,
    }
    for name, value in expected.items():
        allowed = tolerance.get(name, 0.015 if name.startswith("in-degree") else 0.06)
        assert got.get(name, 0) == pytest.approx(value, abs=allowed), name
    assert set(got) - set(expected) <= {"path of 7"} and got.get("path of 7", 0) < 0.01


def test_both_templates_tell_the_same(drawn: list[Question]) -> None:
    bare = ProsQA(template="bare", chain_of_thought=True)
    for index in range(40):
        example = bare.example("train", index)
        *edges, asked = example.prompt.rstrip("=").split(";")
        root, options = asked.split("?")
        children: dict[str, set[str]] = {}
        for a, b in edges:
            children.setdefault(a, set()).add(b)
        reached = {root}
        while more := {b for a in reached for b in children.get(a, ())} - reached:
            reached |= more
        (right,) = reached & set(options)
        path, _, answer = example.completion.partition("=")
        assert answer == right == path[-1] and example.length == len(path)
        assert all(b in children[a] for a, b in zip(root + path, path, strict=False))
        assert bare.score(example, example.completion) and not bare.score(example, path)
        assert not bare.score(example, path + "=" + next(o for o in options if o != right))
        assert set(example.prompt + example.completion) <= set(bare.characters() or "")
        assert split_of(example.prompt) == "train"
    short = ProsQA(template="bare")
    assert (
        len(short.example("test", 0, 5).completion) == 1 and short.example("test", 0, 5).length == 5
    )
    tokenizer = character_tokenizer(short.characters() or "")
    assert len(encode(short.example("train", 0), tokenizer)["input_ids"]) < 200
    with pytest.raises(DataError, match="has an answer 2 steps from its root"):
        short.example("train", 0, 2)


@pytest.fixture
def row(drawn: list[Question]) -> dict[str, Any]:
    question = drawn[0]
    return {
        "question": question.text,
        "answer": question.answer,
        "steps": question.steps,
        "idx_to_symbol": question.symbols,
        "edges": question.edges,
        "root": question.root,
        "target": question.target,
        "neg_target": question.other,
    }


def test_files_are_read_as_released(
    row: dict[str, Any], drawn: list[Question], tmp_path: Path
) -> None:
    path = tmp_path / "test.json"
    path.write_text(json.dumps([row]))
    task = ProsQA(test=str(path), chain_of_thought=True)
    assert task.size("test") == 1 and task.size("train") is None
    example = task.example("test", 0)
    assert example.prompt == drawn[0].text + "\n"
    assert example.completion == "\n".join(drawn[0].steps) + "\n### " + drawn[0].answer
    assert task.score(example, example.completion) and not task.score(example, drawn[0].answer)
    assert ProsQA(test=str(path)).example("test", 0).completion == drawn[0].answer
    with pytest.raises(DataError, match="There is no prosqa example 1"):
        task.example("test", 1)
    with pytest.raises(ConfigError, match="leave length out"):
        task.example("test", 0, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"edges": None}, "question 0: expected question, answer, steps"),
        ({"target": 99}, "a node lies outside"),
        ({"edges": []}, "the graph leads to the wrong answer, or not to the right one"),
        ({"steps": []}, "the steps do not lead from the root to the target"),
    ],
)
def test_a_bad_file_is_named(
    change: dict[str, Any], named: str, row: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "test.json"
    path.write_text(json.dumps([row | change]))
    with pytest.raises(DataError, match=named):
        ProsQA(test=str(path)).size("test")


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        ProsQA(valid=str(tmp_path / "absent.json")).size("valid")
    path = tmp_path / "x.json"
    for text, named in (("{", "line 1: expected JSON"), ("{}", "no list of questions")):
        path.write_text(text)
        with pytest.raises(DataError, match=named):
            ProsQA(valid=str(path)).size("valid")
        path.unlink()
