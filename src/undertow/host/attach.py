"""Attach a recurrence, in time or in depth, to a Hugging Face causal language model, in place, and
take it off again."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from undertow.depth.forward import DepthReport
from undertow.depth.looped import Looped
from undertow.errors import ConfigError
from undertow.host.attachment import ATTACHMENT, Attachment, find_attachment, find_backbone
from undertow.host.given import check_model, check_recurrence, check_solver
from undertow.host.intercept import InstanceMethod, install, uninstall
from undertow.host.learning import learn
from undertow.host.owners import Owners
from undertow.host.saving import note_solvers, save_pretrained, warn_of_unknown_class
from undertow.host.stack import Stack
from undertow.host.support import check_config, find_stack
from undertow.pathways.base import Recurrence
from undertow.solvers import Plans, Solver, SolverReport

Model = TypeVar("Model", bound=nn.Module)


def attach(model: Model, recurrence: Recurrence | Looped, solver: Solver | None = None) -> Model:
    """Give `model` a recurrence in time or in depth, in place, and return it. A second call adds
    the other kind.

    The model keeps its class, its module paths and its state-dict keys, so that Trainer, PEFT, TRL,
    `generate()` and lm-eval go on working; the recurrence's parameters join it as the backbone's
    submodule `recurrence`. With the papers' initialisation the model's outputs do not change.
    `save_pretrained` then writes a folder that `AutoModelForCausalLM.from_pretrained` loads after
    `import undertow`; a model class of your own must be registered with `AutoModelForCausalLM` for
    that, where it is saved or only where it is loaded.

    `output_hidden_states`, `output_attentions` and `output_router_logits` return what the base
    model returns, one entry a layer: of the pass that gave the output, or of an exact rollout's
    groups of tokens one after another. A looped layer's is its last iteration's. Where a model
    collects these in its own loop over the layers (BLOOM, Falcon, GPT-Neo, MPT), asking for them
    raises `UnsupportedArchitectureError`; beside an exit rule it raises `ConfigError`.

    Args:
        model: a decoder-only `transformers` model with a language-model head, or with one that
            scores a sequence, as `AutoModelForSequenceClassification` makes it for a reward.
        recurrence: `TurboConn`, `T2MLR` or `SoftToken`, in time; `Looped`, in depth.
        solver: how the states of a sequence are found in training, `Auto` if left out. Without
            gradients it is always by the exact rollout, unless `set_solver` says otherwise.

    Raises:
        UnsupportedArchitectureError: the model's layers pass on more than the residual stream, or
            keep recurrent states.
        ConfigError: the recurrence does not fit the model, or the model has one.
    """
    check_model(model)
    check_recurrence(recurrence)
    check_solver("solver", solver)
    assert isinstance(model, PreTrainedModel)
    stack_name = find_stack(model)
    parent_name, _, attribute = stack_name.rpartition(".")
    backbone, stack = model.get_submodule(parent_name), model.get_submodule(stack_name)
    check_config(model)
    warn_of_unknown_class(model)
    if hasattr(backbone, ATTACHMENT):
        attachment = find_attachment(model)
        attachment.add(recurrence)
    else:
        owners = Owners(model, backbone)
        attachment = Attachment(owners, attribute)
        attachment.add(recurrence)
        stack.__class__ = Stack
        backbone.register_module(ATTACHMENT, attachment)
        install(owners)
        model.save_pretrained = InstanceMethod(save_pretrained, model)  # type: ignore[method-assign]
    attachment.solver = solver or attachment.solver
    try:
        if not next(stack.parameters()).is_meta:
            learn(attachment)
    except Exception:
        attachment.remove(recurrence)
        if attachment.pathway is None and attachment.loop is None:
            detach(model)
        raise
    return model


def detach(model: Model) -> Model:
    """Take the recurrence off again, in place: the plain base model, with the base parameters as
    they are now.

    Raises:
        ConfigError: the model has no recurrence, or PEFT adapters hold it.
    """
    backbone = find_backbone(model)
    attachment = find_attachment(model)
    if adapters := list(getattr(backbone._modules[ATTACHMENT], "modules_to_save", ())):
        raise ConfigError(
            f"PEFT adapters hold the recurrence: {', '.join(adapters)}; call merge_and_unload() or "
            "unload() first"
        )
    owner = attachment.owners.model  # which PEFT may have wrapped
    uninstall(owner, backbone, attachment.owners.hooks)
    vars(owner).pop("save_pretrained", None)
    stack = getattr(backbone, attachment.stack_name)
    if isinstance(stack, Stack):  # and none that it was replaced by
        stack.__class__ = nn.ModuleList  # type: ignore[assignment]
    delattr(backbone, ATTACHMENT)
    return model


def set_solver(
    model: nn.Module, solver: Solver | None = None, prefill: Solver | None = None
) -> None:
    """Choose how the states of a whole sequence are found.

    Args:
        solver: in training, wherever gradients are on.
        prefill: without gradients: a prompt's prefill, or evaluation. Exact unless set here;
            `Auto(tolerance)` sweeps each prompt until its states have settled to that.

    Token-by-token generation, and whatever continues a cache, is exact whatever this says.
    """
    check_solver("solver", solver)
    check_solver("prefill", prefill)
    attachment = find_attachment(model)
    if solver is not None and solver != attachment.solver:
        attachment.plans = Plans()
    attachment.solver = solver or attachment.solver
    attachment.prefill = prefill or attachment.prefill
    note_solvers(attachment)


def report(model: nn.Module) -> SolverReport | None:
    """What the solver did in the last forward; None before the first."""
    return find_attachment(model).report


def depth_report(model: nn.Module) -> DepthReport | None:
    """How deep each token of the last forward went; None before the first, or without a recurrence
    in depth."""
    return find_attachment(model).depth_report
