"""Count what FSDP2 gathers and reduces in a step, by solver, and scale it to the 1B recipe.

Two processes on this CPU train a model of 32 narrow layers with T²MLR over layers 9 to 24, as
recipes/gpu/ has it, one row of 24 tokens each; bytes are counted as PyTorch asks for them. They
scale with the number of parameters in the layers and outside them.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import undertow

LAYERS = 32
SOLVERS = {
    "the plain model": None,
    "jacobi(16,4)": undertow.Jacobi(16, 4),
    "scan(2,1)": undertow.Scan(2, 1),
    "auto": undertow.Auto(),
    "exact": undertow.Sequential(),
}
# The 1B recipe: parameters of a layer, and of all else, the recurrence included.
LAYER, REST = 28_265_600, 91_448_002
# Bytes a second to each GPU: within a node by NVLink, and between nodes by one 400 Gb/s card each.
LINKS = {8: 450e9, 64: 50e9}


class Bytes(TorchDispatchMode):
    """Counts the bytes of whole weights that are gathered, and of whole gradients reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.reductions = self.gathered = self.reduced = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if name.startswith("c10d._allgather_base_"):
            self.gathers += 1
            self.gathered += args[0].numel() * args[0].element_size()
        elif name.startswith("c10d._reduce_scatter_base_"):
            self.reductions += 1
            self.reduced += args[1].numel() * args[1].element_size()
        return function(*args, **(kwargs or {}))


def count(rank: int, port: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, solver in SOLVERS.items():
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=LAYERS,
                num_attention_heads=2,
                tie_word_embeddings=True,
            )
        )
        layer = sum(p.numel() for p in model.model.layers[0].parameters())
        if solver is not None:
            undertow.attach(model, undertow.T2MLR.from_paper(9, 24), solver)
        rest = sum(p.numel() for p in model.parameters()) - LAYERS * layer
        for each in model.model.layers:
            fully_shard(each, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ids = torch.randint(0, 64, (1, 24))
        for _ in range(2):  # the first step initialises
            found = Bytes()
            with found:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        # Layers gathered a step: what is left without one gather of all else, in fp32.
        layers = round((found.gathered - 4 * rest) / (4 * layer))
        reduced = round((found.reduced - 4 * rest) / (4 * layer))
        if rank == 0:
            results.put((name, found.gathers, found.reductions, layers, reduced))
    distributed.destroy_process_group()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(count, (port, results), nprocs=2)
    columns = [f"on {gpus} GPUs, s" for gpus in LINKS]
    names = ["solver", "gathers", "reductions", "gathered, GB", "reduced, GB", *columns]
    print("|", " | ".join(names), "|")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for _ in SOLVERS:
        name, gathers, reductions, layers, reduced = results.get()
        gathered = 2 * (layers * LAYER + REST)  # bfloat16
        summed = 4 * (reduced * LAYER + REST)  # fp32
        seconds = [(gathered + summed) * (gpus - 1) / gpus / speed for gpus, speed in LINKS.items()]
        cells = [gathers, reductions, f"{gathered / 1e9:.2f}", f"{summed / 1e9:.2f}"]
        print("|", " | ".join(map(str, [name, *cells, *(f"{s:.3f}" for s in seconds)])), "|")


if __name__ == "__main__":
    main()
