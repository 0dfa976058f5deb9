"""Show that a recurrence which is still zero changes no lm-eval score of a pretrained model, on two
tasks made of a text.

python scripts/check_zero_shot.py models/SmolLM2-135M-Instruct text.txt [examples]

`follows` asks which of two lines follows two others; `line` gives the perplexity of the line that
does.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import undertow
from undertow.lab.evaluation.zero_shot import zero_shot_scores
from undertow.lab.runs.loading import load, quiet_libraries
from undertow.lab.tables import table

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
target_delimiter: "\\n"
"""


def write_tasks(folder: Path, text: Path, examples: int) -> None:
    """The two tasks as YAML, and their rows, each of three lines that follow one another and one
    from elsewhere."""
    lines = [
        line.strip()
        for line in text.read_text(encoding="utf-8").splitlines()
        if len(line.split()) > 5
    ]
    generator, rows = random.Random(0), []
    for _ in range(examples):
        start, gold = generator.randrange(len(lines) - 2), generator.randrange(2)
        choices = [lines[start + 2], generator.choice(lines)]
        rows.append(
            {
                "context": "\n".join(lines[start : start + 2]),
                "choices": choices[:: 1 - 2 * gold],
                "end": choices[0],
                "gold": gold,
            }
        )
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    common = COMMON.format(rows=folder / "rows.jsonl")
    (folder / "follows.yaml").write_text(
        "task: follows\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: "
        f"gold{common}metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]\n"
    )
    (folder / "line.yaml").write_text(
        f"task: line\noutput_type: loglikelihood\ndoc_to_target: '{{{{end}}}}'{common}"
        "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n"
    )


def main() -> None:
    quiet_libraries()
    path, text, examples = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        int(sys.argv[3]) if len(sys.argv) > 3 else 64,
    )
    model, tokenizer = load(str(path))
    ways = {"no recurrence": None, "exact": undertow.Sequential(), "one sweep": undertow.Scan(1, 0)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), text, examples)
        for name, prefill in ways.items():
            if name == "exact":
                undertow.attach(model, undertow.T2MLR.from_paper(13, 18))
            if prefill is not None:
                undertow.set_solver(model, prefill=prefill)
            started = time.perf_counter()
            scores = zero_shot_scores(model, tokenizer, ["follows", "line"], Path(folder), batch=8)
            seconds = time.perf_counter() - started
            perplexity = scores["line"]["perplexity"]
            rows.append(
                [
                    name,
                    f"{scores['follows']['acc']:.4f}",
                    f"{perplexity:.6f}",
                    perplexity.hex(),
                    f"{seconds:.0f}",
                ]
            )
    print(
        table(
            [
                "prefill",
                "follows: accuracy",
                "line: perplexity",
                "the same in hexadecimal",
                "seconds",
            ],
            rows,
        )
    )
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("lm_eval", "transformers", "torch")
    )
    print(
        f"\n{path.name}, T²MLR(13, 18) as it starts, {examples} examples of {text.name}; {versions}"
    )
    if (
        len({row[1] for row in rows}) > 1
        or rows[2][3] != rows[0][3]
        or not math.isclose(*(float.fromhex(row[3]) for row in rows[:2]), rel_tol=1e-5)
    ):
        sys.exit("the scores differ")


if __name__ == "__main__":
    main()
