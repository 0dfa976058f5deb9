"""What a configuration class says about itself: its fields, their types in plain words, and --help.

A field's documentation is the string literal right below it in the class body::

    @dataclass(frozen=True)
    class Train:
        steps: int = 1000
        \"\"\"Optimizer steps to take.\"\"\"
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from undertow.registry import is_family, kinds
from undertow.settings import is_as_text

WIDTH = 100
"""Columns to which help text is wrapped."""

_SCALAR_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    types.NoneType: "null",
    Any: "anything",
}


def field_types(cls: type) -> dict[str, Any]:
    """Return the resolved type of each field that the class's constructor takes."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the documentation of each field, inherited fields included, read from the class
    source."""
    docs: dict[str, str] = {}
    for klass in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(klass):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(klass)))
        except (
            OSError,
            TypeError,
        ):  # a class typed in at a prompt has no source, so no help either
            continue
        body = typing.cast(ast.ClassDef, tree.body[0]).body
        for node, below in itertools.pairwise(body):
            match node, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = inspect.cleandoc(text)
    return docs


def kind_of(cls: type) -> str | None:
    """Return the class's ``kind``, the tag that picks it out of a union, or None if it has none."""
    kind = getattr(cls, "kind", None)
    return kind if isinstance(kind, str) and "kind" not in field_types(cls) else None


def alternatives_of(cls: type) -> tuple[str, ...]:
    """Return the names of the classmethods that a mapping may call instead of the constructor."""
    return tuple(getattr(cls, "alternatives", ()))


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself alone."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def sections_of(hint: Any) -> list[type]:
    """Return the dataclasses among the members of a type; for a family, all that are registered."""
    sections: list[type] = []
    for each in union_members(hint):
        if is_family(each):
            sections += [cls for _, cls in sorted(kinds(each).items())]
        elif isinstance(each, type) and dataclasses.is_dataclass(each) and not is_as_text(each):
            sections.append(each)
    return sections


def item_types(hint: Any) -> tuple[Any, ...]:
    """Return the types of a list's items, (X, ...) for any number of them; () for a type that is no
    list."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Sequence:
        return (*arguments, ...)
    return arguments if origin is tuple else ()


def type_name(hint: Any) -> str:
    """Return a type in the plain words used by help and error messages."""
    members = union_members(hint)
    if len(members) > 1 or is_family(hint):
        tags = [kind for kind in map(kind_of, sections_of(hint)) if kind]
        rest = [member for member in members if not tags or not dataclasses.is_dataclass(member)]
        tagged = [f"section of kind {' or '.join(tags)}"] if tags else []
        return " or ".join(tagged + [type_name(member) for member in rest])
    origin, arguments, items = typing.get_origin(hint), typing.get_args(hint), item_types(hint)
    if origin is typing.Literal:
        choices = ", ".join(map(repr, arguments))
        return choices if len(arguments) == 1 else f"one of {choices}"
    if items:
        return f"[{', '.join('...' if each is ... else type_name(each) for each in items)}]"
    if origin is dict:
        return f"{{{type_name(arguments[0])}: {type_name(arguments[1])}, ...}}"
    if is_as_text(hint):
        return str(hint.forms)
    if dataclasses.is_dataclass(hint):
        kind = kind_of(typing.cast(type, hint))
        return f"section of kind {kind}" if kind else "section"
    if hint not in _SCALAR_NAMES:
        raise TypeError(f"a configuration field cannot have the type {hint!r}")
    return _SCALAR_NAMES[hint]


def describe(cls: type) -> str:
    """Return the help text of a configuration class: every dotted key, its type, default and
    meaning."""
    return "\n".join(_describe_section(cls, "", "")) + "\n"


def _describe_section(cls: type, where: str, indent: str) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        key, hint = where + field.name, field_types(cls)[field.name]
        yield from _wrap(
            f"{key}: {type_name(hint)}{_describe_default(field)}", indent, hang="        "
        )
        yield from _wrap(field_docs(cls).get(field.name, ""), indent + "    ")
        items = item_types(hint)
        inner = f"{key}[]." if items else f"{key}."
        for section in [
            section for item in dict.fromkeys(items or [hint]) for section in sections_of(item)
        ]:
            kind = kind_of(section)
            if kind:
                yield from _wrap(
                    f"with {inner}kind={kind}: {_summary(section)}".rstrip(": "), indent + "  "
                )
            yield from _describe_section(section, inner, indent + ("    " if kind else ""))
    for name in alternatives_of(cls):
        constructor = getattr(cls, name)
        taken = ", ".join(_describe_parameters(constructor))
        yield from _wrap(
            f"{where}{name}: instead of the keys above; takes {taken}", indent, hang="        "
        )
        yield from _wrap(_summary(constructor), indent + "    ")


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def _describe_default(field: dataclasses.Field[Any]) -> str:
    default = _default_of(field)
    if default is dataclasses.MISSING:
        return " (required)"
    if not dataclasses.is_dataclass(default):
        return f" (default: {_plain(default)})"
    # The section's own keys show their defaults below, so tell only where this one differs from
    # them.
    differing = ", ".join(
        f"{each.name}={_plain(getattr(default, each.name))}"
        for each in dataclasses.fields(default)
        if each.init and getattr(default, each.name) != _default_of(each)
    )
    words = [kind_of(type(default)) or "", f"with {differing}" if differing else ""]
    return f" (default: {' '.join(filter(None, words))})" if any(words) else ""


def _describe_parameters(constructor: Any) -> Iterator[str]:
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
    """Return a default as one would write it in YAML, on one line."""
    try:
        text: str = yaml.safe_dump(
            value, default_flow_style=True, width=float("inf"), allow_unicode=True
        )
    except yaml.representer.RepresenterError:  # a list of sections, say
        return repr(value)
    return text.removesuffix("\n").removesuffix("\n...")


def _summary(documented: Any) -> str:
    """Return the first paragraph of a docstring, unless dataclass() wrote it."""
    text = documented.__doc__ or ""
    if isinstance(documented, type) and text.startswith(f"{documented.__name__}("):
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
    return [
        line
        for paragraph in text.split("\n\n")
        for line in wrapper.wrap(" ".join(paragraph.split()))
    ]
