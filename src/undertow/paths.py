"""Paths given as text: what takes a `Path` takes a str too."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from undertow.errors import ConfigError, shown

P = ParamSpec("P")
R = TypeVar("R")


def takes_paths(function: Callable[P, R]) -> Callable[P, R]:
    """The function, but its parameters annotated as Path, Path | None or Sequence[Path] may be
    given as str.

    Raises:
        ConfigError: when called, if one of these is neither text nor a path.
    """
    signature = inspect.signature(function, eval_str=True)
    hints = {name: each.annotation for name, each in signature.parameters.items()}
    single = {name: hint for name, hint in hints.items() if hint in (Path, Path | None)}
    several = {name for name, hint in hints.items() if hint == Sequence[Path]}

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name in single and not (value is None and single[name] != Path):
                bound.arguments[name] = _path(name, value)
            elif name in several:
                values: Any = [value] if isinstance(value, str | os.PathLike) else value
                bound.arguments[name] = [_path(name, each) for each in values]
        return function(*bound.args, **bound.kwargs)

    return called


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} is {shown(value)}; give a path, as text or a pathlib.Path")
    return Path(value)
