"""Run a benchmark: one table, JSON beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig

from undertow.files import write_json, write_text
from undertow.lab.benchmark.candidates import (
    MATCHED,
    compiled,
    matched,
    prefill_solvers,
    recurrent,
    training_candidates,
    transformer,
)
from undertow.lab.benchmark.memory import peak_memory
from undertow.lab.benchmark.settings import Bench
from undertow.lab.benchmark.timing import Timing, TokenClock, interleaved, timed
from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.versions import versions
from undertow.lab.tables import table
from undertow.lab.training.machine import check_memory
from undertow.mapping import to_mapping
from undertow.paths import takes_paths


@takes_paths
def bench(settings: Bench, output: Path) -> str:
    """Measure what the settings ask for; writes `bench.json` and `bench.md` and returns the table.

    Raises:
        ConfigError: the model is larger than the memory.
    """
    quiet_libraries()
    parameters = sum(
        parameter.numel() for parameter in transformer(settings, device="meta").parameters()
    )
    check_memory(parameters, parameters if "train" in settings.measures else 0)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    results = {
        name: measure(settings)
        for kind, (name, measure) in MEASURES.items()
        if kind in settings.measures
    }
    rows = []
    for measure, candidates in results.items():
        for name, timing in candidates.items():
            unit = (
                f"{timing.seconds / 2**20:.0f} MiB"
                if "memory" in measure
                else f"{1000 * timing.seconds:.1f} ms"
            )
            spread = "" if "memory" in measure else f"{timing.low:.2f} to {timing.high:.2f}"
            error = "" if timing.error is None else f"{timing.error:.1e}"
            rows.append([measure, name, unit, f"{timing.ratio:.2f}", spread, error])
    text = table(
        ["measure", "candidate", "median", f"over the {MATCHED}", "spread", "logits off by"], rows
    )
    record = {
        "settings": to_mapping(settings),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "results": results,
    }
    write_json(output / "bench.json", record)
    write_text(output / "bench.md", text + "\n")
    return text


def train_step(settings: Bench) -> dict[str, Timing]:
    ids = torch.randint(
        0, settings.vocabulary, (settings.batch, settings.tokens), device=settings.device
    )

    def step(model: Any) -> Any:
        def run() -> None:
            model.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        return run

    models = {name: make().train() for name, make in training_candidates(settings).items()}
    for model in models.values():
        compiled(settings, model)
    steps = {name: timed(step(model), settings.device) for name, model in models.items()}
    return interleaved(steps, MATCHED, settings.rounds)


def prefill(settings: Bench) -> dict[str, Timing]:
    ids = torch.randint(0, settings.vocabulary, (1, settings.prompt), device=settings.device)
    models = {MATCHED: matched(settings).eval()}
    models |= {
        name: recurrent(settings, prefill=solver).eval()
        for name, solver in prefill_solvers().items()
    }

    @torch.inference_mode()
    def logits(model: Any, kept: int = 1) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=kept).logits
        return found

    steps = {name: timed(partial(logits, model), settings.device) for name, model in models.items()}
    timings = interleaved(steps, MATCHED, settings.rounds)
    exact = logits(models["exact"], settings.prompt)
    errors = {
        name: float((logits(models[name], settings.prompt) - exact).abs().max())
        for name in prefill_solvers()
    }
    return {
        name: dataclasses.replace(timing, error=errors.get(name))
        for name, timing in timings.items()
    }


def decode(settings: Bench) -> dict[str, Timing]:
    """`generate()`, a token of it; the prefill of the prompt is a measure of its own."""
    models = {
        "transformer": transformer(settings).eval(),
        MATCHED: matched(settings).eval(),
        "recurrent": recurrent(settings).eval(),
    }
    timings: dict[str, Timing] = {}
    for how in settings.decoding:
        for rows in settings.rows:
            ids = torch.randint(0, settings.vocabulary, (rows, 16), device=settings.device)
            steps = {
                name: partial(seconds_per_token, settings, model, ids, how)
                for name, model in models.items()
                if how == "dynamic" or name != "transformer"
            }
            asked = (f", {rows} rows" if rows > 1 else "") + (
                ", compiled" if how == "compiled" else ""
            )
            found = interleaved(steps, MATCHED, settings.rounds)
            timings |= {name + asked: timing for name, timing in found.items()}
    return timings


def seconds_per_token(settings: Bench, model: Any, ids: torch.Tensor, how: str) -> float:
    """The median time from one generated token to the next."""
    count, ticks = settings.generated, TokenClock(settings.device)
    given: dict[str, Any] = {}
    if how == "compiled":
        compiling = CompileConfig(fullgraph=True, dynamic=False)
        vars(compiling)["_compile_all_devices"] = True  # else on accelerators alone
        given = {"cache_implementation": "static", "compile_config": compiling}
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        streamer=ticks,
        **given,
    )
    return ticks.seconds_per_token


def memory(settings: Bench) -> dict[str, Timing]:
    """Bytes in place of seconds."""
    peaks = {name: peak_memory(settings, name) for name in training_candidates(settings)}
    return {name: Timing(peak, peak / peaks[MATCHED], 0, 0) for name, peak in peaks.items()}


MEASURES: dict[str, tuple[str, Callable[[Bench], dict[str, Timing]]]] = {
    "train": ("train step", train_step),
    "prefill": ("prefill", prefill),
    "decode": ("decode, a token", decode),
    "memory": ("peak memory of a step", memory),
}
"""By the name that settings give them: what the table calls them, and what measures them."""
