"""The help of a settings class: every dotted key, its type in plain words, its default and its
meaning."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from undertow.annotations import alternatives_of, field_types, items_of
from undertow.registry import kind_of, sections_of, type_name

WIDTH = 100
"""Columns to which help is wrapped."""


def describe(cls: type) -> str:
    """The help of a settings class, a line or more a key."""
    return "\n".join(_section(cls, "", "")) + "\n"


def field_docs(cls: type) -> dict[str, str]:
    """What stands below each field, inherited ones included."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        for name, field in vars(each).get("__pydantic_fields__", {}).items():
            docs |= {name: inspect.cleandoc(field.description)} if field.description else {}
    return docs


def _section(cls: type, where: str, indent: str) -> Iterator[str]:
    hints, docs = field_types(cls), field_docs(cls)
    fields = [each for each in dataclasses.fields(cls) if each.init]
    for field in fields:
        key, hint = where + field.name, hints[field.name]
        yield from _wrap(f"{key}: {type_name(hint)}{_default(field)}", indent, hang="        ")
        yield from _wrap(docs.get(field.name, ""), f"{indent}    ")
        items = items_of(hint)
        inner = f"{key}[]." if items else f"{key}."
        for section in dict.fromkeys(one for each in items or [hint] for one in sections_of(each)):
            kind = kind_of(section)
            if kind:
                told = f"with {inner}kind={kind}: {_summary(section)}".rstrip(": ")
                yield from _wrap(told, f"{indent}  ")
            yield from _section(section, inner, indent + ("    " if kind else ""))
    for name in alternatives_of(cls):
        constructor = getattr(cls, name)
        taken = ", ".join(_parameters(constructor))
        told = f"{where}{name}: instead of the keys above; takes {taken}"
        yield from _wrap(told, indent, hang="        ")
        yield from _wrap(_summary(constructor), f"{indent}    ")


def _default(field: dataclasses.Field[Any]) -> str:
    default = _default_of(field)
    if default is dataclasses.MISSING:
        return " (required)"
    if not dataclasses.is_dataclass(default) or not sections_of(type(default)):
        return f" (default: {_plain(default)})"
    # The section's own keys show their defaults below: tell only where this one differs from them.
    differing = ", ".join(
        f"{each.name}={_plain(getattr(default, each.name))}"
        for each in dataclasses.fields(default)
        if each.init and getattr(default, each.name) != _default_of(each)
    )
    words = [kind_of(type(default)) or "", f"with {differing}" if differing else ""]
    return f" (default: {' '.join(filter(None, words))})" if any(words) else ""


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def _parameters(constructor: Any) -> Iterator[str]:
    hints = typing.get_type_hints(constructor)
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            yield "any of the keys above"
            continue
        words = [type_name(hints.get(name, Any))]
        if parameter.default is not parameter.empty:
            words.append(f"default: {_plain(parameter.default)}")
        yield f"{name} ({', '.join(words)})"


def _plain(value: Any) -> str:
    """A default as one would write it in YAML, on one line."""
    to_text = getattr(value, "to_text", None)
    try:
        text: str = yaml.safe_dump(
            to_text() if to_text else value,
            default_flow_style=True,
            width=float("inf"),
            allow_unicode=True,
        )
    except yaml.representer.RepresenterError:  # a list of sections, say
        return repr(value)
    return text.removesuffix("\n").removesuffix("\n...")


def _summary(documented: Any) -> str:
    """The first paragraph of a docstring, unless dataclass() wrote it."""
    text = documented.__doc__ or ""
    if text.startswith(f"{documented.__name__}("):
        return ""
    return inspect.cleandoc(text).split("\n\n")[0]


def _wrap(text: str, indent: str, hang: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    return [line for each in paragraphs for line in wrapper.wrap(each)]
