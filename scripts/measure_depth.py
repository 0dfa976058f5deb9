"""Measure what a finished run's recurrent-depth model costs and gains while it decodes: exits,
caches, drafts.

    python scripts/measure_depth.py runs/depth-text/seed-0 [--rows 8] [--prompt 32] [--new 32]

Every row of held-out text is decoded token by token, teacher-forced, so that all settings see the
same text: the loss is that of decoding through the cache. Times are processor time of one thread,
settings taking turns, the least of the rounds: what the wall clock shows where nothing else runs.
The wall clock is noted beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from undertow.depth import (
    Anchor,
    ArgmaxStability,
    Budget,
    CachePolicy,
    Cosine,
    DepthCache,
    EntropyDifference,
    ExitRule,
    Full,
    KLDivergence,
    Last,
    LatentDifference,
    MinPKL,
)
from undertow.depth.cache import cache_keyword
from undertow.depth.handle import depths_of, get_depth
from undertow.depth.speculative import generate_speculative
from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.run import Run
from undertow.lab.tables import table
from undertow.lab.tasks import TaskDataset

RULES: tuple[ExitRule, ...] = (
    LatentDifference(0.1),
    LatentDifference(0.03),
    Cosine(1e-3),
    KLDivergence(5e-4),
    MinPKL(1e-5),
    EntropyDifference(1e-3),
    ArgmaxStability(5),
)
POLICIES: dict[str, CachePolicy] = {
    "full": Full(),
    "budget 4": Budget(4),
    "anchor 2+2": Anchor(2, 2),
    "last": Last(),
}
REPEATS = 8


@dataclass
class Decoded:
    """Loss and iterations of a decoded token, its seconds by processor and by wall clock, and the
    cache at the end."""

    loss: float
    iterations: float
    seconds: float
    wall: float
    cache: DepthCache


@torch.no_grad()
def decode(
    model: Any,
    text: torch.Tensor,
    prompt: int,
    policy: CachePolicy | None = None,
    warm_start: bool = False,
    **settings: Any,
) -> Decoded:
    """Decode the rows of text ``[B, T]`` after `prompt` tokens."""
    cache = DepthCache(policy, tokens=text.shape[1])
    inputs: dict[str, Any] = {cache_keyword(): cache, "use_cache": True, **settings}
    logits = [model(text[:, :prompt], **inputs).logits[:, -1:]]
    depths = []
    started, wall = time.process_time(), time.perf_counter()
    for at in range(prompt, text.shape[1] - 1):
        output = model(text[:, at : at + 1], **inputs, warm_start=warm_start)
        logits.append(output.logits)
        depths.append(depths_of(model, output))
    seconds, wall = (
        (time.process_time() - started) / len(depths),
        (time.perf_counter() - wall) / len(depths),
    )
    loss = F.cross_entropy(
        torch.cat(logits, dim=1).flatten(0, 1).float(), text[:, prompt:].flatten()
    )
    return Decoded(
        float(loss), float(torch.cat(depths, dim=1).float().mean()), seconds, wall, cache
    )


def measure(run: Path, rows: int, prompt: int, new: int, deep: int) -> dict[str, Any]:
    quiet_libraries()
    torch.set_num_threads(1)
    recipe = Run(run).recipe()
    model, tokenizer = Run(run).load()
    model.eval()
    held_out = TaskDataset(recipe.task, "valid", tokenizer, 4 * rows)
    encoded = [held_out[i]["input_ids"] for i in range(4 * rows)]
    text = torch.tensor([ids[: prompt + new] for ids in encoded if len(ids) >= prompt + new][:rows])
    depth = deep * get_depth(model)

    exits: dict[str, Any] = {
        f"fixed {depth}": {},
        f"fixed {get_depth(model)}": {"depth": get_depth(model)},
    }
    exits |= {
        f"{rule.kind} {getattr(rule, 'threshold', getattr(rule, 'times', ''))}": {"exit_rule": rule}
        for rule in RULES
    }
    exits["kl 0.0005, warm start"] = {"exit_rule": KLDivergence(5e-4), "warm_start": True}
    timed: dict[str, list[Decoded]] = {name: [] for name in exits}
    for _ in range(REPEATS):
        for name, settings in exits.items():
            timed[name].append(decode(model, text, prompt, **({"depth": depth} | settings)))
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "rows": len(text),
        "prompt": prompt,
        "new": new,
        "limit": depth,
        "exits": {},
        "caches": {},
    }
    for name, runs in timed.items():
        best = min(runs, key=lambda run: run.seconds)
        results["exits"][name] = {
            "loss": best.loss,
            "iterations": best.iterations,
            "milliseconds": 1e3 * best.seconds,
            "of no exit": best.seconds / min(run.seconds for run in timed[f"fixed {depth}"]),
            "wall milliseconds": 1e3 * min(run.wall for run in runs),
        }
    for name, policy in POLICIES.items():
        found = decode(model, text, prompt, policy, depth=depth)
        memory = found.cache.memory()
        results["caches"][name] = {
            "loss": found.loss,
            "slots": memory.slots,
            "bytes a token": memory.used_per_token,
        }
    results["speculative"] = drafts(model, text[:1, :prompt], new, depth)
    return results


def drafts(model: Any, prompt: torch.Tensor, new: int, depth: int) -> dict[str, Any]:
    """Self-speculative against plain greedy decoding, one row."""
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "depth": depth,
    }
    settings |= {"eos_token_id": None, "max_new_tokens": new, "min_new_tokens": new}
    names = {f"draft {d}, lookahead {n}": (d, n) for d in (1, 2, 4, 8) if d < depth for n in (2, 4)}
    found: dict[str, Any] = {"plain": {}} | {name: {} for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(REPEATS):
        started = time.process_time()
        plain = model.generate(
            prompt, **settings, **{cache_keyword(): DepthCache(tokens=prompt.shape[1] + new)}
        )
        seconds["plain"].append(time.process_time() - started)
        for name, (draft, lookahead) in names.items():
            started = time.process_time()
            done = generate_speculative(
                model,
                prompt,
                max_new_tokens=new,
                depth=depth,
                draft_depth=draft,
                lookahead=lookahead,
                eos_token_id=(),
            )
            seconds[name].append(time.process_time() - started)
            found[name] = {
                "identical": bool(torch.equal(done.sequences, plain)),
                "acceptance": done.acceptance,
            }
    for name, taken in seconds.items():
        found[name]["milliseconds a token"] = 1e3 * min(taken) / new
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument(
        "--deep", type=int, default=4, help="the limit of the depth, in trained means"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = measure(options.run, options.rows, options.prompt, options.new, options.deep)
    for section in ("exits", "caches", "speculative"):
        names = sorted({key for entry in results[section].values() for key in entry})
        lines = [
            [name, *[f"{entry[key]:.4g}" if key in entry else "" for key in names]]
            for name, entry in results[section].items()
        ]
        print(table([section, *names], lines) + "\n")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
