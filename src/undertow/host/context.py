"""What holds for one call, in a context variable or, while `torch.compile` traces the call, in its
place."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Tracing:
    """How many contexts are set in the call that is traced. One thread traces at a time."""

    def __init__(self) -> None:
        self.depth = 0  # the object's own from the start, or it would be another to a guard later


tracing = Tracing()


class CallContext(Generic[T]):
    """A context variable that `torch.compile` can trace, which it cannot with Python's own.

    What is set while a call is traced is reset before its trace ends. Where a graph breaks between
    `set` and `reset`, that call is not traced at all and runs with the context variable.
    """

    def __init__(self, name: str) -> None:
        self.variable: ContextVar[T | None] = ContextVar(name, default=None)
        self.traced: T | None = None

    def get(self) -> T | None:
        if tracing.depth and torch.compiler.is_compiling():
            return self.traced
        return self.variable.get()

    def set(self, value: T | None) -> Any:
        """What `reset` takes to have it as it was."""
        if torch.compiler.is_compiling():
            before, self.traced = self.traced, value
            tracing.depth += 1
            return before
        return self.variable.set(value)

    def reset(self, token: Any) -> None:
        if torch.compiler.is_compiling():
            tracing.depth -= 1
            self.traced = token
        else:
            self.variable.reset(token)
