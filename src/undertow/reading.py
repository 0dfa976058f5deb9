"""Reading what others wrote, whatever it is: text, JSON, JSON lines and YAML. Every mistake is told
with its file and line.

What cannot be opened at all raises the system's own `OSError`; what is opened and wrong raises the
error that the caller names. Nothing here waits for what never comes, builds what does not fit into
memory, or recurses without end.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from undertow.errors import DataError, UndertowError

YAML_BYTES = 512 * 1024
"""The largest YAML file: a recipe takes a few thousand bytes, and PyYAML reads a megabyte in some
ten seconds."""
YAML_VALUES = 10_000
"""The most values of a YAML text, each alias counted with all that it stands for."""
NESTED = 50
"""How deep lists and objects may stand inside each other, in YAML and in JSON."""

_KINDS = {
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
_MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
# What YAML 1.1 would read as a number to another base: 010 as 8, and 1:30 as 90.
_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


class MalformedError(ValueError):
    """What is wrong with a text, and the line, counted from 1, if it is known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def check_file(path: Path, error: type[UndertowError] = DataError) -> None:
    """Refuse what is neither a file nor a folder: opening a pipe would wait, and a device may have
    no end.

    Raises:
        OSError: there is nothing of this name, or it may not be looked at.
    """
    mode = path.stat().st_mode
    for is_kind, name in _KINDS.items():
        if is_kind(mode):
            raise error(
                f"{path} is {name}, which is not read; save what comes from it in a file, and give "
                "that"
            )


def read_text(path: Path, error: type[UndertowError] = DataError) -> str:
    """The text of a file in UTF-8, with or without a byte order mark, and with line ends of any
    system.

    Raises:
        error: it is no regular file, or no UTF-8, told with the line.
        OSError: it cannot be opened.
    """
    check_file(path, error)
    data = path.read_bytes()
    _check_encoding(path, data[:4], error)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise _no_utf8(path, data.count(b"\n", 0, problem.start) + 1, error) from problem
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_lines(path: Path, error: type[UndertowError] = DataError) -> Iterator[tuple[int, str]]:
    """The lines of a file as `read_text` reads it, one after the other, with their numbers from 1.

    Raises:
        error, OSError: as `read_text`.
    """
    check_file(path, error)
    with path.open("rb") as file:
        _check_encoding(path, file.read(4), error)
    number = 0
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for line in lines:
                number += 1
                yield number, line
        except (
            UnicodeDecodeError
        ) as problem:  # of a block that is read ahead, which may lie far behind the last line
            with path.open("rb") as raw:
                wrong = next(
                    (n for n, line in enumerate(raw, start=1) if not _is_utf8(line)), number + 1
                )
            raise _no_utf8(path, wrong, error) from problem


def parse_json(text: str, repeated: bool = False) -> Any:
    """What a JSON text holds. A key may be given twice in an object, of which the last counts, if
    it may be `repeated`.

    Raises:
        MalformedError: it is no JSON, is nested too deep, or holds a number or a character that
            nothing here can use.
    """
    try:
        value = json.loads(text, object_pairs_hook=None if repeated else _each_once)
    except MalformedError:
        raise
    except json.JSONDecodeError as problem:
        raise MalformedError(
            f"expected JSON, found {shown(text)} ({problem.msg})", problem.lineno
        ) from problem
    except RecursionError:
        raise MalformedError(f"it is nested more than {NESTED} deep") from None
    except ValueError as problem:  # Python makes no whole number of more than 4,300 digits
        raise MalformedError("it holds a number of thousands of digits") from problem
    if "\\ud" in text or "\\uD" in text or text.count("[") + text.count("{") > NESTED:
        _check_values(value)
    return value


def read_json(
    path: Path, error: type[UndertowError] = DataError, mend: str = "correct the file"
) -> Any:
    """What a JSON file holds.

    Raises:
        error: it is no JSON in UTF-8; the message ends with `mend`.
        OSError: it cannot be opened.
    """
    text = read_text(path, error)
    try:
        return parse_json(text, repeated=True)  # as programs that wrote it would read it
    except MalformedError as problem:
        raise error(f"{path}{_at(problem.line)}: {problem}; {mend}") from problem


def parse_yaml(text: str) -> Any:
    """What a YAML text holds, read by YAML's safe rules and some more.

    Refused besides are: a key given twice, of which YAML would keep the last; numbers to the base 8
    or 60, which look like others; aliases that stand for more than `YAML_VALUES` values or for
    themselves; what is nested too deep; and characters that no file name or UTF-8 text can hold.

    Raises:
        MalformedError: the text breaks a rule.
    """
    if len(text) > YAML_BYTES:
        raise MalformedError(f"it has more than {YAML_BYTES:,} characters, too many for settings")
    loader = None
    try:
        loader = _StrictLoader(text)
        return loader.get_single_data()
    except (ValueError, OverflowError) as problem:  # of an escape such as \UFFFFFFFF
        line = 1 if loader is None else loader.line + 1
        raise MalformedError("a code after \\U in quotes is of no character", line) from problem
    except yaml.reader.ReaderError as problem:
        line = text.count("\n", 0, int(problem.position)) + 1
        raise MalformedError(
            f"the character U+{int(problem.character):04X} does not belong in a text", line
        ) from None
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        told = " ".join(str(problem.problem or problem).split())
        raise MalformedError(told, None if mark is None else mark.line + 1) from None
    except yaml.YAMLError as problem:
        raise MalformedError(" ".join(str(problem).split())) from None


def read_yaml(path: Path, error: type[UndertowError]) -> Any:
    """What a YAML file holds; see `parse_yaml`.

    Raises:
        error: it is no YAML in UTF-8.
        OSError: it cannot be opened.
    """
    if path.stat().st_size > YAML_BYTES:
        raise error(
            f"{path} has more than {YAML_BYTES:,} bytes, too many for a file of settings; give a "
            "recipe or a study"
        )
    text = read_text(path, error)
    try:
        return parse_yaml(text)
    except MalformedError as problem:
        raise error(f"{path}{_at(problem.line)}: {problem}") from problem


def line_of(text: str, key: str) -> int | None:
    """The line of a YAML text, counted from 1, in which a dotted key stands, or else the innermost
    section that it is in."""
    try:
        node = yaml.compose(text, _StrictLoader)
    except yaml.YAMLError:
        return None
    line = None
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((name, value) for name, value in pairs if str(name.value) == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def expanded(path: str) -> Path:
    """A path with `~` replaced by the home folder.

    Raises:
        DataError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path!r} names the home folder of a user that there is not; write the path in full"
        ) from error


def is_text(value: str) -> bool:
    """Whether a text can be written as UTF-8 and stand in a file's name: it holds no lone surrogate
    and no NUL."""
    return "\0" not in value and (
        value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    )


def shown(value: object, most: int = 80) -> str:
    """A text, or what another value looks like, in quotes and cut to a length that a message can
    bear."""
    text = value.strip() if isinstance(value, str) else str(value)
    return repr(text if len(text) <= most else text[:most] + "...")


class _StrictLoader(yaml.SafeLoader):
    """The safe loader with the rules of `parse_yaml`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.extents: dict[
            int, tuple[int, int]
        ] = {}  # of each node that is complete: its values and its levels

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        self.depth += 1
        if self.depth > NESTED:
            raise _problem(f"it is nested more than {NESTED} deep", event)
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if is_alias and id(node) not in self.extents:
            raise _problem(f"the alias *{event.anchor} stands inside what it stands for", event)
        if not is_alias:
            inside = [self.extents[id(child)] for child in _children(node)]
            values = 1 + sum(count for count, _ in inside)
            self.extents[id(node)] = values, 1 + max((levels for _, levels in inside), default=0)
        values, levels = self.extents[id(node)]
        if values > YAML_VALUES or len(self.extents) > YAML_VALUES:
            raise _problem(
                f"it holds more than {YAML_VALUES:,} values, too many for settings", event
            )
        if self.depth + levels > NESTED:
            raise _problem(f"it is nested more than {NESTED} deep", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _problem(f"the key {shown(key.value)} is given twice", key)
                seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode):
            if not is_text(node.value):
                raise _problem(f"{shown(node.value)} holds a character that no file can", node)
            if node.tag.endswith((":int", ":float")) and _OTHER_BASE.fullmatch(node.value):
                wish = (
                    "without zeros before it"
                    if node.value.lstrip("+-").startswith("0")
                    else "as one number"
                )
                raise _problem(
                    f"YAML reads {shown(node.value)} to the base 8 or 60; write it {wish}, or in "
                    "quotes",
                    node,
                )
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (
            ValueError,
            ArithmeticError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # such as !!int of a word
            tag = node.tag.rpartition(":")[2]
            raise _problem(f"{shown(node.value)} is no {tag} that can be read", node) from error


def _problem(problem: str, at: Any) -> yaml.composer.ComposerError:
    return yaml.composer.ComposerError(None, None, problem, at.start_mark)


def _children(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedError(f"the key {shown(again)} is given twice")
    return held


def _check_values(value: Any) -> None:
    """Look through what JSON gave, without recursion: its depth, and its texts."""
    waiting = [(value, 1)]
    while waiting:
        one, depth = waiting.pop()
        if depth > NESTED:
            raise MalformedError(f"it is nested more than {NESTED} deep")
        if isinstance(one, str) and not one.isascii() and not is_text(one.replace("\0", "")):
            raise MalformedError(
                f"{shown(one)} holds half of a character (a lone surrogate), which no UTF-8 text "
                "can"
            )
        if isinstance(one, dict):
            waiting += [(each, depth + 1) for pair in one.items() for each in pair]
        elif isinstance(one, list):
            waiting += [(each, depth + 1) for each in one]


def _check_encoding(path: Path, head: bytes, error: type[UndertowError]) -> None:
    name = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
    if name is None and len(head) == 4 and head.count(0) >= 2:
        name = "UTF-16 or UTF-32" if any(head) else None
    if name is not None:
        raise error(f"{path} is {name} text; save it as UTF-8")


def _no_utf8(path: Path, line: int, error: type[UndertowError]) -> UndertowError:
    return error(f"{path}, line {line}: this is no UTF-8 text; save the file as UTF-8")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _at(line: int | None) -> str:
    return "" if line is None else f", line {line}"


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether there is a pipe, a socket or a device of this name."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return any(is_kind(mode) for is_kind in _KINDS)
