"""`undertow demo`: a Transformer, the same with TurboConn and the same with T²MLR, trained on
Parity and compared."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from undertow.files import write_json, write_text
from undertow.lab.evaluation.accuracy import accuracy_by_length
from undertow.lab.evaluation.figures import accuracy_figure
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.results import Accuracy
from undertow.lab.runs.run import Run
from undertow.lab.tables import percent, table
from undertow.lab.training.run import train
from undertow.mapping import from_mapping
from undertow.paths import takes_paths

TRAINED = 16
LENGTHS = (8, 12, 16, 20, 24, 32, 40, 48, 64)
GENERATED = 96  # tokens, for the time of one

COMMON: dict[str, Any] = {
    "task": {"kind": "parity", "template": "bare", "min_length": 1, "max_length": TRAINED},
    "model": {"architecture": "llama", "layers": 2, "width": 64, "heads": 4},
    "solver": "sequential",  # exactly reproducible: `Auto` decides by the clock
    "training": {
        "steps": 1000,
        "batch": 64,
        "learning_rate": 2e-3,
        "gate_multiplier": 30.0,
        "threads": 1,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "Transformer": {},
    "TurboConn": {
        "recurrence": {
            "kind": "turboconn",
            "connections": [[1, 0]],
            "lag": 1,
            "alpha": 1.0,
            "rank": 64,
        }
    },
    "T²MLR": {"recurrence": {"kind": "t2mlr", "first_layer": 0, "last_layer": 1}},
}


@dataclasses.dataclass
class Compared:
    """One model of the demo."""

    accuracies: list[Accuracy]
    parameters: int
    seconds_per_step: float
    seconds_per_token: float

    def at(self, length: int) -> str:
        return percent(next(a.share for a in self.accuracies if a.length == length))


@takes_paths
def demo(output: Path, examples: int = 256) -> str:
    """Train, evaluate and compare; writes `demo.md`, `demo.json` and `demo.png` and returns the
    table."""
    models = {name: compare(name, output, examples) for name in MODELS}
    header = [
        "model",
        "1x (16 bits)",
        "2x (32)",
        "4x (64)",
        "parameters",
        "ms a step",
        "ms a token",
    ]
    rows = [
        [
            name,
            *(model.at(factor * TRAINED) for factor in (1, 2, 4)),
            f"{model.parameters:,}",
            f"{1000 * model.seconds_per_step:.1f}",
            f"{1000 * model.seconds_per_token:.2f}",
        ]
        for name, model in models.items()
    ]
    text = table(header, rows)
    write_text(output / "demo.md", text + "\n")
    write_json(output / "demo.json", models)
    accuracy_figure(
        {name: model.accuracies for name, model in models.items()},
        output / "demo.png",
        title="Parity, trained on 1 to 16 bits",
        unit="bits",
        trained=TRAINED,
        chance=0.5,
    )
    return (
        f"\nAccuracy on Parity, trained on 1 to {TRAINED} bits:\n\n{text}\n\nFigure: "
        f"{output / 'demo.png'}"
    )


def compare(name: str, output: Path, examples: int) -> Compared:
    """Train one of the models, or find it trained, and measure it."""
    recipe = from_mapping(
        Recipe,
        {**COMMON, "name": name.lower().replace("²", "2"), "output": str(output), **MODELS[name]},
    )
    run = Run(train(recipe, seed=0, description=f"{name:11}"))
    model, tokenizer = run.load()
    return Compared(
        accuracies=accuracy_by_length(
            model, tokenizer, recipe.task, LENGTHS, examples, batch=examples
        ),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds_per_step=statistics.median(run.seconds_per_step()),
        seconds_per_token=seconds_per_token(model),
    )


def seconds_per_token(model: Any) -> float:
    """The median time of a token of greedy generation for one row, over a few runs."""
    prompt = torch.full((1, 8), model.config.vocab_size - 1)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=GENERATED,
            max_new_tokens=GENERATED,
            do_sample=False,
        )
        times.append((time.perf_counter() - started) / GENERATED)
    return statistics.median(times[1:])  # the first warms up
