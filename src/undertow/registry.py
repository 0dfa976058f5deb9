"""Which kinds of recurrences, solvers, tasks and exit rules there are: open
lists that anyone adds to.

A *family* is a base class whose subclasses a recipe, a saved folder or a command names by their
`kind`. Undertow's own are registered in the modules that define them, a user's in the same way::

    @undertow.register
    @dataclass(frozen=True)
    class Leaky(Recurrence):
        kind: ClassVar[str] = "leaky"
        decay: float = 0.9

Nothing here imports what it lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from undertow.errors import ConfigError

C = TypeVar("C", bound=type[Any])

_families: dict[type, dict[str, type]] = {}


def family(base: C) -> C:
    """Class decorator: the subclasses of this class are registered, and found, by their `kind`."""
    _families[base] = {}
    return base


def register(cls: C) -> C:
    """Class decorator: make a class known by its `kind`, wherever one of its family is named.

    A class of the same name in the same module takes the place of the one before, as when a
    notebook's cell runs again.

    Raises:
        ConfigError: the class is of no family or has no `kind`, or another class has the kind.
    """
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
    _families[base][kind] = cls
    return cls


def is_family(cls: object) -> bool:
    """Whether a class is the base of a family."""
    return isinstance(cls, type) and cls in _families


def kinds(base: type) -> Mapping[str, Any]:
    """Every registered class of a family by its kind: a view, which later ones join."""
    return MappingProxyType(_families[base])


def registered() -> list[type]:
    """Every registered class, of all families."""
    return [cls for known in _families.values() for cls in known.values()]
