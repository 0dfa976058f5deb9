"""Layers compiled one by one, for the passes over all tokens that a training consists of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from undertow.errors import ConfigError
from undertow.host.support import find_stack

Model = TypeVar("Model", bound=nn.Module)


def compile_layers(model: Model) -> Model:
    """Compile each layer of a model by `torch.compile`, in place, before or after a recurrence is
    attached, and return the model.

    Forwards without a cache run the compiled layers, for any number of tokens without compiling
    again: the sweeps of a training, and their adjoint. With a cache the layers run as they are: a
    compiled one would be compiled anew for each layer's number. So do an exact rollout's groups,
    whose keys and values are views of one buffer, of which a compiled graph knows nothing.

    A compiled backward pass may by default reuse the memory of what it was given, and an adjoint
    gradient walks it several times. So this takes that liberty from whatever is compiled in this
    process from now on (`torch._functorch.config.donated_buffer`), and keeps its graphs apart from
    those that earlier processes cached with it.

    Raises:
        UnsupportedArchitectureError: the model has no list of layers.
        ConfigError: it is no transformers model, and wraps none.
    """
    import torch._functorch.config

    inner = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    if inner is None:
        raise ConfigError(
            f"compile_layers takes a transformers model, not a {type(model).__name__}; load one, "
            "as by AutoModelForCausalLM.from_pretrained(...)"
        )
    torch._functorch.config.donated_buffer = False
    stack = inner.get_submodule(find_stack(inner))
    for layer in stack.children():
        layer.compile(dynamic=True, options=APART)
    _compiled.add(stack)
    return model


# Changes no code but the key under which it is cached, which says nothing of donated buffers.
APART = {"comment_origin": True}


# The lists of layers that were compiled.
_compiled: WeakSet[nn.Module] = WeakSet()


def eager_layers(stack: nn.Module | None) -> AbstractContextManager[None]:
    """Within it the layers of a list run as they are, compiled or not."""
    if torch.compiler.is_compiling() or stack not in _compiled:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def eager_where_cached(
    stack: nn.Module | None, config: Any, inputs: dict[str, Any]
) -> AbstractContextManager[None]:
    """`eager_layers` in a forward of the backbone that is given a cache or makes one."""
    if torch.compiler.is_compiling() or stack not in _compiled:
        return nullcontext()
    asked = inputs.get("use_cache")
    makes = getattr(config, "use_cache", False) if asked is None else asked
    caches = makes or any(isinstance(value, Cache) for value in inputs.values())
    return eager_layers(stack) if caches else nullcontext()
