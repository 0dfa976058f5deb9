"""Settings from plain data, as YAML and the command line give it, and back.

A section's key `kind` says which class it is, where there are several, as `kind: ClassVar[str]` of
each tells; `task: addition` is short for `task: {kind: addition}`, and `none` for null. A class may
name classmethods in `alternatives: ClassVar[tuple[str, ...]]`: a section that holds such a name
calls it with the value, and with the section's other keys as keyword arguments. A classmethod
`prepare` is given a section's plain data before any of it is read. Keys that are left out take the
class's defaults. Every mistake is a :class:`~undertow.errors.ConfigError` that names
the dotted key; :func:`load_config` adds the file and the line.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import yaml

from undertow.annotations import (
    AsText,
    alternatives_of,
    arguments_of,
    field_types,
    is_section,
    items_of,
    members_of,
)
from undertow.errors import ConfigError, join, nearest, shown
from undertow.files import write_text
from undertow.plugins import load_installed
from undertow.reading import MalformedError, line_of, parse_yaml, read_text, read_yaml
from undertow.registry import is_family, kind_of, sections_of, type_name
from undertow.sentences import expected, placed, unknown_key

T = TypeVar("T")


def load_config(cls: type[T], path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> T:
    """Build settings from a YAML file, with `--section.key=value` overrides applied.

    Raises:
        ConfigError: the file or an override is malformed, or a setting is wrong, told with file and
            line if it stands there.
    """
    mapping = load_yaml(path)
    try:
        return from_mapping(cls, apply_overrides(mapping, overrides))
    except ConfigError as error:
        given = [argument.removeprefix("--").partition("=")[0] for argument in overrides]
        if any(f"{error.key}.".startswith(f"{name}.") for name in given):
            raise  # it is the command line's
        line = line_of(read_text(Path(path), ConfigError), error.key)
        raise ConfigError(
            f"{path}{'' if line is None else f', line {line}'}: {error}", error.key
        ) from error


def from_mapping(cls: type[T], mapping: object, where: str = "") -> T:
    """Build settings from plain data: of a class, or of any class of a family, by its `kind`.

    `where` is the dotted key of the section, put before the keys that messages name.
    """
    if is_family(cls):
        return typing.cast(T, _section(cls, mapping, where))
    if not isinstance(mapping, Mapping):
        raise expected(where, "a mapping of keys to values", mapping)
    if (prepare := getattr(cls, "prepare", None)) is not None:
        prepare(mapping)
    kind, values = kind_of(cls), {str(key): value for key, value in mapping.items()}
    if kind is not None and values.pop("kind", kind) != kind:
        raise expected(join(where, "kind"), repr(kind), mapping["kind"])
    chosen = [name for name in alternatives_of(cls) if name in values]
    if len(chosen) > 1:
        raise ConfigError(f"{where and f'{where}: '}give only one of {', '.join(chosen)}", where)
    hints: dict[str, Any] = field_types(cls)
    call: Any = getattr(cls, chosen[0]) if chosen else cls
    positional: Sequence[Any] = ()
    elsewhere: dict[str, str] = {}
    if chosen:
        given, at = values.pop(chosen[0]), join(where, chosen[0])
        names = arguments_of(call)
        elsewhere = {name: join(at, name) for name in names if name not in values}
        if isinstance(given, Mapping):
            if twice := sorted(given.keys() & values.keys()):
                raise ConfigError(f"{at}: {', '.join(twice)} given twice; give it once", at)
            values |= {str(key): value for key, value in given.items()}
            elsewhere |= {str(key): join(at, key) for key in given}
            if strange := [key for key in given if key not in {*names, *hints}]:
                raise unknown_key(join(at, strange[0]), strange[0], [*names, *hints])
        else:
            positional = given if isinstance(given, list | tuple) else [given]
            elsewhere |= dict.fromkeys(names[: len(positional)], at)
    made = {
        name: _built(hints[name], value, join(where, name)) if name in hints else value
        for name, value in values.items()
    }
    with placed(where, elsewhere):
        return typing.cast(T, call(*positional, **made))


def to_mapping(config: object) -> dict[str, Any]:
    """Plain data that :func:`from_mapping` reads back to an equal object."""
    kind = kind_of(type(config))
    tag = {} if kind is None else {"kind": kind}
    return tag | {name: _plain(getattr(config, name)) for name in field_types(type(config))}


def _plain(value: Any) -> Any:
    if isinstance(value, AsText):
        return value.to_text()
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _built(hint: Any, value: Any, where: str) -> Any:
    """The value with its sections made into settings; all else is left to these to check."""
    if any(map(is_section, members_of(hint))):
        return _section(hint, value, where)
    item = next(iter(items_of(hint)), None)  # sections stand in lists of any length only
    if isinstance(value, list) and any(map(is_section, members_of(item))):
        return tuple(_built(item, each, f"{where}[{i}]") for i, each in enumerate(value))
    return value


def _section(hint: Any, value: Any, where: str) -> Any:
    members, sections = members_of(hint), sections_of(hint)
    optional = NoneType in members
    kinds = {kind: section for section in sections if (kind := kind_of(section))}
    if (value is None and optional) or (value == "none" and optional and "none" not in kinds):
        return None
    if kinds and isinstance(value, str):
        value = {"kind": value}
    elif value is None:  # a section whose keys are all commented out
        value = {}
    if not isinstance(value, Mapping):
        raise expected(where, type_name(hint), value)
    if not kinds:
        return from_mapping(sections[0], value, where)

    is_open = any(is_family(member) for member in members)
    known = ", ".join([*kinds, "none"] if optional and "none" not in kinds else kinds)
    if "kind" not in value and (len(kinds) > 1 or is_open):
        key = join(where, "kind")
        raise ConfigError(f"{key}: missing; expected one of {known}", key)
    kind = value.get("kind", next(iter(kinds)))
    if isinstance(kind, str) and kind in kinds:
        return from_mapping(kinds[kind], value, where)
    if not optional or kind not in (None, "none"):
        if is_open and load_installed():
            return _section(hint, value, where)
        mend = nearest(kind, kinds)
        if is_open:
            mend += " (one of your own must be imported first, as by plugins: [my_module])"
        raise expected(join(where, "kind"), f"one of {known}", kind, mend)
    if others := [str(key) for key in value if key != "kind"]:
        raise ConfigError(f"{where}: kind none takes no other keys, got {', '.join(others)}", where)
    return None


# --- files and the command line


def load_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping."""
    try:
        data = read_yaml(Path(path), ConfigError)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the path of a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}, line 1: {expected('', 'a mapping of keys to values', data)}")
    return data


def save_yaml(config: object, path: str | os.PathLike[str]) -> None:
    """Write settings as YAML, so that a reader finds the old file or the whole new one."""
    # Escaped to ASCII: PyYAML does not read every other character back as it wrote it.
    write_text(Path(path), yaml.safe_dump(to_mapping(config), sort_keys=False, width=100))


def apply_overrides(mapping: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the mapping with command-line arguments ``--section.key=value`` applied.

    Values are YAML. Whole sections are set before the keys within them, and a section's kind before
    its other keys, so that the order on the command line matters only where one key is given twice.
    """
    overrides = [_parse_override(arguments, index) for index in range(len(arguments))]
    result = copy.deepcopy(dict(mapping))
    for keys, value in sorted(
        overrides, key=lambda override: (len(override[0]), override[0][-1] != "kind")
    ):
        section = result
        for depth, key in enumerate(keys[:-1], start=1):
            inner = section.get(key)
            if inner is None:
                inner = {}
            elif isinstance(inner, str):
                inner = {"kind": inner}
            elif not isinstance(inner, dict):
                raise ConfigError(
                    f"--{'.'.join(keys)}: {'.'.join(keys[:depth])} is {shown(inner)}, which has "
                    "no keys"
                )
            section[key] = inner
            section = inner
        if len(keys) > 1 and keys[-1] == "kind" and section.get("kind", value) != value:
            section.clear()  # another kind has other keys
        section[keys[-1]] = value
    return result


def _parse_override(arguments: Sequence[str], index: int) -> tuple[list[str], Any]:
    argument = arguments[index]
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not all(name.split(".")):
        raise ConfigError(f"{shown(argument)} is not a setting; write it as --section.key=value")
    if not equals:
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        value = "value" if following.startswith("--") else following
        raise ConfigError(
            f"{shown(argument)} has no value; write --{join('', name)}={join('', value)}"
        )
    try:
        return name.split("."), parse_yaml(text)
    except MalformedError as error:
        line = "" if error.line is None else f", line {error.line}"
        raise ConfigError(
            f"{shown(argument)} does not hold a YAML value{line}: {error}; put text in quotes"
        ) from None
