"""The processes that train one model together, as `torchrun` or `accelerate launch` starts them.

The first of them, rank 0, alone locks the run's folder, writes, evaluates and decides; the others
ask it. All functions here are called by every process at the same place of its work. Alone, a
process agrees with itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from undertow.errors import ConfigError, ProcessLostError

T = TypeVar("T")
# The longest that the others wait for one, which may read a large corpus meanwhile.
PATIENCE = timedelta(hours=4)
# What a launcher tells each process of the others, beside their number.
LAUNCHED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
# How long to wait for all of them to start, and for another one to tell of an error.
MEETING, GRACE = timedelta(seconds=60), 1.0
# Where the processes find each other; there is none before they have joined.
_store: distributed.Store | None = None


def world() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this one."""
    return 0 if world() == 1 else int(os.environ.get("RANK", "0"))


def first() -> bool:
    """Whether this is the one that writes and decides."""
    return rank() == 0


@contextmanager
def joined() -> Iterator[None]:
    """Within it, the other processes are joined, if there are any. It may stand inside itself.

    Raises:
        ProcessLostError: one of them cannot be reached, or ended meanwhile.
    """
    if world() == 1:
        yield
        return
    outermost = not distributed.is_initialized()
    with reachable():
        if outermost:
            join()
        yield
        if outermost:
            distributed.destroy_process_group()


def join() -> None:
    """Find the other processes, by what their launcher put into the environment.

    Raises:
        ConfigError: nothing says where they are, or the port where they should meet is in use.
    """
    global _store
    if missing := [name for name in LAUNCHED if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE is {world()}, but {', '.join(missing)} not set; start the processes by "
            f"torchrun --nproc-per-node {world()} -m undertow train ..., or unset WORLD_SIZE"
        )
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        _store, own, count = next(rendezvous("env://", timeout=MEETING))
    except distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"the processes cannot meet at port {os.environ.get('MASTER_PORT')}, which another "
            "program uses; choose another one, as by torchrun --master-port"
        ) from error
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=distributed.PrefixStore("training", _store),
        rank=own,
        world_size=count,
        timeout=PATIENCE,
    )


@contextmanager
def reachable() -> Iterator[None]:
    """Say of a process that went away what happened, in place of what its connection says."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, distributed.DistError) or any(
            sign in str(error) for sign in ("Connection closed", "Connection reset", "gloo", "NCCL")
        )
        if world() == 1 or not lost:
            raise
        text = str(error).strip().splitlines()
        raise ProcessLostError(
            f"another of the {world()} processes ended or cannot be reached "
            f"({text[-1] if text else type(error).__name__}); see what it says, and start the same "
            "command again, which goes on from the newest checkpoint"
        ) from error


def of_first(work: Callable[[], T]) -> T:
    """What `work` returns in the first process, which alone does it; JSON must be able to hold it.

    Raises:
        ProcessLostError: it failed there, and says why itself.
    """
    if world() == 1:
        return work()
    text = ""  # unless it is done
    try:
        if first():
            text = json.dumps(work())
    finally:
        text = text_of_first(text)
    if not text:
        raise ProcessLostError("the first process stopped; see what it says")
    result: T = json.loads(text)
    return result


def text_of_first(text: str) -> str:
    """The text that the first process gives; nothing is unpickled for it."""
    content = text.encode()
    size = torch.tensor(len(content))
    distributed.broadcast(size, src=0)
    shared = torch.zeros(int(size), dtype=torch.uint8)
    if first():
        shared = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else shared
    distributed.broadcast(shared, src=0)
    return bytes(shared.tolist()).decode()


def largest(values: list[int]) -> list[int]:
    """The largest of all processes, value by value."""
    if world() == 1:
        return values
    shared = torch.tensor(values)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return [int(value) for value in shared]


def total(values: list[int]) -> list[int]:
    """The sum over all processes, value by value."""
    if world() == 1:
        return values
    shared = torch.tensor(values)
    distributed.all_reduce(shared)
    return [int(value) for value in shared]


def wait() -> None:
    """Wait until every process is here."""
    if world() > 1:
        with reachable():
            largest([0])


def check_same(what: str, value: Any) -> None:
    """Make sure that all processes have the same value, which JSON can hold.

    Raises:
        ConfigError: they do not.
    """
    if world() == 1:
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    high, low = largest([number, -number])
    if high != -low:
        raise ConfigError(
            f"the {world()} processes have other {what}; start all of them with the same command, "
            "the same files and the same version of undertow"
        )


def speaks(error: BaseException) -> bool:
    """Whether this process is the one to tell of an error: the others have the same one, or lost
    the process that had it."""
    if world() == 1 or _store is None:
        return first()
    if isinstance(error, ProcessLostError):
        time.sleep(GRACE)  # the one that knows more speaks first
    try:
        return int(_store.add("undertow/told", 1)) == 1
    except RuntimeError:  # the first process keeps the store, and ended: by the same error, or lost
        return isinstance(error, ProcessLostError)
