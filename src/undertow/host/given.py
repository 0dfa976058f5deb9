"""What users hand over, checked where it arrives: to `attach`, `set_solver`, a forward and
`generate`.

Most models' forward takes any keyword and drops those it does not know, so that a misspelt
`recurrent_mask` would change nothing, without an error. Unknown names that are near one of ours are
refused; all others are the base model's business.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils import TransformersKwargs

from undertow.depth.arguments import refuse_near
from undertow.depth.looped import Looped
from undertow.errors import ConfigError, DataError, shown
from undertow.host.attachment import Attachment
from undertow.host.heads import scores, writes_text
from undertow.host.looping import LOOP_ARGUMENTS
from undertow.pathways import RECURRENCES, Recurrence
from undertow.solvers import SOLVERS, Solver

# What a model's forward is given for the recurrence, on its way to the backbone's, which some
# models would not pass on.
ARGUMENTS = ("recurrent_mask", *LOOP_ARGUMENTS)
# The values that ask for nothing, besides None.
IDLE = {"warm_start": False, "resume": 0}


# --- attach and set_solver


def check_model(model: Any) -> None:
    """Refuse what is no transformers model, wraps one, or neither writes text nor scores it."""
    name = type(model).__name__
    if isinstance(model, PreTrainedModel):
        if not writes_text(model) and not scores(model):
            raise ConfigError(
                f"{name} has no language-model head; load the model by AutoModelForCausalLM, or by "
                "AutoModelForSequenceClassification for a reward, and attach to that"
            )
        return
    if isinstance(model, type):
        problem = (
            f"the class {model.__name__}; make or load a model first, as by "
            f"{model.__name__}.from_pretrained(...)"
        )
    elif isinstance(model, str):
        problem = (
            f"{shown(model)}; load the model first, as by AutoModelForCausalLM.from_pretrained(...)"
        )
    elif isinstance(model, nn.Module) and any(
        isinstance(each, PreTrainedModel) for each in model.modules()
    ):
        problem = (
            f"a {name} around one; attach before PEFT wraps it, or torch.compile or DataParallel "
            "does"
        )
    else:
        problem = f"a {name}; load one, as by AutoModelForCausalLM.from_pretrained(...)"
    raise ConfigError(f"attach takes a transformers model, not {problem}")


def check_recurrence(recurrence: Any) -> None:
    """Refuse what is given as a recurrence and is not one."""
    if not isinstance(recurrence, Recurrence | Looped):
        kinds: dict[str, Any] = {**RECURRENCES, Looped.kind: Looped}
        raise ConfigError(
            _no_instance(
                "recurrence", recurrence, (Recurrence, Looped), kinds, "undertow.T2MLR(1, 2)"
            )
        )


def check_solver(name: str, solver: Any) -> None:
    """Refuse what is given as a solver and is not one; None keeps the one before."""
    if solver is not None and not isinstance(solver, Solver):
        raise ConfigError(_no_instance(name, solver, (Solver,), SOLVERS, "undertow.Sequential()"))


def _no_instance(
    name: str, value: Any, bases: tuple[type, ...], kinds: Mapping[str, Any], example: str
) -> str:
    """What is wrong with a class, its kind or anything else that stands where an instance is
    needed."""
    named = kinds.get(value.lower().replace("_", "-")) if isinstance(value, str) else value
    if isinstance(named, type) and issubclass(named, bases):
        needed = [
            each.name
            for each in dataclasses.fields(named)  # type: ignore[arg-type]  # settings are dataclasses
            if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        ]
        where = "undertow." if named.__module__.startswith("undertow.") else ""
        example = f"{where}{named.__name__}({', '.join(needed)})"
    return f"{name} is {shown(value)}; give one such as {example}"


# --- a forward and generate


@functools.cache
def known_names(forward: Callable[..., Any]) -> frozenset[str]:
    """The keywords that a class's forward, its layers or their attention read, and those of the
    recurrence."""
    own = inspect.signature(forward).parameters
    return frozenset(
        {
            "return_dict",
            *own,
            *TransformersKwargs.__annotations__,
            *FlashAttentionKwargs.__annotations__,
            *ARGUMENTS,
        }
    )


def check_names(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse keywords that are near one of the recurrence's, and no one's else.

    Raises:
        ConfigError: there is one; names the right one.
    """
    kind: Any = type(model)
    check_each(kind, tuple(given))


@functools.lru_cache(maxsize=64)  # a decoded token is given what the one before it was
def check_each(kind: type[nn.Module], names: tuple[str, ...]) -> None:
    """`check_names` of models of one class."""
    forward: Any = kind.forward
    if unknown := set(names) - known_names(forward):
        refuse_near(kind.__name__, sorted(unknown), ARGUMENTS)


def check_given(attachment: Attachment, inputs: Mapping[str, Any]) -> None:
    """Refuse arguments for a recurrence that the model does not have, and a mask that is not one.

    Raises:
        ConfigError, DataError: there is one; says which.
    """
    asked = [
        name
        for name in ARGUMENTS
        if (value := inputs.get(name)) is not None and not _is_idle(name, value)
    ]
    if not asked:
        return
    if "recurrent_mask" in asked:
        if attachment.pathway is None:
            raise ConfigError(
                "recurrent_mask is given, but the model has no recurrence in time; leave it out, "
                "or attach one such as undertow.T2MLR first"
            )
        check_mask(inputs["recurrent_mask"])
    of_loop = [name for name in asked if name != "recurrent_mask"]
    if of_loop and attachment.loop is None:
        raise ConfigError(
            f"{of_loop[0]} is given, but the model has no recurrence in depth; attach "
            "undertow.Looped first"
        )


def check_mask(mask: Any) -> None:
    """Refuse a `recurrent_mask` that is not a tensor."""
    if not isinstance(mask, torch.Tensor):
        raise DataError(
            f"recurrent_mask is {shown(mask)}; give a tensor of 1 and 0, one a token, as "
            "attention_mask is"
        )


def _validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
    """The class's check of what `generate` is given, after one for names near ours, for
    which it could not name ours."""
    check_names(self, model_kwargs)
    mask, padding = model_kwargs.get("recurrent_mask"), model_kwargs.get("attention_mask")
    if mask is not None:
        check_mask(mask)
        # An assistant that goes on from its cache is given the mask of the prompt alone.
        fresh = not any(isinstance(value, Cache) for value in model_kwargs.values())
        if (
            fresh
            and isinstance(padding, torch.Tensor)
            and padding.ndim == 2
            and padding.shape != mask.shape
        ):
            raise DataError(
                f"recurrent_mask has shape {list(mask.shape)} and attention_mask "
                f"{list(padding.shape)}; give both one entry a token"
            )
    type(self)._validate_model_kwargs(self, model_kwargs)


def _is_idle(name: str, value: Any) -> bool:
    return name in IDLE and type(value) is type(IDLE[name]) and value == IDLE[name]
