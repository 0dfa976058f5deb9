"""How much of each half of group retrieval the runs of a study have learned: single states, and
single entries.

    python scripts/score_retrieval.py runs/t2mlr-retrieval [--output
    docs/results/t2mlr/t2mlr-retrieval-halves.json]

A label of a state is the running product, which takes tracking; one of an entry is what the
sequence's own dictionary has for it, which takes the look-up besides. Exact rollout, test split,
the lengths and examples of each run's recipe.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch

from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.run import Run
from undertow.lab.tables import table
from undertow.lab.tasks import GroupRetrieval, PadCollator, model_inputs
from undertow.lab.tasks.encode import encode


@torch.no_grad()
def halves(folder: Path) -> dict[int, tuple[float, float]]:
    """Share of right states and of right entries by length, of one seed's run."""
    recipe = Run(folder).recipe()
    task = recipe.task
    assert isinstance(task, GroupRetrieval), f"{folder} is no run on group_retrieval"
    model, tokenizer = Run(folder).load()
    found = {}
    for length in recipe.evaluation.lengths:
        examples = [
            task.example("test", index, length) for index in range(recipe.evaluation.examples)
        ]
        items = PadCollator(tokenizer)([encode(example, tokenizer) for example in examples])
        predicted = (
            model.eval()(**model_inputs(items, model.device), use_cache=False)
            .logits[:, :-1]
            .argmax(-1)
        )
        labels = items["labels"][:, 1:]
        # All sequences of a length have as many labels, a state and then its entry's characters.
        right = (
            (predicted == labels)[labels != -100]
            .view(len(examples), length, 1 + task.entry_length)
            .float()
        )
        found[length] = float(right[..., 0].mean()), float(right[..., 1:].mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()
    results: dict[str, list[dict[int, tuple[float, float]]]] = defaultdict(list)
    for folder in sorted(path.parent for path in options.study.glob("*/seed-*/model")):
        results[folder.parent.name].append(halves(folder))
    lengths = sorted({length for runs in results.values() for run in runs for length in run})
    lines = []
    for name, runs in results.items():
        for half, kind in enumerate(("states", "entries")):
            cells = [[100 * run[length][half] for run in runs] for length in lengths]
            lines.append(
                [
                    name,
                    kind,
                    *(f"{sum(c) / len(c):.1f} ({min(c):.1f} to {max(c):.1f})" for c in cells),
                ]
            )
    print(table(["model", "labels", *map(str, lengths)], lines))
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
