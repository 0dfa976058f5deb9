"""Attach a recurrence, in time or in depth, to a Hugging Face causal language model, in place, and
take it off again."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from undertow.depth.looped import Loop, Looped
from undertow.errors import ConfigError
from undertow.fields import shown
from undertow.host.arguments import CallLayout
from undertow.host.given import check_model, check_recurrence, check_solver
from undertow.host.hooks import install, uninstall
from undertow.host.learning import learn
from undertow.host.looping import DepthReport
from undertow.host.method import InstanceMethod
from undertow.host.offloading import device_of
from undertow.host.owners import ATTACHMENT, Owners, in_use
from undertow.host.saving import note_solvers, save_pretrained, warn_of_unknown_class
from undertow.host.stack import Stack
from undertow.host.support import check_config, find_stack
from undertow.host.vocabulary import ExpectedEmbedding
from undertow.pathways import contract
from undertow.pathways.base import Pathway, Recurrence
from undertow.solvers import Auto, Sequential, Solver, SolverMemory, SolverReport

Model = TypeVar("Model", bound=nn.Module)


class Attachment(nn.Module):
    """The recurrence of a hosted model: a submodule of its backbone, called `recurrence`. Holds no
    state of a forward.

    Attributes:
        settings, pathway: the recurrence in time that was attached, and its modules; None where
            there is none.
        looped, loop: likewise in depth.
        solver: how the states of a sequence are found in training.
        prefill: how they are found without gradients, where a sequence starts.
        memory: what the solver keeps between training forwards; nothing of a sequence.
        report: what the solver did in the last forward.
        depth_report: how deep each token went in it.
        owners: the model and the backbone that it is part of.
        stack_name: the attribute of the backbone that holds its layers.
        only_in_adapters: whether it came with a PEFT adapter (`adapters.py`) and rests while no
            such adapter is in use.
    """

    settings: Recurrence | None
    pathway: Pathway | None
    looped: Looped | None
    loop: Loop | None

    def __init__(self, owners: Owners, stack_name: str) -> None:
        super().__init__()
        self.settings, self.pathway, self.looped, self.loop = None, None, None, None
        self.stack_name = stack_name
        self.solver: Solver = Auto()
        self.prefill: Solver = Sequential()
        self.memory = SolverMemory()
        self.owners = owners
        self.decode = ExpectedEmbedding(owners)
        self.input_names = list(inspect.signature(owners.backbone.forward).parameters)
        self.report: SolverReport | None = None
        self.only_in_adapters = False
        self.depth_report: DepthReport | None = None
        config = owners.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 1)
        self.grouped_queries = getattr(config, "num_key_value_heads", heads) not in (None, heads)
        self.masks_by_positions = getattr(config, "_attn_implementation", None) not in (
            "sdpa",
            "eager",
            None,
        )
        self.arity = 0
        self.layouts: list[CallLayout] = []

    def add(self, recurrence: Recurrence | Looped) -> None:
        """Take in one recurrence, in time or in depth, of which there may be one each.

        Raises:
            ConfigError: there is one of its kind, it does not fit the model, or the two do not fit
                each other.
        """
        stack: nn.ModuleList = getattr(self.owners.backbone, self.stack_name)
        width = self.owners.model.config.get_text_config().hidden_size
        # Quantised weights are packed in types of their own; the recurrence is of the type of those
        # that are not.
        plain = (p for p in stack.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
        parameter = next(plain, next(stack.parameters()))
        settings, looped = self.settings, self.looped
        if (looped if isinstance(recurrence, Looped) else settings) is not None:
            raise ConfigError(
                "the model already has a recurrence of this kind; call undertow.detach(model) first"
            )
        pathway, loop = self.pathway, self.loop
        with torch.device(device_of(stack) if parameter.is_meta else parameter.device):
            if isinstance(recurrence, Looped):
                recurrence.check_layers(len(stack))
                looped, loop = recurrence, recurrence.build(width).to(parameter.dtype)
            else:
                settings, pathway = recurrence, recurrence.build(len(stack), width, self.decode)
                pathway.to(parameter.dtype).train(self.owners.model.training)
                contract.check_sites(pathway, len(stack))
        if pathway is not None and looped is not None:
            check_sites(pathway, looped)
        self.settings, self.pathway, self.looped, self.loop = settings, pathway, looped, loop
        for module in self.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]  # transformers must not initialise it again

    def _replicate_for_data_parallel(self) -> Any:
        raise ConfigError(
            "nn.DataParallel runs copies of a model whose recurrence would be that of the first; "
            "start one process a GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one"
        )

    def remove(self, recurrence: Recurrence | Looped) -> None:
        if isinstance(recurrence, Looped):
            self.looped = self.loop = None
        else:
            self.settings = self.pathway = None


def check_sites(pathway: Pathway, looped: Looped) -> None:
    """Refuse a pathway that reads or writes inside the core, where a token's residual stream passes
    several times."""
    dropped = set(range(looped.picked[-1])) - set(looped.picked)
    for site in sorted(pathway.reads | pathway.writes):
        if looped.core[0] < site <= looped.core[-1]:
            raise ConfigError(
                f"the recurrence in time reads or writes at layer {site}'s input, inside the "
                f"looped layers {looped.core[0]} to {looped.core[-1]}; use sites before or after "
                "these"
            )
        if site in dropped and site - 1 in dropped:
            raise ConfigError(
                f"the recurrence in time reads or writes at layer {site}'s input, which the loop "
                "leaves out"
            )


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
        model: a decoder-only `transformers` model with a language-model head.
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
        prefill: without gradients: a prompt's prefill, or evaluation. Exact unless set here.

    Token-by-token generation, and whatever continues a cache, is exact whatever this says.
    """
    check_solver("solver", solver)
    check_solver("prefill", prefill)
    if isinstance(prefill, Auto):
        raise ConfigError(
            "Auto adapts while a model is trained; choose a fixed solver for prefill, such as Scan"
        )
    attachment = find_attachment(model)
    if solver is not None and solver != attachment.solver:
        attachment.memory = SolverMemory()
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


def find_backbone(model: nn.Module) -> nn.Module:
    """The module that owns the hosted layer list."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{shown(model)} is no model; give one that undertow.attach was called with"
        )
    for module in model.modules():
        attachment = module._modules.get(ATTACHMENT)
        if attachment is not None and isinstance(in_use(attachment), Attachment):
            return module
    raise ConfigError("the model has no recurrence; call undertow.attach(model, recurrence) first")


def find_attachment(model: nn.Module) -> Attachment:
    """The recurrence of a hosted model, wrapped by PEFT or not."""
    return in_use(find_backbone(model)._modules[ATTACHMENT])


def has_recurrence(model: nn.Module) -> bool:
    """Whether a model, wrapped by PEFT or not, carries a recurrence, with parameters or without."""
    try:
        find_attachment(model)
    except ConfigError:
        return False
    return True


def recurs_in_time(model: nn.Module) -> bool:
    """Whether a model, wrapped by PEFT or not, carries a recurrence in time."""
    return has_recurrence(model) and find_attachment(model).pathway is not None


def find_pathway(model: nn.Module) -> Pathway:
    """The modules of a hosted model's recurrence in time.

    Raises:
        ConfigError: it has none.
    """
    pathway = find_attachment(model).pathway
    if pathway is None:
        raise ConfigError(
            "the model has no recurrence in time; attach TurboConn, T2MLR or SoftToken first"
        )
    return pathway
