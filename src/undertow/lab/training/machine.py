"""What this machine has, and what certainly does not fit into it: told before it is asked for."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch

from undertow.errors import ConfigError
from undertow.lab.processes import world
from undertow.lab.runs.recipe import TrainingSection


def check_memory(parameters: int, trained: int) -> None:
    """Refuse a model whose weights alone, and without a GPU what training keeps beside them, are
    more than the memory.

    Raises:
        ConfigError: they are.
    """
    kept = 0 if torch.cuda.is_available() else 3 * trained  # gradients, and AdamW's two moments
    needed, there = 4 * (parameters + kept), memory()
    if there is not None and needed > there:
        raise ConfigError(
            f"the model has {parameters:,} parameters, and its training takes "
            f"{needed / 2**30:,.1f} GiB for weights and optimiser, but this machine has "
            f"{there / 2**30:,.1f}; make the model smaller"
        )


def check_order(examples: int) -> None:
    """Refuse a training of more examples than the order of them can be kept in memory for.

    Raises:
        ConfigError: there are too many.
    """
    needed, there = 100 * examples, memory()  # bytes of a number in two lists, and of a length
    if there is not None and needed > there:
        raise ConfigError(
            f"training.steps, batch and accumulate make {examples:,} examples, whose order alone "
            f"takes {needed / 2**30:,.1f} GiB of this machine's {there / 2**30:,.1f}; train fewer "
            "steps"
        )


def memory() -> int | None:
    """Bytes of memory that this process may take, whichever limit is the lowest; None where the
    system does not say."""
    found = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    for path in limits:
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            found.append(int(text))
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        found += [] if soft == resource.RLIM_INFINITY else [soft]
    return min(found, default=None)


def check_machine(section: TrainingSection) -> None:
    """Refuse a batch that the processes cannot share, devices that would not be used, and
    arithmetic that the machine does not have. CPUs have bf16, if slowly.

    Raises:
        ConfigError: the batch is no multiple of the processes, one process sees several GPUs, or
            there is no such arithmetic or sharding.
    """
    processes, devices = world(), torch.cuda.device_count()
    cuda, precision = torch.cuda.is_available(), section.precision
    if section.batch % processes:
        raise ConfigError(
            f"training.batch is {section.batch}, which {processes} processes cannot share evenly; "
            f"use a multiple of {processes}, or another number of processes"
        )
    if processes == 1 and devices > 1:
        raise ConfigError(
            f"one process uses one GPU, but sees {devices}; use all by torchrun --nproc-per-node "
            f"{devices} -m undertow train ..., or set CUDA_VISIBLE_DEVICES to one of them"
        )
    if section.compile == "regional" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ConfigError(
            "training.compile is regional, which needs a C++ compiler, and there is no "
            f"{os.environ.get('CXX', 'g++')}; install one, name it by CXX, or use none"
        )
    if section.sharding == "full" and not (cuda and processes > 1):
        raise ConfigError(
            "training.sharding is full, which needs several processes with a GPU each; start them "
            "by torchrun, or use none"
        )
    if precision == "tf32" and not (cuda and torch.cuda.get_device_capability() >= (8, 0)):
        raise ConfigError(
            "training.precision is tf32, which takes a GPU since Ampere, and there is none; use "
            "fp32"
        )
    if precision == "bf16" and cuda and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"training.precision is bf16, which {torch.cuda.get_device_name()} does not have; use "
            "fp32"
        )
