"""Layers compiled one by one, for the passes over all tokens that a training consists of."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from undertow.errors import ConfigError
from undertow.host.support import find_stack

Model = TypeVar("Model", bound=nn.Module)


def compile_layers(model: Model) -> Model:
    """Compile each layer of a model by `torch.compile`, in place, before or after a recurrence is
    attached, and return the model.

    Forwards without a cache run the compiled layers, for any number of tokens without compiling
    again: the sweeps of a training, and their adjoint. A training's exact rollout runs each group
    of `lag` tokens through the whole recurrent block in one compiled call, which takes a minute to
    compile, and another as soon as lengths differ. With a cache the layers run as they are: a
    compiled one would be compiled anew for each layer's number.

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
APART: dict[str, Any] = {"comment_origin": True}


# The lists of layers that were compiled, and those of which a rollout's groups cannot be.
_compiled: WeakSet[nn.Module] = WeakSet()
_without_groups: WeakSet[nn.Module] = WeakSet()


def compiles_groups(stack: nn.Module | None) -> bool:
    """Whether the groups of a rollout are compiled for a list of layers: where the layers are, all
    whole in this process."""
    return (
        stack is not None
        and stack in _compiled
        and stack not in _without_groups
        and not torch.compiler.is_compiling()
        and not any(isinstance(each, DTensor) for each in stack.parameters())
    )


def runs_eagerly(stack: nn.Module | None, error: Exception) -> None:
    """From now on the groups of a rollout run as they are, as compiling one failed."""
    assert stack is not None
    _without_groups.add(stack)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    warnings.warn(
        f"the groups of an exact rollout of this model cannot be compiled, and run eagerly: "
        f"{reason}",
        stacklevel=2,
    )


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
