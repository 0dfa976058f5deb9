"""Measure this library's Huginn beside the public implementation: same weights, same CPU, one
thread, settings taking turns.

    git clone https://github.com/seal-rg/recurrent-pretraining
    python scripts/compare_huginn.py recurrent-pretraining/recpre [--output
    docs/results/depth/public.json]

The folder must hold raven_modeling_minimal.py and raven_config_minimal.py. Times are processor
time, so that other work on the machine counts for little; medians over the rounds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from undertow.depth import DepthCache, LatentDifference
from undertow.depth.cache import cache_keyword
from undertow.lab.tables import table
from undertow.models import HuginnConfig, HuginnForCausalLM

DEPTH, VOCABULARY, EXIT = 32, 1024, LatentDifference(0.03)


def public_model(
    folder: Path, shape: dict[str, int], weights: dict[str, torch.Tensor]
) -> tuple[Any, Any]:
    """The public model with these weights, and its module."""
    package = types.ModuleType("public")
    package.__path__ = [str(folder)]
    sys.modules["public"] = package
    module = importlib.import_module("public.raven_modeling_minimal")
    config = importlib.import_module("public.raven_config_minimal")
    # Written for an older transformers: it ties and initialises in ways that this one refuses.
    module.CausalLMOutputRecurrentLatents = types.SimpleNamespace
    module.RavenForCausalLM.tie_weights = lambda self, *args, **settings: None
    module.RavenForCausalLM._tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    module.RavenForCausalLM.post_init = lambda self: None
    model = module.RavenForCausalLM(config.RavenConfig(**shape))
    model.lm_head.weight = model.transformer.wte.weight
    model.load_state_dict(weights)
    return model.eval(), module


def seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


@torch.no_grad()
def decode_public(model: Any, module: Any, prompt: torch.Tensor, new: int) -> float:
    """Seconds a token of decoding after the prompt ``[B, T]``."""
    length, cache, steps = prompt.shape[1], module.HuginnDynamicCache(), torch.tensor([DEPTH, 0])

    def run(tokens: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + tokens.shape[1])
        settings = {
            "past_key_values": cache,
            "use_cache": True,
            "num_steps": steps,
            "cache_position": positions,
        }
        return model(tokens, **settings).logits[:, -1:].argmax(-1)  # type: ignore[no-any-return]

    token = run(prompt, 0)

    def decode() -> None:
        nonlocal token
        for number in range(new):
            token = run(token, length + number)

    return seconds(decode) / new


@torch.no_grad()
def decode_ours(model: Any, prompt: torch.Tensor, new: int, **settings: Any) -> tuple[float, float]:
    """Seconds a token, and iterations a token."""
    cache = DepthCache(tokens=prompt.shape[1] + new)
    inputs = {cache_keyword(): cache, "depth": DEPTH, **settings}
    token = model(prompt, **inputs).logits[:, -1:].argmax(-1)

    def decode() -> None:
        nonlocal token
        for _ in range(new):
            token = model(token, **inputs).logits[:, -1:].argmax(-1)

    taken = seconds(decode) / new
    return taken, float(cache.depths[:, prompt.shape[1] :].float().mean())


def train(run: Callable[[], torch.Tensor], batch: torch.Tensor) -> None:
    F.cross_entropy(run()[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()


def differences(folder: Path) -> dict[str, Any]:
    """The largest difference of the logits at r iterations, their spread, and the largest of the
    gradients after 3 + 2.

    With gradient the blocks run as they are defined, without it as lean ones do.
    """
    torch.manual_seed(0)
    shape = {
        "n_embd": 96,
        "n_heads": 4,
        "vocab_size": 512,
        "intermediate_size": 256,
        "block_size": 256,
    }
    ours = HuginnForCausalLM(HuginnConfig(**shape)).eval()
    public, _ = public_model(
        folder, shape | {"mean_recurrence": DEPTH, "mean_backprop_depth": 8}, ours.state_dict()
    )
    ids, initial = torch.randint(0, 512, (2, 17)), torch.randn(2, 17, 96)
    found: dict[str, Any] = {}
    for depth in (1, 4, 32):
        for name, graded in (("blocks", True), ("lean", False)):
            with torch.set_grad_enabled(graded):
                mine = ours(ids, depth=(0, depth), initial=initial).logits
                other = public(ids, num_steps=torch.tensor([0, depth]), input_states=initial).logits
            found[f"r = {depth}, {name}"] = float((mine - other).detach().abs().max())
            found["spread"] = float(other.detach().std())
    for model, inputs in ((ours, {"depth": (3, 2)}), (public, {"num_steps": torch.tensor([3, 2])})):
        start = {"initial" if model is ours else "input_states": initial}
        train(lambda: model(ids, **inputs, **start).logits, ids)  # noqa: B023
    theirs = dict(public.named_parameters())
    found["gradients"] = max(
        float((p.grad - theirs[name].grad).abs().max()) for name, p in ours.named_parameters()
    )
    return found


def compare(
    folder: Path, width: int, context: int, rows: int, rounds: int, new: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = {
        "n_embd": width,
        "n_heads": 4,
        "vocab_size": VOCABULARY,
        "intermediate_size": 3 * width,
        "block_size": 1024,
    }
    ours = HuginnForCausalLM(HuginnConfig(**shape, mean_recurrence=DEPTH)).eval()
    public, module = public_model(
        folder, shape | {"mean_recurrence": DEPTH, "mean_backprop_depth": 8}, ours.state_dict()
    )
    prompt = torch.randint(0, VOCABULARY, (rows, context))
    batch = torch.randint(0, VOCABULARY, (2, 64))
    steps = torch.tensor([DEPTH - 8, 8])
    found: dict[str, list[float]] = {
        name: [] for name in ("public", "ours", "exit", "depth", "step public", "step ours")
    }
    for _ in range(rounds):
        found["public"].append(decode_public(public, module, prompt, new))
        found["ours"].append(decode_ours(ours, prompt, new)[0])
        taken, depth = decode_ours(ours, prompt, new, exit_rule=EXIT)
        found["exit"].append(taken)
        found["depth"].append(depth)
        found["step public"].append(
            seconds(lambda: train(lambda: public(batch, num_steps=steps).logits, batch))
        )
        found["step ours"].append(
            seconds(lambda: train(lambda: ours(batch, depth=(DEPTH - 8, 8)).logits, batch))
        )
    middle = {name: statistics.median(values) for name, values in found.items()}
    return {
        "width": width,
        "context": context,
        "rows": rows,
        "milliseconds a token": {name: 1e3 * middle[name] for name in ("public", "ours", "exit")},
        "iterations with exit": middle["depth"],
        "times as fast": {name: middle["public"] / middle[name] for name in ("ours", "exit")},
        "training step, seconds": {name: middle[f"step {name}"] for name in ("public", "ours")},
        "rounds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 384])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    equal = differences(options.folder)
    print(json.dumps(equal), flush=True)
    results = []
    for width in options.widths:
        for context in options.contexts:
            results.append(
                compare(options.folder, width, context, options.rows, options.rounds, options.new)
            )
            done = results[-1]
            taken, times, steps = (
                done[key]
                for key in ("milliseconds a token", "times as fast", "training step, seconds")
            )
            line = [
                width,
                context,
                *[f"{taken[name]:.1f}" for name in taken],
                f"{done['iterations with exit']:.1f}",
            ]
            line += [
                f"{times['ours']:.2f}",
                f"{times['exit']:.2f}",
                f"{steps['public']:.2f}",
                f"{steps['ours']:.2f}",
            ]
            names = [
                "width",
                "context",
                "public ms",
                "ours ms",
                "exit ms",
                "iterations",
                "times",
                "times, exit",
            ]
            print(table([*names, "step public s", "step ours s"], [line]), flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": 1,
            "depth": DEPTH,
        }
        options.output.write_text(
            json.dumps({**versions, "differences": equal, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
