"""What the annotations of settings mean: the checks that each stands for, and what is in it."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import os
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, InstanceOf

from undertow.errors import join, shown
from undertow.reading import is_text

Share = Annotated[float, Field(ge=0, lt=1)]
"""A share of something, though not all of it."""

_LARGEST = 2**63  # whole numbers go on to libraries that hold them in 64 bits
# YAML 1.1 reads numbers such as 1e-3, which lack the dot or the exponent's sign, as text.
_EXPONENT_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", re.ASCII)


class AsText(ABC):
    """A base for settings that YAML, JSON and Python may write as a short text.

    A field annotated with the base takes an instance or the text, which becomes an instance; saved
    is the text. An unreadable text is a ConfigError of `from_text`::

        class Gradient(AsText):
            forms = "full, truncated(n) or adjoint(n)"

            @classmethod
            def from_text(cls, text: str) -> Gradient: ...

        class Truncated(Gradient):
            def to_text(self) -> str:
                return f"truncated({self.sweeps})"
    """

    forms: ClassVar[str] = "text"
    """What may be written, as help and messages say it."""

    @classmethod
    @abstractmethod
    def from_text(cls, text: str) -> Self:
        """What the text stands for.

        Raises:
            ConfigError: nothing; says what may be written.
        """

    @abstractmethod
    def to_text(self) -> str:
        """The text that `from_text` makes an equal object of."""


def field_types(cls: type, extras: bool = False) -> dict[str, Any]:
    """The annotation of each field that the constructor takes, with its constraints if `extras`."""
    hints = typing.get_type_hints(cls, include_extras=extras)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls) if each.init}


def alternatives_of(cls: type) -> tuple[str, ...]:
    """The classmethods that a section may call in place of the constructor."""
    return tuple(getattr(cls, "alternatives", ()))


def arguments_of(constructor: Any) -> list[str]:
    """The names of the arguments that a constructor takes, those that it passes on left out."""
    parameters = inspect.signature(constructor).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


def members_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself alone, without constraints."""
    if typing.get_origin(hint) is Annotated:
        return members_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(one for each in typing.get_args(hint) for one in members_of(each))
    return (hint,)


def items_of(hint: Any) -> tuple[Any, ...]:
    """The types of a list's items, (X, ...) for any number of them; () for what is no list."""
    for member in members_of(hint):
        if typing.get_origin(member) in (tuple, Sequence):
            arguments = typing.get_args(member)
            return arguments if typing.get_origin(member) is tuple else (*arguments, ...)
    return ()


def is_section(hint: Any) -> bool:
    """Whether an annotation is a class that is written as a section."""
    return (
        isinstance(hint, type) and dataclasses.is_dataclass(hint) and not issubclass(hint, AsText)
    )


def checked(hint: Any) -> Any:
    """The annotation with the checks and conversions of this module, wherever they apply in it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint in (str, int, float):
        return Annotated[hint, BeforeValidator(_number if hint is float else _kept)]
    if isinstance(hint, type) and issubclass(hint, AsText):
        text = BeforeValidator(lambda given: _from_text(hint, given))
        return Annotated[hint, InstanceOf(), text]
    if is_section(hint):
        return Annotated[hint, InstanceOf()]
    if origin is Annotated:
        return Annotated[(checked(arguments[0]), *hint.__metadata__)]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(checked, arguments))]  # noqa: UP007
    if origin in (tuple, Sequence):
        items = tuple(each if each is ... else checked(each) for each in items_of(hint))
        return Annotated[tuple[items], BeforeValidator(_as_tuple)]  # type: ignore[valid-type]
    return origin[tuple(map(checked, arguments))] if origin in (dict, list) else hint


def _kept(value: Any, key: str = "") -> Any:
    """Refuse numbers and texts that cannot be kept or handed on, in what any plain value holds; a
    path becomes text."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
        if not -_LARGEST <= number < _LARGEST:
            told = f"{shown(number)} does not fit into 64 bits; use a smaller number"
            raise ValueError(told, key)
        return number
    if isinstance(value, str) and not is_text(value):
        raise ValueError(f"{shown(value)} holds a character that no file can; leave it out", key)
    if isinstance(value, Mapping):
        return {
            _kept(name, key): _kept(item, f"{key}.{join('', name)}") for name, item in value.items()
        }
    if isinstance(value, list):
        return [_kept(item, f"{key}[{index}]") for index, item in enumerate(value)]
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str) and not _EXPONENT_NUMBER.fullmatch(value):
        return value
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real):
        return value
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return value
    return value if isinstance(value, str) and math.isinf(number) else number


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | range) else value


def _from_text(hint: type[AsText], value: Any) -> Any:
    return hint.from_text(value) if isinstance(value, str) else value
