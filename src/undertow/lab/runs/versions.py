"""What a run is made with: versions of packages, the commit of a checkout, the command."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "undertow",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
)


def versions() -> dict[str, Any]:
    """Versions of what the run is made with, the commit of a checkout, and the command."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    found: dict[str, Any] = {
        "command": command,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    root = Path(__file__).resolve().parents[4]
    if (root / ".git").exists():
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
        found["commit"] = done.stdout.strip() or None
    return found
