"""Undertow: recurrence in time and in depth for decoder-only language models.

    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-1.7B-Instruct")
    undertow.attach(model, undertow.T2MLR.from_paper(5, 28))

The model stays a `transformers` model: train it, generate with it and save it as ever. Importing
this package lets `AutoModelForCausalLM.from_pretrained` load what such a model saved
(`auto_classes.py`). PyTorch and transformers are imported when a name that needs them is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from undertow.auto_classes import enter_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from undertow.depth import Evidence, ExitRule, Looped
    from undertow.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DivergedError,
        UndertowError,
        UnsupportedArchitectureError,
    )
    from undertow.host.attach import attach, depth_report, detach, report, set_solver
    from undertow.host.compiling import compile_layers
    from undertow.lab.tasks import Example, GeneratedTask, Task
    from undertow.lab.training import SolverGap
    from undertow.models import HuginnConfig, HuginnForCausalLM
    from undertow.pathways import T2MLR, Pathway, Recurrence, SoftToken, TurboConn
    from undertow.registry import register
    from undertow.solvers import (
        Adjoint,
        Auto,
        Chunked,
        Full,
        Jacobi,
        RecurrentBlock,
        Scan,
        Sequential,
        Solution,
        Solver,
        SolverReport,
        Truncated,
    )

# Where each public name is found, when it is first used. Type checkers read the imports above.
_NAMES = {
    "undertow.depth": "Evidence ExitRule Looped",
    "undertow.errors": "CheckpointError ConfigError DataError DivergedError "
    "UndertowError UnsupportedArchitectureError",
    "undertow.host": "attach compile_layers depth_report detach report set_solver",
    "undertow.lab.tasks": "Example GeneratedTask Task",
    "undertow.lab.training": "SolverGap",
    "undertow.models": "HuginnConfig HuginnForCausalLM",
    "undertow.pathways": "T2MLR Pathway Recurrence SoftToken TurboConn",
    "undertow.registry": "register",
    "undertow.solvers": "Adjoint Auto Chunked Full Jacobi RecurrentBlock Scan Sequential "
    "Solution Solver SolverReport Truncated",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_ROOMS = ("depth", "errors", "host", "models", "pathways", "solvers")

__all__ = [
    "T2MLR",
    "Adjoint",
    "Auto",
    "CheckpointError",
    "Chunked",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Evidence",
    "Example",
    "ExitRule",
    "Full",
    "GeneratedTask",
    "HuginnConfig",
    "HuginnForCausalLM",
    "Jacobi",
    "Looped",
    "Pathway",
    "Recurrence",
    "RecurrentBlock",
    "Scan",
    "Sequential",
    "SoftToken",
    "Solution",
    "Solver",
    "SolverGap",
    "SolverReport",
    "Task",
    "Truncated",
    "TurboConn",
    "UndertowError",
    "UnsupportedArchitectureError",
    "attach",
    "compile_layers",
    "depth_report",
    "detach",
    "register",
    "report",
    "set_solver",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"undertow.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'undertow' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES, *_ROOMS})


enter_names()
