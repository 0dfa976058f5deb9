"""Memory of a training on a small and on a large corpus of shards: what grows with the text.

    python scripts/measure_corpus_memory.py --folder /tmp/corpora --sizes 20 2000 --steps 20

Each corpus is of random tokens, of so many megabytes, and is removed again. Each training is a
process of its own, on one thread; it takes `--steps` steps of a small model. Memory is what the
process itself holds (RssAnon), and with what is mapped of files (VmRSS, VmHWM at its highest),
which the system takes back when it wants to.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from undertow.lab.tables import table
from undertow.lab.tasks import Shards, character_tokenizer
from undertow.lab.tasks.shard_files import SPLITS, write_index, write_part
from undertow.lab.tasks.shards import words_of
from undertow.lab.training import Recipe, train
from undertow.mapping import from_mapping

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,"
CONTEXT, SHARD, DOCUMENT = 128, 20_000_000, 500


def corpus(folder: Path, megabytes: int) -> None:
    """Write shards of random tokens, two bytes each, in documents of 500 tokens."""
    tokenizer, draw = character_tokenizer(CHARACTERS), np.random.default_rng(0)
    folder.mkdir(parents=True)
    parts: Any = {split: [] for split in SPLITS}
    counts = {"train": megabytes * 500_000, "valid": 50_000, "test": 50_000}
    for split, count in counts.items():
        for number, start in enumerate(range(0, count, SHARD)):
            ids = draw.integers(3, len(tokenizer), min(SHARD, count - start), dtype=np.uint16)
            pieces = (ids[at : at + DOCUMENT] for at in range(0, len(ids), DOCUMENT))
            documents = ((DOCUMENT, piece) for piece in pieces)
            parts[split].append(write_part(folder, f"{split}-{number:05}", documents, "uint16", 0))
    write_index(folder, {"id_type": "uint16", "words": words_of(tokenizer)}, parts)
    tokenizer.save_pretrained(folder / "tokenizer")


def memory() -> dict[str, float]:
    """What the system says that this process holds, in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return {name: int(told[name].split()[0]) / 1000 for name in ("RssAnon", "VmRSS", "VmHWM")}


def trained(folder: Path, steps: int) -> dict[str, float]:
    """Train a recipe on a corpus in this process; its memory at the end."""
    recipe = from_mapping(
        Recipe,
        {
            "name": "memory",
            "task": {"kind": "shards", "folder": str(folder), "context": CONTEXT},
            "model": {"layers": 2, "width": 32, "heads": 2, "tokenizer": str(folder / "tokenizer")},
            "training": {"steps": steps, "batch": 8, "threads": 1, "evaluate_examples": 8},
            "output": str(folder / "runs"),
        },
    )
    begun = time.perf_counter()
    train(recipe, 0)
    windows = Shards(str(folder), CONTEXT).size("train", character_tokenizer(CHARACTERS))
    return {"windows": windows, "seconds": time.perf_counter() - begun, **memory()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, required=True, help="for the corpora")
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 2000], help="megabytes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trained", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trained:
        print(json.dumps(trained(options.folder, options.steps)))
        return
    rows = []
    for size in options.sizes:
        folder = options.folder / f"{size}-mb"
        try:
            corpus(folder, size)
            command = [sys.executable, __file__, "--trained", f"--folder={folder}"]
            said = subprocess.run(
                [*command, f"--steps={options.steps}"], check=True, stdout=subprocess.PIPE
            )
            found = json.loads(said.stdout.splitlines()[-1])
            rows.append([f"{size:,} MB", *(f"{value:,.0f}" for value in found.values())])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    names = ["tokens on disk", "windows", "seconds", "RssAnon, MB", "VmRSS, MB", "VmHWM, MB"]
    print(table(names, rows))


if __name__ == "__main__":
    main()
