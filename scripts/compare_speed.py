"""Time this version of Undertow beside an older one: python scripts/compare_speed.py CHECKOUT

Each measure runs in two processes, one a version, which take turns round by round; each times a
Transformer of as many parameters in the same round. A table, and JSON beside it, in
docs/results/speed/before-after.*: each version's time over its Transformer's, medians with their
spread, and this version's over the older one's. Some eight minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "results" / "speed"
MEASURES = {
    "decode, T²MLR, 30 layers of 192": ("decode", "t2mlr", 12),
    "decode, T²MLR, 12 layers of 512": ("decode", "t2mlr-512", 12),
    "decode, TurboConn, 16 layers of 192": ("decode", "turboconn-4", 12),
    "prefill of 2,048, T²MLR, exact": ("prefill", "t2mlr", 3),
    "train, T²MLR, scan(1), adjoint(1)": ("scan(1), adjoint(1)", "t2mlr", 6),
    "train, T²MLR, scan(2,1)": ("scan(2,1)", "t2mlr", 6),
    "train, T²MLR, exact": ("exact", "t2mlr", 4),
    "train, T²MLR, exact, compiled": ("compiled", "t2mlr", 4),
    "train, TurboConn lag 4, exact": ("exact", "turboconn-4", 4),
    "train, TurboConn lag 4, exact, compiled": ("compiled", "turboconn-4", 4),
    "train, TurboConn lag 1, exact": ("exact", "turboconn-1", 3),
    "train, TurboConn lag 1, exact, compiled": ("compiled", "turboconn-1", 3),
}


# --- in a process of one version


def serve(measure: str) -> None:
    """Time the Transformer, then the recurrent model, for each line of the input."""
    import torch

    kind, shape, _ = MEASURES[measure]
    plain, recurrent, rows = models(shape, kind)
    run = {"decode": decoded, "prefill": prefilled}.get(kind, trained)
    for model in (plain, recurrent):  # warm up, and compile
        run(model, rows)
    torch.manual_seed(0)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps([run(plain, rows), run(recurrent, rows)]), flush=True)


def models(shape: str, kind: str) -> tuple[Any, Any, Any]:
    """A Transformer of as many parameters, the recurrent model, and training rows ``[B, T]``."""
    import torch

    import undertow

    layers, width, heads = {"t2mlr-512": (12, 512, 8), "t2mlr": (30, 192, 4)}.get(
        shape, (16, 192, 4)
    )
    recurrence: Any = undertow.T2MLR(12, 17) if shape == "t2mlr" else undertow.T2MLR(4, 6)
    if shape.startswith("turboconn"):
        lag = int(shape[-1])
        recurrence = undertow.TurboConn.preset("llama-3.2-1b", rank=24, lag=lag)
    solver: Any = undertow.Sequential()
    if kind.startswith("scan"):
        adjoint = undertow.Scan(1, 0, gradient="adjoint(1)")
        solver = undertow.Scan(2, 1) if kind == "scan(2,1)" else adjoint
    recurrent = undertow.attach(transformer(layers, width, heads), recurrence, solver)
    with torch.no_grad():  # off zero, so that every branch has work to do
        for name, parameter in recurrent.named_parameters():
            if "recurrence" in name and not parameter.any():
                parameter.normal_(std=1e-3)
    wanted = sum(parameter.numel() for parameter in recurrent.parameters())
    matched = width
    while True:
        plain = transformer(layers, matched, heads, width // heads)
        if sum(parameter.numel() for parameter in plain.parameters()) >= wanted:
            break
        matched += heads
    if kind == "compiled" and hasattr(undertow, "compile_layers"):
        undertow.compile_layers(recurrent)
    batch, tokens = (16, 128) if shape.startswith("turboconn") else (4, 256)
    return plain, recurrent, torch.randint(0, 512, (batch, tokens))


def transformer(layers: int, width: int, heads: int, head_width: int | None = None) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=width,
            intermediate_size=8 * width // 3 // 8 * 8,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=head_width or width // heads,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def trained(model: Any, rows: Any) -> float:
    """Seconds of a training step."""
    model.train()
    model.zero_grad()
    begun = time.perf_counter()
    model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    return time.perf_counter() - begun


def prefilled(model: Any, rows: Any) -> float:
    """Seconds of a prefill of one row of 2,048 tokens."""
    import torch

    with torch.inference_mode():
        begun = time.perf_counter()
        model.eval()(input_ids=rows.reshape(1, -1)[:, :2048].repeat(1, 2), use_cache=True)
        return time.perf_counter() - begun


def decoded(model: Any, rows: Any) -> float:
    """Seconds from one token of `generate` to the next, the median of 40."""
    import torch

    class Clock:
        def __init__(self) -> None:
            self.ticks: list[float] = []

        def put(self, _: Any) -> None:
            self.ticks.append(time.perf_counter())

        def end(self) -> None:
            pass

    clock, ids = Clock(), rows[:1, :16]
    with torch.inference_mode():
        model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=42,
            max_new_tokens=42,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
    ticks = clock.ticks[2:]
    return statistics.median(b - a for a, b in itertools.pairwise(ticks))


# --- between the versions


class Version:
    """A process that times one measure in one version."""

    def __init__(self, checkout: Path, measure: str, threads: int) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(checkout / "src"),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--serve", measure],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        if self.ask() != "ready":
            raise SystemExit(f"{measure} failed in {checkout}; see its error above")

    def ask(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def time(self) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        plain, recurrent = json.loads(self.ask())
        return plain, recurrent

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(before: Path, measure: str, threads: int) -> dict[str, Any]:
    versions = [Version(each, measure, threads) for each in (before, ROOT)]
    times: list[list[tuple[float, float]]] = [[], []]
    for number in range(MEASURES[measure][2]):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(versions[which].time())
    for each in versions:
        each.close()
    over = [[recurrent / plain for plain, recurrent in each] for each in times]
    pairs = zip(*([recurrent for _, recurrent in each] for each in times), strict=True)
    return {
        "before": spread(over[0]),
        "after": spread(over[1]),
        "after over before": spread([new / old for old, new in pairs]),
        "ms": 1000 * statistics.median(recurrent for _, recurrent in times[1]),
    }


def spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def commit(checkout: Path) -> str:
    found = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


def shown(values: list[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*values)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the older version")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--serve", choices=MEASURES, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.serve is not None:
        serve(given.serve)
        return
    if given.before is None or not (given.before / "src" / "undertow").is_dir():
        parser.error(f"{given.before} is no checkout of Undertow; give the older version's folder")
    import torch
    import transformers

    record: dict[str, Any] = {
        "before": commit(given.before),
        "after": commit(ROOT),
        "threads": given.threads,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "results": {},
    }
    lines = [
        "| measure | ms | before | after | after over before |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for measure in given.only:
        found = record["results"][measure] = compare(given.before, measure, given.threads)
        three = [shown(found[name]) for name in ("before", "after", "after over before")]
        lines.append(f"| {measure} | {found['ms']:.1f} | {' | '.join(three)} |")
        print(lines[-1], flush=True)
        OUTPUT.mkdir(parents=True, exist_ok=True)
        (OUTPUT / "before-after.json").write_text(json.dumps(record, indent=2) + "\n")
        (OUTPUT / "before-after.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
