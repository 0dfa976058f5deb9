"""What is wrong with settings, in a sentence: the value, the limit and the mend."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

from pydantic import ValidationError

from undertow.annotations import AsText, is_section, items_of, members_of
from undertow.errors import ConfigError, UndertowError, join, nearest, shown


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the values of a section stand: its dotted key, and those of values from elsewhere."""

    section: str
    elsewhere: Mapping[str, str]

    def key(self, name: str) -> str:
        return self.elsewhere.get(name) or join(self.section, name)


_place: ContextVar[_Place | None] = ContextVar("place", default=None)


@contextlib.contextmanager
def placed(section: str, elsewhere: Mapping[str, str] | None = None) -> Iterator[None]:
    """Have what is made inside called by dotted keys in place of the class's name."""
    token = _place.set(_Place(section, elsewhere or {}))
    try:
        yield
    finally:
        _place.reset(token)


def unknown_key(key: str, name: str, known: Iterable[str]) -> ConfigError:
    """What is wrong with a key that nothing reads."""
    return ConfigError(f"unknown key {key}{nearest(name, known)}", key)


def expected(key: str, wish: str, value: Any, mend: str = "") -> ConfigError:
    """What is wrong with a value of another type."""
    if value is None or isinstance(value, bool):
        found = json.dumps(value)  # as YAML has it
    else:
        found = shown(list(value) if isinstance(value, tuple) else value)
    return ConfigError(f"{f'{key}: ' if key else ''}expected {wish}, got {found}{mend}", key)


def told(
    error: ValidationError, owner: str, hints: Mapping[str, Any], known: Sequence[str]
) -> UndertowError:
    """The first thing that pydantic found wrong, in a sentence.

    Args:
        owner: what the values were given to, by which Python calls them.
        hints: its annotations.
        known: what its keys may be.
    """
    place = _place.get() or _Place(owner, {})
    found: list[Any] = error.errors(include_url=False)
    misfits = [each for each in found if each["type"] in _MISFITS]
    missing = [each for each in found if each["type"][:7] == "missing" and len(each["loc"]) == 1]
    first = (misfits or [each for each in found if each not in missing] or missing)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    key = place.key(name) if name else place.section
    if first in missing:
        names = ", ".join(place.key(each["loc"][0]) for each in missing)
        return ConfigError(f"missing {names}, which must be given", place.section)
    if first["type"] == "unexpected_keyword_argument":
        return unknown_key(key, name, known)
    if first["type"] == "multiple_argument_values":
        return ConfigError(f"{key} is given twice; give it once", key)
    if first["type"] == "unexpected_positional_argument":
        return ConfigError(f"{owner} takes fewer values; leave out {shown(first['input'])}")
    if "error" in first.get("ctx", {}):
        return _of_check(first["ctx"]["error"], first["loc"], key, hints)
    of_field = [each for each in found if each["loc"][:1] == first["loc"][:1]]
    return _of_value(of_field, hints[name], key, f"{place.section}: " if place.section else "")


def _of_check(
    problem: Exception, loc: Sequence[Any], key: str, hints: Mapping[str, Any]
) -> UndertowError:
    """What a check of ours raised: of one value, told by its key, or with a sentence of its own."""
    if isinstance(problem, ConfigError):
        place, word = _place.get(), str(problem).partition(" ")[0]
        if place is None:
            return problem
        key = place.key(word) if not loc and word in hints else key
        return ConfigError(f"{f'{place.section}: ' if place.section else ''}{problem}", key)
    if isinstance(problem, UndertowError):
        return problem
    said, *inner = problem.args or [type(problem).__name__]
    key = "".join([key, _inside(hints[str(loc[0])], loc[1:])[1] if loc else "", *inner])
    return ConfigError(f"{key}: {said}", key)


def _of_value(found: Sequence[Any], hint: Any, key: str, prefix: str) -> ConfigError:
    """What is wrong with a field's value: it is beyond a bound, or else of another type. A union
    has an error of each member."""
    for each in found:
        name, *loc = each["loc"]
        if each.get("ctx", {}).keys() & _BOUNDS.keys():
            held, _ = _inside(hint, loc)
            number = float(each["input"]) if float in members_of(held) else each["input"]
            verb = "holds" if loc and isinstance(loc[-1], int) else "is"
            wish = _range(held, each["ctx"])
            return ConfigError(f"{prefix}{name} {verb} {shown(number)}; use {wish}", key)
    kind, value = found[0]["type"], found[0]["input"]
    loc = found[0]["loc"][1:-1] if kind in _LENGTHS else found[0]["loc"][1:]
    held, inner = _inside(hint, loc)
    mend = "; give a finite one" if kind == "finite_number" else _mend(held, value)
    return expected(key + inner, words(held, _of_python), value, mend)


_MISFITS = (
    "unexpected_keyword_argument",
    "unexpected_positional_argument",
    "multiple_argument_values",
)
_LENGTHS = ("missing", "too_long")
_BOUNDS = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "less than {}"}


def _range(hint: Any, failed: Mapping[str, Any]) -> str:
    """The bound that a value broke; with the other one where they are those of an open interval."""
    held: dict[str, Any] = {}
    for member in typing.get_args(hint) if type(None) in members_of(hint) else (hint,):
        for one in getattr(member, "__metadata__", ()):
            for each in getattr(one, "metadata", [one]):  # a pydantic Field holds several
                held |= {name: getattr(each, name) for name in _BOUNDS if hasattr(each, name)}
    bounds = {name: held[name] for name in _BOUNDS if held.get(name) is not None} or dict(failed)
    if int in members_of(hint) and "gt" in bounds:
        bounds = {"ge": bounds.pop("gt") + 1} | bounds
        failed = {"ge": 0} if "gt" in failed else failed
    if not bounds.keys() & {"gt", "lt"}:
        bounds = {name: bounds[name] for name in bounds if name in failed}
    return ", and ".join(_BOUNDS[name].format(f"{bounds[name]:,}") for name in bounds)


def _inside(hint: Any, loc: Sequence[Any]) -> tuple[Any, str]:
    """The annotation of what stands inside a field's value, and how its key goes on."""
    key = ""
    for index, part in enumerate(loc):
        items = items_of(hint)
        mapping = next((each for each in members_of(hint) if typing.get_origin(each) is dict), None)
        if items and isinstance(part, int):
            hint, key = items[0] if items[-1] is ... else items[part], f"{key}[{part}]"
        elif mapping is not None and loc[index + 1 : index + 2] == ("[key]",):
            return typing.get_args(mapping)[0], key
        elif mapping is not None:
            hint, key = typing.get_args(mapping)[1], f"{key}.{join('', part)}"
        else:
            break
    return hint, key


_SCALARS: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    types.NoneType: "null",
    Any: "anything",
}


def words(hint: Any, of_classes: Callable[[list[type]], str]) -> str:
    """A type in the plain words of help and messages; `of_classes` names the classes in it."""
    members = members_of(hint)
    if classes := [each for each in members if is_section(each)]:
        rest = [each for each in members if each not in classes]
        return " or ".join([of_classes(classes), *(words(each, of_classes) for each in rest)])
    if len(members) > 1:
        return " or ".join(words(each, of_classes) for each in members)
    (hint,), arguments = members, typing.get_args(members[0])
    if typing.get_origin(hint) is Literal:
        choices = ", ".join(map(repr, arguments))
        return choices if len(arguments) == 1 else f"one of {choices}"
    if items := items_of(hint):
        parts = ["..." if each is ... else words(each, of_classes) for each in items]
        return f"[{', '.join(parts)}]"
    if typing.get_origin(hint) is dict:
        key, value = (words(each, of_classes) for each in arguments)
        return f"{{{key}: {value}, ...}}"
    if isinstance(hint, type) and issubclass(hint, AsText):
        return hint.forms
    return _SCALARS.get(hint) or str(getattr(hint, "__name__", hint))


def _of_python(classes: list[type]) -> str:
    return " or ".join(f"{each.__name__}(...)" for each in classes)


def _mend(hint: Any, value: Any) -> str:
    """A near choice, or quotes for what looks like text and is read by YAML as something else."""
    members = members_of(hint)
    literals = [each for each in members if typing.get_origin(each) is Literal]
    choices = [each for one in literals for each in typing.get_args(one) if isinstance(each, str)]
    is_scalar = not isinstance(value, str | list | tuple | Mapping | None)
    if (str in members and is_scalar) or (choices and isinstance(value, bool)):
        return "; put text in quotes"
    return nearest(value, choices)
