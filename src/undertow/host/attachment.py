"""The recurrence of a hosted model as a submodule of its backbone, and how to find it again."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn

from undertow.depth.forward import DepthReport
from undertow.depth.handle import no_recurrence
from undertow.depth.looped import Loop, Looped
from undertow.distributed import same_everywhere
from undertow.errors import ConfigError, shown
from undertow.host.arguments import CallLayout
from undertow.host.offloading import device_of
from undertow.host.owners import Owners
from undertow.host.vocabulary import ExpectedEmbedding, final_norm
from undertow.pathways import contract
from undertow.pathways.base import Pathway, Recurrence
from undertow.solvers import Auto, Plans, Sequential, Solver, SolverReport

# The name of the submodule.
ATTACHMENT = "recurrence"


class Attachment(nn.Module):
    """The recurrence of a hosted model: a submodule of its backbone, called `recurrence`. Holds no
    state of a forward.

    Attributes:
        settings, pathway: the recurrence in time that was attached, and its modules; None where
            there is none.
        loop: the modules of the recurrence in depth, with its settings; None where there is none.
        solver: how the states of a sequence are found in training.
        prefill: how they are found without gradients, where a sequence starts.
        plans: what the solver keeps between training forwards; nothing of a sequence.
        report: what the solver did in the last forward.
        depth_report: how deep each token went in it.
        owners: the model and the backbone that it is part of.
        stack_name: the attribute of the backbone that holds its layers.
        only_in_adapters: whether it came with a PEFT adapter (`adapters.py`) and rests while no
            such adapter is in use.
    """

    settings: Recurrence | None
    pathway: Pathway | None
    loop: Loop | None

    def __init__(self, owners: Owners, stack_name: str) -> None:
        super().__init__()
        self.settings = self.pathway = self.loop = None
        self.stack_name = stack_name
        self.solver: Solver = Auto()
        self.prefill: Solver = Sequential()
        self.plans = Plans()
        self.owners = owners
        self.decode = ExpectedEmbedding(owners)
        self.input_names = list(inspect.signature(owners.backbone.forward).parameters)
        self.collects_itself = any(name.startswith("output_") for name in self.input_names)
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
        if (self.loop if isinstance(recurrence, Looped) else self.settings) is not None:
            raise ConfigError(
                "the model already has a recurrence of this kind; call undertow.detach(model) first"
            )
        settings = self.settings
        pathway = self.pathway
        loop = self.loop
        with torch.device(device_of(stack) if parameter.is_meta else parameter.device):
            if isinstance(recurrence, Looped):
                recurrence.check_layers(len(stack))
                loop = recurrence.build(width).to(parameter.dtype)
                same_everywhere(loop, stack)
            else:
                settings, pathway = recurrence, recurrence.build(len(stack), width, self.decode)
                pathway.to(parameter.dtype).train(self.owners.model.training)
                contract.check_sites(pathway, len(stack))
                same_everywhere(pathway, stack)
        if pathway is not None and loop is not None:
            check_sites(pathway, loop.settings)
        self.settings, self.pathway = settings, pathway
        self.loop = loop
        for module in self.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]  # transformers must not initialise it again

    @property
    def looped(self) -> Looped | None:
        """The settings of the recurrence in depth, if there is one."""
        return None if self.loop is None else self.loop.settings

    @property
    def repeated(self) -> list[int]:
        """The layers that a forward may run several times."""
        block = set() if self.pathway is None else set(self.pathway.block)
        return sorted(block | (set() if self.loop is None else set(self.loop.settings.core)))

    @property
    def stack(self) -> nn.ModuleList:
        """The layers of the backbone."""
        found: nn.ModuleList = getattr(self.owners.backbone, self.stack_name)
        return found

    def depth_handle(self) -> HostedDepth:
        """The recurrence in depth of the attachment that is in use.

        Raises:
            ConfigError: there is none.
        """
        return HostedDepth(in_use(self.owners.backbone._modules[ATTACHMENT]))

    def _replicate_for_data_parallel(self) -> Any:
        raise ConfigError(
            "nn.DataParallel runs copies of a model whose recurrence would be that of the first; "
            "start one process a GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one"
        )

    def remove(self, recurrence: Recurrence | Looped) -> None:
        if isinstance(recurrence, Looped):
            self.loop = None
        else:
            self.settings = self.pathway = None


class HostedDepth:
    """The handle of a hosted model's recurrence in depth (see `DepthHandle`)."""

    def __init__(self, attachment: Attachment) -> None:
        if attachment.loop is None:
            raise no_recurrence()
        self.attachment, self.loop = attachment, attachment.loop
        self.settings = attachment.loop.settings

    @property
    def stack(self) -> nn.ModuleList:
        return self.attachment.stack

    @property
    def layers(self) -> int:
        return len(self.stack)

    @property
    def looped(self) -> list[nn.Module]:
        layers = list(self.stack)
        return [self.loop, *(layers[index] for index in self.settings.core)]

    @property
    def owner(self) -> str:
        loop, beside = self.settings, self.attachment.settings
        owner = (
            f"a loop of layers {loop.prelude}, {loop.core}, {loop.coda} with injection "
            f"{loop.injection}"
        )
        owner += "" if beside is None else f" beside {beside}"
        return f"{owner} and norm" if loop.norm else owner

    def set_depth(self, depth: int) -> None:
        self.loop.settings = self.settings = dataclasses.replace(self.settings, depth=depth)

    def depths(self, output: Any) -> torch.Tensor:
        report = self.attachment.depth_report
        assert report is not None
        return report.depths

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attachment.decode.logits(hidden)

    def gate(self, state: torch.Tensor) -> torch.Tensor:
        norm = final_norm(self.attachment.owners) if self.settings.norm else nn.Identity()
        return self.loop.exit_probability(norm(state))


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


# --- finding it


def in_use(module: Any) -> Any:
    """The module itself; the copy in use where PEFT wraps it to train and save one for each
    adapter, or what is compiled."""
    if "_orig_mod" in module._modules:  # by torch.compile, in accelerate's `compile_regions`
        module = module._modules["_orig_mod"]
    copies = getattr(module, "modules_to_save", None)
    if copies is None:
        return module
    active = module.active_adapters
    return module.original_module if module.disable_adapters or not active else copies[active[0]]


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
