"""Decisions that the processes of a distributed run take alike.

A solver that stops or measures by what it finds in its own batch runs the layers as often as that
batch asks for. Where the layers are sharded (FSDP), each run of one is a collective operation, and
processes that disagree wait for ever.
"""

from __future__ import annotations

import torch
from torch import distributed

from undertow.distributed import several_processes


def largest(value: float, on_cuda: bool) -> float:
    """The largest `value` of all processes; the value itself where there is one process. Every
    process must call it."""
    if not several_processes():
        return value
    shared = torch.tensor(value, dtype=torch.float64, device="cuda" if on_cuda else "cpu")
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return float(shared)
