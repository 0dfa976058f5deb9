"""How long a trained model takes to read a prompt, and how far its logits are then from the exact
rollout's.

    python scripts/measure_prefill.py runs/text-narrow tinyshakespeare.txt [--output
    docs/results/speed/prefill-trained.json]

Every seed of the run reads the same tokens of the text with each of `undertow bench`'s prefill
solvers; solvers take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from undertow import set_solver
from undertow.lab.benchmark.candidates import prefill_solvers
from undertow.lab.benchmark.timing import interleaved, timed
from undertow.lab.runs.run import Experiment, Run
from undertow.lab.runs.versions import versions
from undertow.lab.tables import table
from undertow.solvers import Solver


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor, solver: Solver, kept: int) -> torch.Tensor:
    """Logits of the last `kept` tokens of `ids` ``[1, T]``, read in one call with a cache, as
    `generate()` does."""
    set_solver(model, prefill=solver)
    found: torch.Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=kept).logits
    return found


def measure(folder: Path, text: str, tokens: int, rounds: int) -> dict[str, Any]:
    model, tokenizer = Run(folder).load()
    model.eval()
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt", add_special_tokens=False).input_ids[
        :, :tokens
    ]
    solvers = prefill_solvers()
    steps = {
        name: timed(partial(logits, model, ids, solver, 1), "cpu")
        for name, solver in solvers.items()
    }
    timings = interleaved(steps, "exact", rounds)
    exact = logits(model, ids, solvers["exact"], tokens)
    largest, found = float(exact.abs().max()), {}
    for name, timing in timings.items():
        error = float((logits(model, ids, solvers[name], tokens) - exact).abs().max())
        found[name] = dataclasses.asdict(timing) | {"error": error, "largest logit": largest}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = options.text.read_text(encoding="utf-8")
    found = {
        folder.name: measure(folder, text, options.tokens, options.rounds)
        for folder in [seed.folder for seed in Experiment(options.run).runs]
    }
    rows = [
        [
            seed,
            name,
            f"{1000 * one['seconds']:.0f}",
            f"{1 / one['ratio']:.1f}",
            f"{one['error']:.1e}",
        ]
        for seed, results in found.items()
        for name, one in results.items()
    ]
    print(table(["seed", "prefill", "ms", "times faster than exact", "logits off by"], rows))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "tokens": options.tokens,
            "threads": options.threads,
            "versions": versions(),
            "seeds": found,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
