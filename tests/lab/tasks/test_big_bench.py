"""BIG-Bench Hard's multi-step arithmetic on its real file where it is, and on small ones with every
mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import (
    BigBenchArithmetic,
    Example,
    MultiStepArithmetic,
    character_tokenizer,
    encode,
)

DATA = (
    Path(__file__).resolve().parents[3]
    / ".."
    / "shared"
    / "data"
    / "bbh_multistep_arithmetic_two.json"
)
ROWS = [
    {"input": "((-1 + 2 + 9 * 5) - (-2 + -4 + -4 * -7)) =", "target": "24"},
    {"input": "((3 * -3 * 6 + -5) - (-2 + -7 - 7 - -7)) =", "target": "-50"},
    {"input": "((-6 - 4 * 2 - 6) + (1 + -2 * 1 * 7)) =", "target": "-33"},
]


def write(path: Path, rows: Any = ROWS) -> str:
    path.write_text(json.dumps({"canary": "x", "examples": rows}))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "bbh.json")


def test_prompt_and_answer(file: str) -> None:
    task = BigBenchArithmetic(test=file)
    assert task.size("test") == 3
    prompt = f"Question: Evaluate this expression modulo 10.\nInput: {ROWS[0]['input']}\nAnswer:"
    assert task.example("test", 0) == Example(prompt, " 4", 8)
    assert [task.example("test", i).completion for i in range(3)] == [
        " 4",
        " 0",
        " 7",
    ]  # Python's %
    whole = BigBenchArithmetic(test=file, modulo=False)
    assert [whole.example("test", i).completion for i in range(3)] == [" 24", " -50", " -33"]
    assert "modulo" not in whole.example("test", 0).prompt
    bare = BigBenchArithmetic(test=file, template="bare").example("test", 1)
    assert bare == Example("((3*-3*6+-5)-(-2+-7-7--7))=", "0", 8)


def test_score(file: str) -> None:
    example = BigBenchArithmetic(test=file, modulo=False).example("test", 1)
    task = BigBenchArithmetic(test=file)
    assert all(task.score(example, right) for right in (" -50", "-50\nmore"))
    assert not any(task.score(example, wrong) for wrong in ("", "50", " -5", "-50 or so"))


@pytest.mark.parametrize("template", ["paper", "bare"])
def test_models_of_the_arithmetic_task_know_its_characters(file: str, template: Any) -> None:
    tokenizer = character_tokenizer(MultiStepArithmetic(template=template).characters())
    task = BigBenchArithmetic(test=file, template=template)
    assert set(task.characters()) <= set(MultiStepArithmetic(template=template).characters())
    for index in range(3):
        encode(task.example("test", index), tokenizer)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"input": "(1 + 2) ="}, "the row has no 'target', only 'input'; correct or remove it"),
        ({"input": "(1 + 2) =", "target": 3}, "'target' is 3 without quotes, but must be a text"),
        ({"input": "", "target": "3"}, "'input' is empty"),
        (
            {"input": "(one + 2) =", "target": "3"},
            r"expected numbers, \+ - \* and \(\) as 'input', found '\(one",
        ),
        (
            {"input": "(1 + 2) =", "target": "three"},
            "expected a whole number as 'target', found 'three'",
        ),
        ({"input": "(1 + 2) =", "target": ""}, "'target' is empty"),
        ("(1 + 2) = 3", "expected the texts"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"bad\.json, example 3: {found}"):
        BigBenchArithmetic(test=write(tmp_path / "bad.json", [*ROWS, row])).size("test")


def test_bad_files_and_arguments(tmp_path: Path, file: str) -> None:
    task = BigBenchArithmetic(test=file)
    for split in ("train", "valid"):
        with pytest.raises(
            ConfigError, match=f"has no {split} split; train on arithmetic and test on this"
        ):
            task.size(split)
    with pytest.raises(ConfigError, match="needs the field 'test'"):
        BigBenchArithmetic().size("test")
    with pytest.raises(ConfigError, match="leave length out"):
        task.example("test", 0, 8)
    with pytest.raises(ConfigError, match=r"template: .*got 'short'"):
        BigBenchArithmetic(template="short")  # type: ignore[arg-type]
    for index in (-1, 3):
        with pytest.raises(
            DataError, match=f"no bbh-arithmetic example {index}, as the file holds 3"
        ):
            task.example("test", index)
    with pytest.raises(DataError, match="cannot be read"):
        BigBenchArithmetic(test=str(tmp_path / "absent.json")).size("test")
    for text, expected in (
        ("{", "line 1: expected JSON"),
        ("[]", "no list 'examples'"),
        ('{"examples": []}', "no list 'examples'"),
    ):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(DataError, match=expected):
            BigBenchArithmetic(test=str(tmp_path / "odd.json")).size("test")


@pytest.mark.skipif(not DATA.exists(), reason="the benchmark's file is not here")
def test_real_file() -> None:
    whole, modulo = (
        BigBenchArithmetic(test=str(DATA), modulo=False),
        BigBenchArithmetic(test=str(DATA)),
    )
    assert whole.size("test") == 250
    for index in range(250):
        example = whole.example("test", index)
        expression = example.prompt.partition("Input: ")[2].partition(" =")[0]
        assert whole.score(example, f" {eval(expression)}")
        assert modulo.score(modulo.example("test", index), str(eval(expression) % 10))
        assert example.length == 8
