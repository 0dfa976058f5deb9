"""Settings: frozen dataclasses whose values pydantic checks where they are made, in Python as from
YAML.

    @settings
    class Window:
        tokens: PositiveInt = 128
        \"\"\"Length of a window.\"\"\"
        share: Annotated[float, Field(ge=0, lt=1)] = 0.5
        \"\"\"Share of it that is masked.\"\"\"

The annotation is the check, the text below a field its help, and every mistake a `ConfigError` of
one sentence, never pydantic's. What takes two fields to tell is checked in `__post_init__`. A whole
number is no text, no bool and of 64 bits; a number is finite, and the text 1e-3 is one; a list or a
range becomes a tuple, a path text. `registry.register` does the same for a class that recipes name
by its kind.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import pydantic.dataclasses
from pydantic import ConfigDict, ValidationError, validate_call

from undertow.annotations import AsText, Share, alternatives_of, arguments_of, checked, field_types
from undertow.sentences import told

__all__ = ["AsText", "Share", "alternative", "settings"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

CONFIG = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    use_attribute_docstrings=True,
)


@overload
@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[T], /) -> type[T]: ...
@overload
@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(*, kw_only: bool) -> Callable[[type[T]], type[T]]: ...
def settings(cls: Any = None, /, *, kw_only: bool = False) -> Any:
    """Class decorator: a frozen dataclass that checks its fields, as this module's head says.

    Of a plain dataclass it makes a subclass of the same name.
    """
    if cls is None:
        return functools.partial(settings, kw_only=kw_only)
    if "__pydantic_fields__" in vars(cls):
        return cls
    own = vars(cls).get("__annotations__", {})
    if "__dataclass_fields__" in vars(cls):
        body: dict[str, Any] = {each.name: each for each in dataclasses.fields(cls)}
        body = {name: body[name] for name in own if name in body} | {"__annotations__": own}
        body |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        cls = type(cls)(cls.__name__, (cls,), body)
    hints = typing.get_type_hints(cls, include_extras=True)
    cls.__annotations__ = {name: checked(hints[name]) for name in own}
    made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=kw_only, config=CONFIG)(cls)
    names = [each.name for each in dataclasses.fields(made) if each.init and not each.kw_only]
    validate, known = made.__init__, [*field_types(made), *alternatives_of(made)]

    @functools.wraps(validate)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        positional, named = _by_name(names, args, kwargs)
        try:
            validate(self, *positional, **named)
        except ValidationError as error:
            raise told(error, made.__name__, field_types(made, extras=True), known) from None

    made.__init__ = init
    return made


def alternative(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator, below @classmethod, of a constructor that a class's `alternatives` names: its
    arguments are held to their annotations as the fields are."""

    @functools.cache  # not before the class is there, which the annotations may name
    def checking() -> Any:
        hints = typing.get_type_hints(function, include_extras=True)
        function.__annotations__ = {name: checked(hint) for name, hint in hints.items()}
        return validate_call(config=CONFIG)(function), hints

    _, *names = arguments_of(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        call, hints = checking()
        positional, named = _by_name(names, args[1:], kwargs)
        try:
            made: R = call(args[0], *positional, **named)
        except ValidationError as error:
            raise told(error, function.__qualname__, hints, names) from None
        return made

    return called


def _by_name(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Positional arguments by their names, by which messages call them, where that is possible."""
    named = dict(zip(names, args, strict=False))
    is_plain = len(named) == len(args) and not named.keys() & kwargs.keys()
    return ((), {**named, **kwargs}) if is_plain else (args, dict(kwargs))
