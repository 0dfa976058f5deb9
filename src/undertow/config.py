"""Configuration as frozen dataclasses, read from YAML and the command line.

A configuration class needs no registration: its annotations say what each key may hold, and its
field documentation becomes the help text (see :mod:`undertow.config_help`). Three names add to
that:

* ``kind: ClassVar[str]`` tags a class, so that a field of type ``A | B | None`` is read from a
  section whose key ``kind`` says which. ``task: addition`` is short for ``task: {kind: addition}``,
  and ``none`` for null.
* ``prepare``, a classmethod, is given a section's plain data before any of it is read.
* ``alternatives: ClassVar[tuple[str, ...]]`` names classmethods that build the object. A section
  that holds such a name as a key calls it with the value, and with the section's other keys as
  keyword arguments.

Keys left out of a section take the defaults of the section's class. Every mistake is a
:class:`~undertow.errors.ConfigError` that names the dotted key; :func:`load_config` adds the file
and the line.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

import yaml

from undertow.config_help import (
    WIDTH,
    alternatives_of,
    describe,
    field_types,
    item_types,
    kind_of,
    sections_of,
    type_name,
    union_members,
)
from undertow.errors import ConfigError, nearest
from undertow.files import write_text
from undertow.plugins import load_installed
from undertow.reading import MalformedError, is_text, line_of, parse_yaml, read_text, read_yaml
from undertow.registry import is_family
from undertow.settings import AsText, is_as_text

__all__ = [
    "apply_overrides",
    "convert",
    "describe",
    "from_mapping",
    "load_config",
    "load_yaml",
    "save_yaml",
    "to_mapping",
]

T = TypeVar("T")

# YAML 1.1 reads numbers such as 1e-3, which lack the dot or the exponent's sign, as text.
_EXPONENT_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", re.ASCII)
_LARGEST = 2**63  # whole numbers go on to libraries that hold them in 64 bits


def load_config(cls: type[T], path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> T:
    """Build a configuration object from a YAML file, with `--section.key=value` overrides applied.

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
    """Build a configuration object from plain data, as YAML gives it.

    ``where`` is the dotted key of the section, put before the keys that error messages name.
    """
    if not isinstance(mapping, Mapping):
        raise _error(where, f"expected a mapping of keys to values, got {_shown(mapping)}")
    if (prepare := getattr(cls, "prepare", None)) is not None:
        prepare(mapping)
    types, kind, alternatives = field_types(cls), kind_of(cls), alternatives_of(cls)
    values = dict(mapping)
    if kind is not None and values.pop("kind", kind) != kind:
        raise _error(_join(where, "kind"), f"expected {kind!r}, got {_shown(mapping['kind'])}")

    chosen = [name for name in alternatives if name in values]
    if len(chosen) > 1:
        raise _error(where, f"give only one of {_listed(chosen)}")
    if chosen:
        return typing.cast(T, _call_alternative(cls, chosen[0], values, where))

    _refuse_unknown(values, [*types, *alternatives], where)
    arguments = {
        name: convert(types[name], value, _join(where, name)) for name, value in values.items()
    }
    missing = [
        _join(where, field.name)
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]  # any class made by dataclass()
        if field.init
        and field.name not in arguments
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing {_listed(missing)}, which must be given", where)
    return typing.cast(T, _call(cls, where, (), arguments))


def to_mapping(config: object) -> dict[str, Any]:
    """Return plain data that :func:`from_mapping` reads back to an equal object."""
    kind = kind_of(type(config))
    tag = {} if kind is None else {"kind": kind}
    return tag | {name: _plain(getattr(config, name)) for name in field_types(type(config))}


def convert(hint: Any, value: Any, where: str = "") -> Any:
    """Return a plain value as the annotated type (a union of kinds, say), or raise ConfigError."""
    members = union_members(hint)
    others = [member for member in members if member is not NoneType]
    items = item_types(hint)
    if value is None and NoneType in members:
        return value
    if hint is Any:
        _check_any(value, where)
        return value
    if isinstance(value, str) and (written := [each for each in others if is_as_text(each)]):
        return _call(written[0].from_text, where, (value,), {})
    if sections_of(hint):
        return _convert_section(hint, value, where)
    if len(members) > len(others) == 1 and (
        item_types(others[0]) or typing.get_origin(others[0]) is dict
    ):
        return convert(others[0], value, where)  # its message names the item that is wrong
    if len(members) > 1:
        # The value's own type first: a text field stays text, even beside a number that would take
        # it.
        for member in sorted(members, key=lambda member: type(value) is not member):
            try:
                return convert(member, value, where)
            except ConfigError:
                continue
    elif typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
    elif items:
        if isinstance(value, list | tuple):
            return _convert_items(hint, value, where)
    elif typing.get_origin(hint) is dict:
        key_type, value_type = typing.get_args(hint)
        if isinstance(value, Mapping):
            return {
                convert(key_type, key, where): convert(value_type, item, _join(where, key))
                for key, item in value.items()
            }
    elif hint is float:
        number = _as_float(value)
        if number is not None:
            return number
    elif type(value) is hint:  # not isinstance: a bool is no whole number here
        _check_any(value, where)
        return value
    raise _wrong_type(hint, value, where)


def _check_any(value: Any, where: str) -> None:
    """Refuse numbers and texts that cannot be kept or handed on, in what any plain value holds."""
    if isinstance(value, int) and not isinstance(value, bool) and not -_LARGEST <= value < _LARGEST:
        raise _error(where, f"{_shown(value)} does not fit into 64 bits; use a smaller number")
    if isinstance(value, str) and not is_text(value):
        raise _error(where, f"{_shown(value)} holds a character that no file can; leave it out")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_any(key, where)
            _check_any(item, _join(where, key))
    elif isinstance(value, list | tuple | set):
        for index, item in enumerate(value):
            _check_any(item, f"{where}[{index}]")


def _convert_section(hint: Any, value: Any, where: str) -> Any:
    sections, members = sections_of(hint), union_members(hint)
    optional = NoneType in members
    kinds = {kind: section for section in sections if (kind := kind_of(section))}
    if len(sections) + optional < len(members) or len(sections) > max(len(kinds), 1):
        raise TypeError(f"{where}: {hint!r} is not a union of dataclasses with a kind each")
    if optional and value == "none" and "none" not in kinds:
        return None
    if kinds and isinstance(value, str):
        value = {"kind": value}
    elif value is None:  # a section whose keys are all commented out
        value = {}
    if not isinstance(value, Mapping):
        raise _wrong_type(hint, value, where)
    if not kinds:
        return from_mapping(sections[0], value, where)

    expected = _listed([*kinds, "none"] if optional and "none" not in kinds else kinds)
    if "kind" not in value and len(kinds) > 1:
        raise _error(_join(where, "kind"), f"missing; expected one of {expected}")
    kind = value.get("kind", next(iter(kinds)))
    if isinstance(kind, str) and kind in kinds:
        return from_mapping(kinds[kind], value, where)
    if not optional or kind not in (None, "none"):
        has_family = any(is_family(member) for member in members)
        if has_family and load_installed():
            return _convert_section(hint, value, where)
        mend = nearest(kind, kinds)
        if has_family:
            mend += " (one of your own must be imported first, as by plugins: [my_module])"
        raise _error(_join(where, "kind"), f"expected one of {expected}, got {_shown(kind)}{mend}")
    others = [key for key in value if key != "kind"]
    if others:
        raise _error(where, f"kind none takes no other keys, got {_listed(others)}")
    return None


def _convert_items(hint: Any, value: Sequence[Any], where: str) -> tuple[Any, ...]:
    hints = item_types(hint)
    if hints[-1] is ...:
        hints = hints[:1] * len(value)
    if len(hints) != len(value):
        raise _wrong_type(hint, value, where)
    pairs = zip(hints, value, strict=True)
    return tuple(
        convert(item_hint, item, f"{where}[{i}]") for i, (item_hint, item) in enumerate(pairs)
    )


def _as_float(value: Any) -> float | None:
    if isinstance(value, str) and not _EXPONENT_NUMBER.fullmatch(value):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def _call_alternative(cls: type, name: str, mapping: Mapping[str, Any], where: str) -> Any:
    """Call the classmethod ``name`` with its value, and with the section's other keys as
    keywords."""
    constructor, at, given = getattr(cls, name), _join(where, name), mapping[name]
    keywords = dict(given) if isinstance(given, Mapping) else {}
    positional = (
        [] if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else [given]
    )
    others = {key: value for key, value in mapping.items() if key != name}
    twice = [key for key in keywords if key in others]
    if twice:
        raise _error(at, f"{_listed(twice)} given twice")

    signature, hints = inspect.signature(constructor), typing.get_type_hints(constructor)
    types: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        # A constructor that passes any keywords on takes the fields of the class too.
        is_rest = parameter.kind is parameter.VAR_KEYWORD
        taken = field_types(cls) if is_rest else {parameter.name: hints.get(parameter.name, Any)}
        types |= {key: hint for key, hint in taken.items() if key not in types}
    _refuse_unknown(keywords, types, at)
    _refuse_unknown(others, types, where)
    try:
        signature.bind(*positional, **keywords, **others)
    except TypeError as error:
        raise _error(at, str(error)) from None

    positional = [
        convert(hint, value, at) for hint, value in zip(types.values(), positional, strict=False)
    ]
    keywords = {key: convert(types[key], value, _join(at, key)) for key, value in keywords.items()}
    others = {key: convert(types[key], value, _join(where, key)) for key, value in others.items()}
    try:
        return _call(constructor, where, positional, keywords | others)
    except TypeError as error:
        if "multiple values for" not in str(error):
            raise
        # It passes any keywords on, this one beside a value of its own.
        raise _error(at, f"already sets {str(error).split()[-1]}") from error


def _call(
    constructor: Any, where: str, positional: Iterable[Any], keywords: Mapping[str, Any]
) -> Any:
    """Call a constructor, putting the section's key before what it finds wrong."""
    try:
        return constructor(*positional, **keywords)
    except ConfigError as error:
        first = str(error).partition(" ")[0]
        key = _join(where, first) if first in keywords else where
        raise ConfigError(f"{where}: {error}" if where else str(error), key) from error


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
        raise ConfigError(
            f"{path}, line 1: expected a mapping of keys to values, got {_shown(data)}"
        )
    return data


def save_yaml(config: object, path: str | os.PathLike[str]) -> None:
    """Write a configuration object as YAML, so that a reader finds the old file or the whole new
    one."""
    # Escaped to ASCII: PyYAML does not read every other character back as it wrote it.
    write_text(Path(path), yaml.safe_dump(to_mapping(config), sort_keys=False, width=WIDTH))


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
                    f"--{'.'.join(keys)}: {'.'.join(keys[:depth])} is {_shown(inner)}, which has "
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
        raise ConfigError(f"{_shown(argument)} is not a setting; write it as --section.key=value")
    if not equals:
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        value = "value" if following.startswith("--") else following
        raise ConfigError(f"{_shown(argument)} has no value; write --{_cut(name)}={_cut(value)}")
    try:
        return name.split("."), parse_yaml(text)
    except MalformedError as error:
        line = "" if error.line is None else f", line {error.line}"
        raise ConfigError(
            f"{_shown(argument)} does not hold a YAML value{line}: {error}; put text in quotes"
        ) from None


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


def _refuse_unknown(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(
                f"unknown key {_join(where, key)}{nearest(key, known)}", _join(where, key)
            )


def _wrong_type(hint: Any, value: Any, where: str) -> ConfigError:
    members = union_members(hint)
    literals = [member for member in members if typing.get_origin(member) is Literal]
    choices = [
        each for literal in literals for each in typing.get_args(literal) if isinstance(each, str)
    ]
    mend = nearest(value, choices)
    # YAML reads some unquoted words, off among them, as something other than text.
    is_number_or_date = not isinstance(value, str | list | Mapping | None)
    if (str in members and is_number_or_date) or (choices and isinstance(value, bool)):
        mend = "; put text in quotes"
    return _error(where, f"expected {type_name(hint)}, got {_shown(value)}{mend}")


def _error(where: str, message: str) -> ConfigError:
    return ConfigError(f"{where}: {message}" if where else message, where)


def _join(where: str, key: object) -> str:
    name = _cut(str(key))
    return f"{where}.{name}" if where else name


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))


def _shown(value: object) -> str:
    if isinstance(value, bool | None):
        return str(yaml.safe_dump(value).split()[0])
    if (
        isinstance(value, int) and value.bit_length() > 10_000
    ):  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return _cut(repr(value))


def _cut(text: str) -> str:
    """A text that a message can bear: of one line, and not too long."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else f"{text[:77]}..."
