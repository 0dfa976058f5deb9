"""Peak memory of a training step, each candidate in a process of its own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from undertow.errors import ConfigError
from undertow.lab.benchmark.candidates import compiled, training_candidates
from undertow.lab.benchmark.settings import Bench
from undertow.mapping import from_mapping, to_mapping


def peak_memory(bench: Bench, candidate: str) -> int:
    """Bytes that a training step takes at its peak, beyond the model: measured in a fresh
    process."""
    given = json.dumps({"bench": to_mapping(bench), "candidate": candidate})
    command = [sys.executable, "-m", "undertow.lab.benchmark.memory"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def status(field: str) -> int:
    """A field of this process's memory status on Linux, in bytes: VmRSS now, VmHWM at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise ConfigError(
        "peak memory on a CPU is read from /proc, which this system lacks; leave out the measure "
        "memory"
    )


def measure(bench: Bench, model: Any) -> int:
    ids = torch.randint(0, bench.vocabulary, (bench.batch, bench.tokens), device=bench.device)
    # Gradients are there before it is measured, and whatever is compiled is.
    small = ids if bench.compile == "regional" else ids[:1, :2]
    compiled(bench, model)(input_ids=small, labels=small, use_cache=False).loss.backward()
    if bench.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return int(torch.cuda.max_memory_allocated() - before)
    gc.collect()
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # the peak starts anew: imports may have had a higher one
    before = status("VmRSS")
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return status("VmHWM") - before


def main() -> None:
    given = json.loads(sys.stdin.read())
    bench = from_mapping(Bench, given["bench"])
    if bench.threads is not None:
        torch.set_num_threads(bench.threads)
    print(measure(bench, training_candidates(bench)[given["candidate"]]().train()))


if __name__ == "__main__":
    main()
