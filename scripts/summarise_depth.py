"""Gather what the seeds of recurrent-depth runs found into one JSON and one table a run: loss and
accuracy against depth.

    python scripts/summarise_depth.py runs/depth-s3 runs/depth-s3-fixed --output
    docs/results/depth/s3.json

A run's held-out losses come from its log, and its accuracies from what `undertow inspect depth`
left in each seed's folder. Every figure is the mean over the seeds, with the least and the
greatest.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from undertow.lab.runs.run import Experiment, Run
from undertow.lab.tables import table

LOSS = re.compile(r"eval_depth_(\d+)_loss")


def of_seed(run: Run) -> dict[str, dict[int, float]]:
    """Loss and accuracy by depth of one seed; a model without a loop has one loss, at depth 1."""
    losses: dict[int, float] = {}
    plain = None
    for entry in run.log():
        plain = entry.get("eval_loss", plain)
        losses |= {
            int(found[1]): value for key, value in entry.items() if (found := LOSS.fullmatch(key))
        }
    inspected = run.folder / "depth" / "depth.json"
    accuracies = (
        json.loads(inspected.read_text(encoding="utf-8"))["accuracy_by_depth"]
        if inspected.is_file()
        else {}
    )
    found_losses = losses or ({} if plain is None else {1: plain})
    return {
        "loss": found_losses,
        "accuracy": {int(depth): value for depth, value in accuracies.items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "least": min(values), "greatest": max(values)}


def summarise(run: Path) -> dict[str, Any]:
    runs = Experiment(run).runs
    seeds = [of_seed(seed) for seed in runs]
    result: dict[str, Any] = {"seeds": [seed.name for seed in runs]}
    for measure in ("loss", "accuracy"):
        depths = sorted(set.intersection(*(set(seed[measure]) for seed in seeds)))
        result[measure] = {
            depth: spread([seed[measure][depth] for seed in seeds]) for depth in depths
        }
    versions = runs[0].folder / "versions.json"
    known = json.loads(versions.read_text(encoding="utf-8")) if versions.is_file() else {}
    result["versions"] = {name: value for name, value in known.items() if name != "command"}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {run.name: summarise(run) for run in options.runs}
    for measure, digits in (("loss", 4), ("accuracy", 3)):
        lines, depths = (
            [],
            sorted({depth for result in results.values() for depth in result[measure]}),
        )
        for name, result in results.items():
            cells = []
            for depth in depths:
                found = result[measure].get(depth)
                three = (
                    [f"{found[key]:.{digits}f}" for key in ("mean", "least", "greatest")]
                    if found
                    else []
                )
                cells.append(f"{three[0]} ({three[1]} – {three[2]})" if three else "")
            lines.append([name, len(result["seeds"]), *cells])
        if depths:
            print(table([measure, "seeds", *[f"r = {depth}" for depth in depths]], lines) + "\n")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
