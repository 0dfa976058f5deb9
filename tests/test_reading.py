"""Reading what others wrote: every kind of malformed text is told in one sentence, with its line,
and at once."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from undertow.errors import CheckpointError, ConfigError, UndertowError
from undertow.lab.runs.log import read_log
from undertow.lab.runs.results import read_accuracies, read_loss
from undertow.lab.training import Recipe
from undertow.mapping import from_mapping, load_config
from undertow.reading import (
    NESTED,
    MalformedError,
    check_file,
    line_of,
    parse_json,
    parse_yaml,
    read_json,
    read_lines,
    read_text,
)


def told(call: Callable[..., Any], *arguments: Any) -> str:
    """What a call that must fail says, which is one line."""
    with pytest.raises((UndertowError, MalformedError)) as caught:
        found = call(*arguments)
        list(found) if hasattr(found, "__next__") else None
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Text


@pytest.mark.parametrize(
    "read", [read_text, lambda path: "".join(line for _, line in read_lines(path))]
)
def test_text_of_any_system(read: Callable[[Path], str], tmp_path: Path) -> None:
    path = tmp_path / "text"
    for data in (
        b"one\ntw\xc3\xb6\n",
        b"\xef\xbb\xbfone\ntw\xc3\xb6\n",
        b"one\r\ntw\xc3\xb6\r\n",
        b"one\rtw\xc3\xb6\r",
    ):
        path.write_bytes(data)
        assert read(path) == "one\ntwö\n"
    path.write_bytes(
        b"one\xef\xbb\xbf\n"
    )  # a mark that does not stand at the start is a character as others
    assert read(path) == "one\ufeff\n"


@pytest.mark.parametrize("read", [read_text, read_lines])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("ab".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("ab".encode("utf-16-be"), "is UTF-16 or UTF-32 text; save it as UTF-8"),
        ("ab".encode("utf-32"), "is UTF-32 text; save it as UTF-8"),
        (b"one\n\ntw\xf6\n", ", line 3: this is no UTF-8 text; save the file as UTF-8"),
        (
            b"one\n" * 30_000 + b"\xed\xa0\x80",
            ", line 30001: this is no UTF-8 text; save the file as UTF-8",
        ),
    ],
)
def test_other_encodings_are_named(
    read: Callable[[Path], Any], data: bytes, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "text"
    path.write_bytes(data)
    assert told(read, path) == f"{path}{expected if expected.startswith(',') else f' {expected}'}"


def test_what_is_no_file_is_refused_without_opening_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, loop, name = tmp_path / "pipe", tmp_path / "loop", "socket"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    monkeypatch.chdir(tmp_path)  # as names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)
    assert "is a named pipe, which is not read" in told(read_text, pipe)
    assert "is a named pipe" in told(read_lines, pipe)
    assert "is a socket" in told(read_json, Path(name))
    assert "is a device" in told(read_text, Path("/dev/zero"))
    with pytest.raises(OSError, match="symbolic links"):
        read_text(loop)
    check_file(
        tmp_path
    )  # negative control: a folder is no such thing, and opening it says what it is
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


# JSON


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000, "nested more than 50 deep"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested more than 50 deep"),
        ("[" * (NESTED + 1) + "]" * (NESTED + 1), "nested more than 50 deep"),
        ("9" * 5000, "a number of thousands of digits"),
        ('["\\ud800"]', "half of a character"),
        ('{"\\uDC00": 1}', "half of a character"),
        ("", "expected JSON, found ''"),
        ("{} x", "Extra data"),
    ],
)
def test_json_that_is_refused(text: str, expected: str) -> None:
    assert expected in told(parse_json, text)


def test_json_that_is_read() -> None:
    """Negative control of what is refused."""
    assert parse_json('["\\ud83d\\ude00", 1e400, "\\u0000"]') == ["😀", float("inf"), "\0"]
    assert parse_json("[" * NESTED + "]" * NESTED)
    assert len(parse_json(json.dumps([[1]] * 1000))) == 1000


def test_a_json_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{\n"a": 1,\n"b" 2}')
    assert told(read_json, path).startswith(f"{path}, line 3: expected JSON")


# YAML


def laughs(levels: int) -> str:
    """A list that its aliases make 9 to the power of `levels` long."""
    return (
        "["
        + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(levels))
        + "]"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a: 1\nb: {laughs(9)}", "it holds more than 10,000 values"),
        ("a: &a [*a]", "the alias *a stands inside what it stands for"),
        ("a: &a {b: *a}", "the alias *a stands inside"),
        ("[" * 5000, "nested more than 50 deep"),
        ("".join(" " * n + "a:\n" for n in range(900)), "nested more than 50 deep"),
        (
            "&a0 [x]: 1\n" + "".join(f"b{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 60)),
            "nested more than 50 deep",
        ),
        ("a: " + "x" * 600_000, "more than 524,288 characters"),
        ("a: [" + "1," * 50_000 + "]", "more than 10,000 values"),
        ("a: 010", "'010' to the base 8 or 60; write it without zeros before it"),
        ("a: 1:30", "'1:30' to the base 8 or 60; write it as one number"),
        ("a: !!bool abc", "'abc' is no bool that can be read"),
        ("a: !!timestamp abc", "'abc' is no timestamp that can be read"),
        ("a: " + "9" * 5000, "is no int that can be read"),
        ('a: "\\ud800"', "holds a character that no file can"),
        ('a: "x\\0y"', "holds a character that no file can"),
        ("a: \x07", "U+0007 does not belong in a text"),
    ],
)
def test_yaml_that_is_refused_at_once(text: str, expected: str) -> None:
    started = time.process_time()
    assert expected in told(parse_yaml, text)
    assert time.process_time() - started < 2


def test_the_line_of_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_yaml("a: 1\nb:\n  - x\n  - 010\n")
    assert caught.value.line == 4
    with pytest.raises(MalformedError) as caught:
        parse_yaml("a: 1\nb: \x07\n")
    assert caught.value.line == 2


def test_yaml_that_is_read() -> None:
    """Negative control of what is refused."""
    assert parse_yaml(laughs(3)) == [["x"] * 9, [["x"] * 9] * 9, [[["x"] * 9] * 9] * 9]
    assert parse_yaml("[0, -7, 1_000, 0x1F, 0.5, 00x, 'a: 010', \"1:30\"]") == [
        0,
        -7,
        1000,
        31,
        0.5,
        "00x",
        "a: 010",
        "1:30",
    ]
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


def test_lines_of_keys() -> None:
    text = "name: x\ntraining:\n  steps: 3\n  rates:\n    - 1\n    - 2\n"
    for key, line in {
        "name": 1,
        "training.steps": 3,
        "training.rates[1]": 6,
        "training.stepz": 2,
        "nothing": None,
    }.items():
        assert line_of(text, key) == line


# Recipes


def test_a_wrong_setting_is_told_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    lines = [
        "name: x",
        "task: parity",
        "training:",
        "  batch: 3",
        "  steps: many",
        "evaluation:",
        "  batch: 0",
    ]
    path.write_text("\n".join(lines[:5]))
    assert (
        told(load_config, Recipe, path)
        == f"{path}, line 5: training.steps: expected whole number, got 'many'"
    )
    path.write_text("\n".join(lines[:4] + lines[5:]))
    assert (
        told(load_config, Recipe, path) == f"{path}, line 6: evaluation: batch is 0; use 1 or more"
    )
    path.write_text("\n".join([*lines[:3], "  stepz: 3"]))
    assert told(load_config, Recipe, path).startswith(f"{path}, line 4: unknown key training.stepz")
    path.write_text("\n".join(lines[:4]))
    # What the command line says does not stand in the file.
    assert told(load_config, Recipe, path, ["--training.steps=many"]).startswith(
        "training.steps: expected whole number"
    )
    assert load_config(Recipe, path, ["--training.steps=4"]).training.steps == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"training": {"learning_rate": float("inf")}},
            "training.learning_rate: expected number, got inf",
        ),
        (
            {"training": {"learning_rate": "1e999"}},
            "training.learning_rate: expected number, got '1e999'",
        ),
        ({"training": {"warmup_steps": 2**63}}, "does not fit into 64 bits"),
        ({"training": {"steps": 10**5000}}, "a number of thousands of digits does not fit"),
        ({"training": {"threads": 2**31}}, "threads is 2147483648; use 1,024 or less"),
        ({"training": {"batch": 2**31}}, "batch is 2147483648; use 1,048,576 or less"),
        ({"model": {"layers": 10**9}}, "layers is 1000000000; use 10,000 or less"),
        (
            {"model": {"settings": {"x": [10**30]}}},
            "model.settings.x[0]: 1000000000000000000000000000000 does not fit",
        ),
        ({"model": {"settings": {"x": "\ud800"}}}, "holds a character that no file can"),
        (
            {"evaluation": {"lengths": [10**30]}},
            "evaluation.lengths[0]: 1000000000000000000000000000000 does not fit",
        ),
        (
            {"task": {"kind": "parity", "max_length": 10**6}},
            "task: max_length is 1000000; use 100,000 or less",
        ),
        ({"output": "a\0b"}, "holds a character that no file can"),
        ({"output": " "}, "output is empty"),
        ({"seeds": [1, 1]}, "seeds holds 1 twice"),
        ({"seeds": [2**32]}, "seeds holds 4294967296; use 4,294,967,295 or less"),
        *(
            ({"name": name}, "it names a folder in output")
            for name in ("", ".", "..", "/x", "a/b", "a\\b", "a\nb", " x", "\u202e")
        ),
        ({"name": "é" * 101}, "name has 202 bytes, and names a folder; use 200 or fewer"),
    ],
)
def test_recipes_that_are_refused(changes: dict[str, Any], expected: str) -> None:
    output = changes.pop("output", "runs")
    assert expected in told(
        from_mapping, Recipe, tiny.settings(Path("runs"), **changes) | {"output": output}
    )


def test_names_that_are_fine() -> None:
    """Negative control of names that are refused."""
    for name in ("x", "a b", "é" * 100, "1e3", "a..b", "x.y_z-1"):
        assert tiny.recipe(Path("runs"), name=name).name == name


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
)
KEYS = [
    (name, key)
    for name, section in tiny.TINY.items()
    if isinstance(section, dict)
    for key in section
]


@hypothesis.settings(
    deadline=None, max_examples=150, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
@given(st.sampled_from(KEYS), junk)
def test_any_value_is_taken_or_refused(where: tuple[str, str], value: Any) -> None:
    settings = tiny.settings(Path("runs"))
    settings[where[0]] = settings[where[0]] | {where[1]: value}
    try:
        from_mapping(Recipe, settings)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 600


ALPHABET = st.sampled_from(
    [
        "a",
        ":",
        " ",
        "\n",
        "-",
        "[",
        "]",
        "{",
        "}",
        ",",
        "&a",
        "*a",
        "!!",
        "'",
        '"',
        "\\",
        "|",
        "#",
        "1",
        "\t",
        "?",
        "<<",
        "%",
        "~",
    ]
)


@hypothesis.settings(deadline=None, max_examples=300)
@given(st.lists(ALPHABET, max_size=40).map("".join) | st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        try:
            parse(text)
        except MalformedError as error:
            assert "\n" not in str(error)


def test_any_bytes_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes"

    @hypothesis.settings(deadline=None, max_examples=100)
    @given(st.binary(max_size=60))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        for read in (
            read_text,
            read_json,
            lambda one: list(read_lines(one)),
            lambda one: load_config(Recipe, one),
        ):
            try:
                read(path)
            except UndertowError as error:
                assert str(path) in str(error)

    check()


# What runs leave behind


@pytest.mark.parametrize(
    "line", ["5", "null", "{}", '{"step": "3"}', '{"step": 1, "eval_loss": null}', "{", "[" * 5000]
)
def test_a_damaged_line_of_a_log(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    good = '{"step": 1, "loss": 2.0}\n{"event": "end"}\n'
    path.write_text(good + line + "\n" + good)
    with pytest.raises(CheckpointError, match=r"log\.jsonl, line 3: .*; remove the line"):
        read_log(path)
    path.write_text(good + line)
    if line.startswith("{"):  # as one of ours that was cut short by a kill
        assert [entry.get("step") for entry in read_log(path)] == [1, None]
    else:
        assert "line 3" in told(read_log, path)
    path.write_text(good + good)
    assert len(read_log(path)) == 4
    assert read_log(tmp_path / "none") == []


RESULT = {
    "length": 8,
    "temperature": 0.0,
    "correct": 1,
    "total": 2,
    "right_symbols": None,
    "symbols": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {"total": 0},
        {"correct": 3},
        {"correct": "1"},
        {"length": None, "x": 1},
        {"total": None},
        {"temperature": []},
    ],
)
def test_damaged_accuracies(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "accuracy.json"
    path.write_text(json.dumps([RESULT]))
    assert read_accuracies(path)[0].share == 0.5
    path.write_text(json.dumps([RESULT | change]))
    with pytest.raises(CheckpointError, match="run `undertow eval` again"):
        read_accuracies(path)


@pytest.mark.parametrize("text", ["5", "null", "[]", '{"loss": "x"}', "{", "[" * 5000])
def test_damaged_results(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    for read in (read_accuracies, read_loss):
        if not (text == "[]" and read is read_accuracies):
            with pytest.raises(CheckpointError, match=r"results\.json"):
                read(path)
    path.write_text('{"loss": 1.5}')
    assert read_loss(path) == 1.5


def test_a_key_of_a_row_is_given_once(tmp_path: Path) -> None:
    assert told(parse_json, '{"a": {"b": 1, "c": 2, "b": 3}}') == "the key 'b' is given twice"
    assert parse_json('[{"a": 1}, {"a": {"a": 2}}]') == [{"a": 1}, {"a": {"a": 2}}], "the control"
    path = tmp_path / "config.json"
    path.write_text('{"a": 1, "a": 2}')
    assert read_json(path) == {"a": 2}, "as other programs read theirs"


@pytest.mark.parametrize("code", [r"\UFFFFFFFF", r"\U00110000"])
def test_a_code_of_no_character_is_told_with_its_line(code: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f'name: x\nlabel: "{code}"\n')
    assert told(load_config, Recipe, path).startswith(f"{path}, line 2: a code after")
    assert parse_yaml(r'"\U0001F4A5"') == "\U0001f4a5", "the control"
