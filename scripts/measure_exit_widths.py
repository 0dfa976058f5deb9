"""From what width on do rows that exit save time? Random weights and scripted exits, so that only
the cost is measured.

    python scripts/measure_exit_widths.py [--rows 8] [--output docs/results/depth/exit-widths.json]

Every row gets depths of its own, drawn so that few tokens are deep (1 to 16, about 5 in the mean).
A batch without exits runs every token 16 times; if rows could not leave, it would run as deep as
its deepest row. Processor time of one thread, settings taking turns, medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from undertow.depth import DepthCache, Scripted
from undertow.depth.cache import cache_keyword
from undertow.lab.tables import table
from undertow.models import HuginnConfig, HuginnForCausalLM

LIMIT, VOCABULARY, NEW = 16, 1024, 6


def script(length: int) -> tuple[int, ...]:
    """Depths of the positions: 1 to the limit, few of them deep."""
    generator = random.Random(0)
    return tuple(min(LIMIT, 1 + int(generator.expovariate(1 / 4))) for _ in range(length))


@torch.no_grad()
def decode(
    model: Any, prompt: torch.Tensor, mask: torch.Tensor, **settings: Any
) -> tuple[float, torch.Tensor]:
    """Seconds a step of all rows after the prompt ``[B, T]``, and the depths of the new tokens
    ``[B, n]``."""
    cache, length = DepthCache(tokens=prompt.shape[1] + NEW), prompt.shape[1]
    inputs: dict[str, Any] = {cache_keyword(): cache, "depth": LIMIT, **settings}
    model(prompt, attention_mask=mask[:, :length], **inputs)
    token = prompt[:, -1:]
    started = time.process_time()
    for number in range(NEW):
        model(token, attention_mask=mask[:, : length + number + 1], **inputs)
    return (time.process_time() - started) / NEW, cache.depths[:, length:]


def measure(width: int, rows: int, context: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = {"n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 1}
    config = HuginnConfig(
        n_embd=width,
        n_heads=4,
        vocab_size=VOCABULARY,
        intermediate_size=3 * width,
        block_size=1024,
        **shape,
    )
    model = HuginnForCausalLM(config).eval()
    prompt = torch.randint(0, VOCABULARY, (rows, context))
    mask = torch.ones(rows, context + NEW, dtype=torch.long)
    for row in range(rows):
        mask[row, :row] = 0  # the rows stand at positions, and so at depths, of their own
    rule = Scripted(script(context + NEW))
    depths = decode(model, prompt, mask, exit_rule=rule)[1].float()
    times: dict[str, list[float]] = {"no exit": [], "exit": []}
    for _ in range(rounds):
        times["no exit"].append(decode(model, prompt, mask)[0])
        times["exit"].append(decode(model, prompt, mask, exit_rule=rule)[0])
    taken = {name: statistics.median(values) for name, values in times.items()}
    return {
        "width": width,
        "rows": rows,
        "context": context,
        "iterations": float(depths.mean()) / LIMIT,
        "deepest row": float(depths.amax(0).mean()) / LIMIT,
        "milliseconds": {name: 1e3 * value for name, value in taken.items()},
        "time": taken["exit"] / taken["no exit"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512, 768])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for rows in options.rows:
        for width in options.widths:
            done = measure(width, rows, options.context, options.rounds)
            results.append(done)
            line = [
                rows,
                width,
                f"{done['iterations']:.2f}",
                f"{done['deepest row']:.2f}",
                f"{done['time']:.2f}",
            ]
            line += [f"{value:.1f}" for value in done["milliseconds"].values()]
            names = ["rows", "width", "iterations", "deepest row", "time", "ms no exit", "ms exit"]
            print(table(names, [line]), flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(
            json.dumps({"torch": torch.__version__, "threads": 1, "results": results}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
