"""Settings: frozen dataclasses that recipes, saved folders and commands are read into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self


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


def is_as_text(hint: Any) -> bool:
    """Whether an annotation is a class that may be written as text."""
    return isinstance(hint, type) and issubclass(hint, AsText)
