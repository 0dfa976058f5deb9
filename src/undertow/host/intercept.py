"""What surrounds a hosted forward: the arguments that are the recurrence's own, and the layer list
that records.

Both hold in a context that is set for one call and reset by their token in `finally`, so that
nothing that a call was given reaches another, whatever interrupts it, runs inside it or beside it.

The `forward` of the model and of its backbone are methods of the instance, as hooks do not see a
KeyboardInterrupt. A hook makes sure that the backbone's is still there. The functions are plain
ones of the module that they are called on, so that copies of the model work.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from undertow.errors import ConfigError, DataError, UnsupportedArchitectureError
from undertow.host.attachment import ATTACHMENT, Attachment, in_use
from undertow.host.compiling import eager_where_cached
from undertow.host.context import CallContext
from undertow.host.decoding import Decoding, one_more_token
from undertow.host.forward import Forward
from undertow.host.given import ARGUMENTS, _validate_model_kwargs, check_given, check_names
from undertow.host.heads import writes_text
from undertow.host.learning import Observer, learn
from undertow.host.offloading import bring_in
from undertow.host.owners import Owners
from undertow.host.stack import Stack, current_forward
from undertow.host.trainers import check_trainer

# Where a `forward` that stood in a module's own `__dict__` before ours is kept, such as one of
# accelerate's; and the owners.
EARLIER, OWNERS = "_undertow_earlier_forward", "_undertow_owners"


# --- methods of one model


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


# --- what is put on a model


@dataclass
class Given:
    """The recurrence's arguments of one call of a model, until its backbone takes them."""

    owners: Owners
    arguments: dict[str, Any]
    taken: bool = False


given: CallContext[Given] = CallContext("undertow_arguments")


def install(owners: Owners) -> None:
    """Put methods on a model and its backbone, and a hook on that."""
    model, backbone = owners.model, owners.backbone
    for module, function in ((model, call_model), (backbone, call_backbone)):
        earlier = vars(module).get("forward")
        if earlier is not None and not isinstance(
            earlier, InstanceMethod
        ):  # which would be one of ours, left behind
            vars(module)[EARLIER] = earlier
        module.forward = InstanceMethod(function, module, "forward")
    vars(model)[OWNERS] = owners
    if writes_text(model):
        for method in (_validate_model_kwargs, prepare_inputs_for_generation):
            setattr(model, method.__name__, InstanceMethod(method, model))
    owners.hooks = [backbone.register_forward_pre_hook(check_forward)]


def uninstall(model: nn.Module, backbone: nn.Module, hooks: list[RemovableHandle]) -> None:
    """Take them off again."""
    for hook in hooks:
        hook.remove()
    for name in (OWNERS, "prepare_inputs_for_generation", "_validate_model_kwargs"):
        vars(model).pop(name, None)
    for module in (model, backbone):
        earlier = vars(module).pop(EARLIER, None)
        if is_method(vars(module).get("forward"), call_model) or is_method(
            vars(module).get("forward"), call_backbone
        ):
            del vars(module)["forward"]
            if earlier is not None:
                vars(module)["forward"] = earlier


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module had before the recurrence was attached."""
    earlier: Callable[..., Any] | None = vars(module).get(EARLIER)
    return functools.partial(type(module).forward, module) if earlier is None else earlier


# --- the model's call


def call_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own forward, which is not given the recurrence's arguments: they wait for its
    backbone.

    Raises:
        ConfigError: the backbone that has the recurrence did not run.
    """
    check_names(self, kwargs)
    if "peft_config" in vars(self):
        warn_of_adapters(self)
    owners: Owners = vars(self)[OWNERS]
    waiting = Given(owners, {name: kwargs.pop(name) for name in ARGUMENTS if name in kwargs})
    token = given.set(waiting)
    try:
        output = plain_forward(self)(*args, **kwargs)
    finally:
        given.reset(token)
    if not waiting.taken and not isinstance(current_forward.get(), Observer):
        backbone = type(owners.backbone).__name__
        raise ConfigError(
            f"{type(self).__name__} did not run the {backbone} that the recurrence was attached "
            "to, but another one; put that one back and call undertow.detach, or attach to the "
            "model as it is now"
        )
    return output


def warn_of_adapters(model: Any) -> None:
    """Say of an adapter of another kind than LoRA that its folder will not tell of the
    recurrence."""
    for name, config in model.peft_config.items():
        if (kind := getattr(config, "peft_type", "LORA")) not in ("LORA", "UNDERTOW"):
            warnings.warn(
                f"the adapter {name!r} is of PEFT's kind {getattr(kind, 'value', kind)}, whose "
                "folder does not tell of the recurrence: load it on this hosted model, saved by "
                "save_pretrained, or use LoRA, which remembers it",
                stacklevel=2,
            )


def prepare_inputs_for_generation(
    self: Any,
    input_ids: torch.Tensor,
    *args: Any,
    recurrent_mask: torch.Tensor | None = None,
    depth: Any = None,
    exit_rule: Any = None,
    warm_start: Any = None,
    resume: Any = None,
    state_seed: Any = None,
    watch: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The class's own, which also passes on what the recurrence is given. A `recurrent_mask` grows
    with the sequence."""
    own = dict(
        depth=depth,
        exit_rule=exit_rule,
        warm_start=warm_start,
        resume=resume,
        state_seed=state_seed,
        watch=watch,
    )
    inputs: dict[str, Any] = type(self).prepare_inputs_for_generation(
        self, input_ids, *args, **kwargs
    )
    inputs |= {name: value for name, value in own.items() if value is not None}
    if recurrent_mask is not None:
        if recurrent_mask.ndim != 2:
            raise DataError(
                f"recurrent_mask has shape {list(recurrent_mask.shape)}; it needs one entry a "
                "token: [rows, tokens]"
            )
        new = (
            inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        )
        # What is cached is counted, as `input_ids` holds no prompt that was given as embeddings.
        cache = next((value for value in inputs.values() if isinstance(value, Cache)), None)
        total = new.shape[1] + (0 if cache is None else int(cache.get_seq_length()))
        generated = recurrent_mask.new_ones(
            recurrent_mask.shape[0], max(total - recurrent_mask.shape[1], 0)
        )
        inputs["recurrent_mask"] = torch.cat([recurrent_mask, generated], dim=1)[
            :, total - new.shape[1] : total
        ]
    return inputs


# --- the backbone's call


def check_forward(backbone: nn.Module, args: Any) -> None:
    if not is_method(vars(backbone).get("forward"), call_backbone):
        raise ConfigError(
            f"the forward of {type(backbone).__name__} was replaced after the recurrence was "
            "attached, which would leave it out; replace it first, and attach then"
        )


def call_backbone(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The backbone's own forward, over a layer list that records.

    Raises:
        UnsupportedArchitectureError: its recorded layers did not run, so that the recurrence would
            be lost.
        ConfigError: its layers, or the recurrence, are others than when it was attached.
    """
    plain = plain_forward(self)
    running = current_forward.get()
    if isinstance(running, Observer) and running.backbone is self:
        return plain(*args, **kwargs)
    hosted = start(self, args, kwargs)
    token = current_forward.set(hosted)
    try:
        if hosted is None:
            return plain(*args, **kwargs)
        with eager_where_cached(hosted.stack, self.config, hosted.inputs):
            output = plain(*args, **kwargs)
        if not hosted.ran:
            raise UnsupportedArchitectureError(
                f"the layers of {type(self).__name__} did not run where the recurrence was "
                "attached: its forward no longer iterates over "
                f"{type(self).__name__}.{hosted.attachment.stack_name}; undo what changed that, or "
                "call undertow.detach"
            )
        return output
    finally:
        current_forward.reset(token)


def start(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward | None:
    """The hosted forward of one call, whose own arguments are taken out of `kwargs`; None while the
    recurrence rests."""
    wrapped: Any = backbone._modules.get(ATTACHMENT)
    if wrapped is None:
        raise ConfigError(
            "the recurrence was taken out of the model, but not by undertow.detach; call that "
            "instead"
        )
    attachment: Attachment = in_use(wrapped)
    inputs = {**dict(zip(attachment.input_names, args, strict=False)), **kwargs}
    waiting = given.get()
    if waiting is not None and waiting.owners is attachment.owners and not waiting.taken:
        inputs |= waiting.arguments
        waiting.taken = True  # whatever else calls the backbone meanwhile is given nothing
    for name in ARGUMENTS:
        kwargs.pop(name, None)
    if (
        attachment is not wrapped
        and attachment.only_in_adapters
        and attachment is wrapped.original_module
    ):
        return None
    if (first := next(attachment.parameters(), None)) is not None and first.is_meta:
        bring_in(attachment)
    if not attachment.layouts:
        learn(attachment)  # by forwards of the model's own, which are given nothing
    check_given(attachment, inputs)
    if torch.is_grad_enabled():
        check_trainer(attachment)
    stack = recording_list(backbone, attachment)
    if (cache := one_more_token(attachment, inputs)) is not None:
        return Decoding(stack, attachment, inputs, cache)
    return Forward(stack, attachment.arity, attachment, inputs)


def recording_list(backbone: nn.Module, attachment: Attachment) -> Stack:
    """The backbone's list of layers, which may have been rebuilt, as `compile_regions` does, around
    as many layers."""
    stack: Any = backbone._modules.get(attachment.stack_name)
    if type(stack) is nn.ModuleList:
        stack.__class__ = Stack
    if not isinstance(stack, Stack) or len(stack) != len(attachment.layouts):
        found = f"{len(stack)} layers" if isinstance(stack, Stack) else f"a {type(stack).__name__}"
        raise ConfigError(
            f"{type(backbone).__name__}.{attachment.stack_name} is {found} now, and was "
            f"{len(attachment.layouts)} layers when the recurrence was attached; call "
            "undertow.detach before changing the layers, and attach again after it"
        )
    return stack
