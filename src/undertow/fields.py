"""The fields of a settings dataclass held to their annotations where it is made, from Python as
from YAML.

A dataclass takes whatever it is given: a `T2MLR(1.0, 2.0)` or a `Chunked(64, "scan")` would fail in
some later forward, or not at all. `check_fields(self)`, first in `__post_init__`, refuses them at
once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import typing
from collections.abc import Sequence
from typing import Any, Literal

from undertow.config_help import field_types, item_types, kind_of, type_name, union_members
from undertow.errors import ConfigError, nearest
from undertow.settings import is_as_text

# What a value becomes that no annotation allows.
WRONG = object()


def check_fields(settings: object) -> None:
    """Refuse values that are not of their field's annotated type; lists become tuples, NumPy's
    numbers plain ones.

    Raises:
        ConfigError: one is not; names it, what is needed and, where there is one, the mend.
    """
    cls: Any = type(settings)
    for name, hint in _checked_types(cls).items():
        value = getattr(settings, name)
        taken = fitting(f"{cls.__name__}'s {name}", hint, value)
        if taken is not value:
            object.__setattr__(settings, name, taken)  # settings are frozen


def fitting(name: str, hint: Any, value: Any) -> Any:
    """The value as the annotation `hint` has it.

    Raises:
        ConfigError: it does not fit; calls it by `name`.
    """
    taken = _fit(hint, value)
    if taken is WRONG:
        raise ConfigError(f"{name} is {shown(value)}; give {_needed(hint)}{_mend(hint, value)}")
    return taken


def shown(value: object) -> str:
    """A value in a message: a class by its name, anything else as Python writes it, cut short."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


@functools.cache
def _checked_types(cls: type[Any]) -> dict[str, Any]:
    """The annotated types of a class's fields; none where they cannot be found, as in a class made
    inside a function."""
    try:
        return field_types(cls)
    except (NameError, TypeError):
        return {}


def _fit(hint: Any, value: Any) -> Any:
    """The value as the annotation has it, or WRONG. An annotation that is neither plain nor a class
    is not looked at."""
    members = union_members(hint)
    if len(members) > 1:
        return next(
            (fitted for member in members if (fitted := _fit(member, value)) is not WRONG), WRONG
        )
    if isinstance(value, str) and is_as_text(hint):
        return hint.from_text(value)
    if hint is None or hint is type(None):
        return value if value is None else WRONG
    if typing.get_origin(hint) is Literal:
        return (
            value
            if any(type(value) is type(each) and value == each for each in typing.get_args(hint))
            else WRONG
        )
    if items := item_types(hint):
        return _fit_items(items, value)
    if isinstance(value, bool) and hint in (int, float):
        return WRONG
    if hint is int:
        return (
            value
            if type(value) is int
            else int(value)
            if isinstance(value, numbers.Integral)
            else WRONG
        )
    if hint is float:
        if not isinstance(value, numbers.Real):
            return WRONG
        try:
            number = float(value)
        except OverflowError:
            return WRONG
        if not math.isfinite(number):
            return WRONG
        # A whole number stays one in print; one beyond 64 bits could enter no tensor.
        return value if isinstance(value, int | float) and abs(number) < 2**63 else number
    try:
        return value if isinstance(value, hint) else WRONG
    except TypeError:  # Any, a Callable, a type variable
        return value


def _fit_items(hints: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return WRONG
    hints = hints[:1] * len(value) if hints[-1] is ... else hints
    fitted = [_fit(hint, item) for hint, item in zip(hints, value, strict=False)]
    if len(hints) != len(value) or any(each is WRONG for each in fitted):
        return WRONG
    unchanged = type(value) is tuple and all(
        one is other for one, other in zip(fitted, value, strict=True)
    )
    return value if unchanged else tuple(fitted)


def _needed(hint: Any) -> str:
    """What a field needs, as one would write it in Python."""
    others = [member for member in union_members(hint) if member is not type(None)]
    words = [_in_python(member) for member in others]
    return " or ".join(words + ["None"] * (len(others) < len(union_members(hint))))


def _in_python(hint: Any) -> str:
    words = {int: "a whole number", float: "a finite number", str: "text", bool: "True or False"}
    if item_types(hint):
        return f"a tuple such as {_example(hint)}"
    if typing.get_origin(hint) is Literal:
        return type_name(hint)
    return words.get(hint) or (f"{hint.__name__}(...)" if isinstance(hint, type) else str(hint))


def _example(hint: Any) -> Any:
    items = [item for item in item_types(hint) if item is not ...]
    return (
        tuple(_example(item) for item in items) if items else {int: 1, float: 0.5}.get(hint, "text")
    )


def _mend(hint: Any, value: Any) -> str:
    """A nearby choice, or the instance that a class or its kind stands for."""
    for member in union_members(hint):
        if (
            dataclasses.is_dataclass(member)
            and isinstance(member, type)
            and value in (member, kind_of(member))
        ):
            return f", such as {member.__name__}()"
        if typing.get_origin(member) is Literal and isinstance(value, str):
            return nearest(
                value, [each for each in typing.get_args(member) if isinstance(each, str)]
            )
    return ""
