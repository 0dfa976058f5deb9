"""A method of one model rather than of its class, which goes wherever the model goes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any


class InstanceMethod:
    """`function` bound to one `owner`, to be put into its ``__dict__`` in place of its class's
    method of that `name`.

    A bound method of Python's own would be lost in a pickle, which keeps its name alone and so
    finds the class's. This one keeps its function, and a deep copy is bound to the copied owner. It
    has what makes accelerate's `compile_regions` bind it anew to the model that it makes.
    """

    def __init__(self, function: Callable[..., Any], owner: Any, name: str | None = None) -> None:
        self.__func__, self.__self__ = function, owner
        self.__name__ = name or function.__name__

    @property
    def __code__(self) -> CodeType:
        """What torch.export looks at."""
        code: CodeType = self.__func__.__code__
        return code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's method, and the keywords that the function adds."""
        own = inspect.signature(self.__func__).parameters.values()
        plain = inspect.signature(getattr(type(self.__self__), self.__name__))
        of_class = list(plain.parameters.values())[1:]  # without self
        names = {parameter.name for parameter in of_class}
        added = [p for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in names]
        last = [p for p in of_class if p.kind is inspect.Parameter.VAR_KEYWORD]
        return plain.replace(parameters=[*(p for p in of_class if p not in last), *added, *last])


def is_method(candidate: Any, function: Callable[..., Any]) -> bool:
    """Whether a callable is `function` bound to a model, or a wrapper around it that says so, as
    accelerate's hooks do."""
    while candidate is not None:
        if getattr(candidate, "__func__", None) is function:
            return True
        candidate = getattr(candidate, "__wrapped__", None)
    return False
