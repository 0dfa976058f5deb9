"""Undertow: recurrence in time and in depth for decoder-only language models.

    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-1.7B-Instruct")
    undertow.attach(model, undertow.T2MLR.from_paper(5, 28))

The model stays a `transformers` model: train it, generate with it and save it as ever. Importing
this package lets `AutoModelForCausalLM.from_pretrained` load what such a model saved.
"""

from undertow.depth.looped import Looped
from undertow.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    UndertowError,
    UnsupportedArchitectureError,
)
from undertow.host import attach, depth_report, detach, report, set_solver
from undertow.models import HuginnConfig, HuginnForCausalLM
from undertow.pathways import T2MLR, SoftToken, TurboConn
from undertow.registry import register
from undertow.solvers import Auto, Chunked, Jacobi, Scan, Sequential, SolverReport

__version__ = "0.1.0"

__all__ = [
    "T2MLR",
    "Auto",
    "CheckpointError",
    "Chunked",
    "ConfigError",
    "DataError",
    "DivergedError",
    "HuginnConfig",
    "HuginnForCausalLM",
    "Jacobi",
    "Looped",
    "Scan",
    "Sequential",
    "SoftToken",
    "SolverReport",
    "TurboConn",
    "UndertowError",
    "UnsupportedArchitectureError",
    "attach",
    "depth_report",
    "detach",
    "register",
    "report",
    "set_solver",
]
