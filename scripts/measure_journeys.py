"""How much of Undertow's code the three main journeys pass through.

    python scripts/measure_journeys.py

Counts the functions and files of the package that are called, and how deep its own calls lie
inside each other, on the way from `undertow train` to the optimiser's first step, in one training
forward with `Auto`, and in one decoded token. Functions that are defined inside others count too;
comprehensions do not. Each journey is made once before, so that imports are not on its way.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

import undertow
from undertow.cli.main import main as command_line

PACKAGE = str(Path(undertow.__file__).parent)
RECIPE = {
    "name": "journey",
    "task": {"kind": "parity", "template": "bare", "max_length": 8},
    "model": {"layers": 2, "width": 16, "heads": 2, "positions": 64},
    "recurrence": {"kind": "t2mlr", "first_layer": 0, "last_layer": 1},
    "training": {"steps": 2, "batch": 4, "evaluate_examples": 8, "warmup_steps": 1},
    "evaluation": {"lengths": [6], "examples": 4},
}


class Arrived(BaseException):
    """The optimiser's step was reached."""


class Journey:
    """Counts the package's calls in a `with` block."""

    def __enter__(self) -> Journey:
        self.functions: set[tuple[str, str]] = set()
        self.depth = self.deepest = 0
        sys.setprofile(self.see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in (
            "<module>",
            "<listcomp>",
            "<genexpr>",
            "<dictcomp>",
            "<setcomp>",
        ):
            return
        if event == "call":
            self.functions.add((code.co_filename, code.co_qualname))
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
        elif event == "return":
            self.depth -= 1

    def tell(self, name: str) -> None:
        files = {file for file, _ in self.functions}
        print(f"| {name} | {len(self.functions)} | {len(files)} | {self.deepest} |")


def hosted() -> Any:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape))
    return undertow.attach(model, undertow.T2MLR(1, 2), undertow.Auto(rollout_cost=3.0))


def training_step() -> Journey:
    def arrive(*_: object, **__: object) -> None:
        raise Arrived

    handle = register_optimizer_step_pre_hook(arrive)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(RECIPE | {"output": folder}))
        try:
            with Journey() as journey:
                command_line(["train", str(path)])
        except Arrived:
            pass
        finally:
            handle.remove()
    return journey


def training_forward() -> Journey:
    model, ids = hosted(), torch.randint(0, 50, (2, 32))
    for _ in range(4):  # the plan is made, and this is no forward that measures
        model(ids, labels=ids).loss.backward()
    with Journey() as journey:
        model(ids, labels=ids)
    return journey


def decoded_token() -> Journey:
    model, ids = hosted().eval(), torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        cache = model(ids[:, :8]).past_key_values
        with Journey() as journey:
            model(ids[:, 8:], past_key_values=cache)
    return journey


JOURNEYS: dict[str, Callable[[], Journey]] = {
    "`undertow train` to the optimiser's step": training_step,
    "one training forward with `Auto`": training_forward,
    "one decoded token": decoded_token,
}

if __name__ == "__main__":
    print("| journey | functions | files | nesting |\n|---|---:|---:|---:|")
    for name, travel in JOURNEYS.items():
        travel()
        travel().tell(name)
