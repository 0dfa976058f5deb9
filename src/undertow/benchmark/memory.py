"""Peak memory of a training step, each candidate in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import torch

from undertow.benchmark.candidates import training_candidates
from undertow.benchmark.settings import Bench
from undertow.config import from_mapping, to_mapping


def peak_memory(bench: Bench, candidate: str) -> int:
    """Bytes that a training step takes at its peak, beyond the model: measured in a fresh process."""
    given = json.dumps({"bench": to_mapping(bench), "candidate": candidate})
    command = [sys.executable, "-m", "undertow.benchmark.memory"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(bench: Bench, model: Any) -> int:
    ids = torch.randint(0, bench.vocabulary, (bench.batch, bench.tokens), device=bench.device)
    small = ids[:1, :2]
    model(input_ids=small, labels=small, use_cache=False).loss.backward()  # gradients are there before it is measured
    if bench.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return int(torch.cuda.max_memory_allocated() - before)
    before = resident()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def main() -> None:
    given = json.loads(sys.stdin.read())
    bench = from_mapping(Bench, given["bench"])
    if bench.threads is not None:
        torch.set_num_threads(bench.threads)
    print(measure(bench, training_candidates(bench)[given["candidate"]]().train()))


if __name__ == "__main__":
    main()
