"""Which kinds of recurrences, solvers, tasks and exit rules there are: open
lists that anyone adds to.

A *family* is a base class whose subclasses a recipe, a saved folder or a command names by their
`kind`. Undertow's own are registered in the modules that define them, a user's in the same way::

    @undertow.register
    class Leaky(Recurrence):
        kind: ClassVar[str] = "leaky"
        decay: float = 0.9
        \"\"\"Share of the state that is left after a token.\"\"\"

Nothing here imports what it lists.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

from undertow.annotations import field_types, is_section, members_of
from undertow.errors import ConfigError
from undertow.sentences import words
from undertow.settings import settings

C = TypeVar("C", bound=type[Any])

_families: dict[type, dict[str, type]] = {}


def family(base: C) -> C:
    """Class decorator: the subclasses of this class are registered, and found, by their `kind`."""
    _families[base] = {}
    return base


@overload
@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def register(cls: C, /) -> C: ...
@overload
@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def register(*, kw_only: bool) -> Callable[[C], C]: ...
def register(cls: Any = None, /, *, kw_only: bool = False) -> Any:
    """Class decorator: settings (`settings.settings`) known by their `kind`, wherever one of their
    family is named.

    A class of the same name in the same module takes the place of the one before, as when a
    notebook's cell runs again.

    Raises:
        ConfigError: the class is of no family or has no `kind`, or another class has the kind.
    """
    if cls is None:
        return functools.partial(register, kw_only=kw_only)
    base = next((each for each in cls.__mro__ if each in _families), None)
    if base is None:
        bases = " or ".join(each.__name__ for each in _families)
        raise ConfigError(f"{cls.__name__} cannot be registered; derive it from {bases}")
    kind = getattr(cls, "kind", None)
    if not isinstance(kind, str) or not kind or kind == "none":
        raise ConfigError(
            f'{cls.__name__}\'s kind is {kind!r}; give it one, as kind: ClassVar[str] = "my-kind"'
        )
    other = _families[base].get(kind, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(
            f"the {base.__name__} kind {kind!r} of {cls.__module__}.{cls.__qualname__} is taken by "
            f"{other.__module__}.{other.__qualname__}; choose another"
        )
    made = settings(kw_only=kw_only)(cls)
    _families[base][kind] = made
    return made


def is_family(cls: object) -> bool:
    """Whether a class is the base of a family."""
    return isinstance(cls, type) and cls in _families


def kinds(base: type) -> Mapping[str, Any]:
    """Every registered class of a family by its kind: a view, which later ones join."""
    return MappingProxyType(_families[base])


def registered() -> list[type]:
    """Every registered class, of all families."""
    return [cls for known in _families.values() for cls in known.values()]


def kind_of(cls: type) -> str | None:
    """The class's `kind`, the tag that picks it out of several, or None if it has none."""
    kind = getattr(cls, "kind", None)
    return kind if isinstance(kind, str) and "kind" not in field_types(cls) else None


def sections_of(hint: Any) -> list[type]:
    """The settings classes among the members of an annotation; of a family all that are
    registered."""
    found: list[type] = []
    for each in members_of(hint):
        if each in _families:
            found += [cls for _, cls in sorted(_families[each].items())]
        elif is_section(each):
            found.append(each)
    return found


def type_name(hint: Any) -> str:
    """A type in the plain words of recipes."""
    return words(hint, _of_yaml)


def _of_yaml(classes: list[type]) -> str:
    tags = [kind for each in classes for one in sections_of(each) if (kind := kind_of(one))]
    return f"section of kind {' or '.join(tags)}" if tags else "section"
