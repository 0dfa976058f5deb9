"""The step between two trainings with a chain of thought (TurboConn, section 4.8): a model writes a
chain for every problem.

Stage one trains a model to write chains. It then writes one for each problem of its task, and stage
two trains models, with a recurrence and without, to give the final answer from the question and the
same chain.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from undertow.errors import CheckpointError, ConfigError, shown
from undertow.files import read_json, write_json, write_text
from undertow.lab.evaluation.accuracy import generate
from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.run import Experiment
from undertow.lab.tables import percent, table
from undertow.lab.tasks import GSM8K, Split
from undertow.lab.tasks.rows import rows_of
from undertow.paths import takes_paths
from undertow.reading import read_lines

SETTINGS = "chains.json"


@dataclasses.dataclass
class Written:
    """The chains of one split: how many, how many without a final answer, and how many with the
    right one."""

    chains: int = 0
    unfinished: int = 0
    right: int = 0


@takes_paths
def write_chains(
    run: Path,
    output: Path,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    batch: int = 64,
    seed: int = 0,
) -> str:
    """Let a run's model write a chain for each problem of its task; files `train.jsonl` and so on,
    which the task reads.

    Each row has the problem's fields and `chain`: what the model wrote before its own answer, or
    all of it where it gave none. An interrupted call goes on after its last complete row.

    Returns:
        A table: chains, those without an answer, and those whose own answer is right.

    Raises:
        CheckpointError: there is no finished run, or the folder holds chains of another run or
            other settings.
        ConfigError: the run's task has no chains of thought, or none of its splits.
    """
    if max_new_tokens < 1 or batch < 1:
        raise ConfigError(f"max-new-tokens is {max_new_tokens} and batch is {batch}; use 1 or more")
    if not 0 <= temperature < math.inf:  # nan is neither
        raise ConfigError(f"temperature is {temperature}; use 0 for greedy chains, or more")
    quiet_libraries()
    trained = Experiment(run).runs[0]
    task: Any = trained.recipe().task
    if not task.writes_chains:
        raise ConfigError(
            f"{run} was not trained to write chains of thought; train gsm8k with "
            "task.chain_of_thought=true"
        )
    splits = present_splits(task)
    settings = {
        "run": str(trained.folder),
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    check_settings(output / SETTINGS, settings)
    model, tokenizer = trained.load()
    written = {}
    for split in splits:
        file = output / f"{split}.jsonl"
        if not file.is_file():
            write_split(
                model, tokenizer, task, split, file, temperature, max_new_tokens, batch, seed
            )
        written[split] = count(task, split, file)
    write_json(output / "summary.json", written)
    missing = [split for split in get_args(Split) if split not in splits]
    remark = (
        f"\n\nThe task has no {' and no '.join(missing)} file, so there are no chains for it."
        if missing
        else ""
    )
    rows = [
        [s, w.chains, w.unfinished, w.right, percent(w.right / max(w.chains, 1))]
        for s, w in written.items()
    ]
    return (
        table(["split", "chains", "without an answer", "with the right one", "share"], rows)
        + remark
    )


def present_splits(task: GSM8K) -> list[Split]:
    """The splits that the task has a file for.

    Raises:
        ConfigError: it has none.
        DataError: a file is missing or malformed.
    """
    found: list[Split] = [
        split
        for split in get_args(Split)
        if task.hub or getattr(task, split) or (split == "valid" and task.train)
    ]
    if not found:
        raise ConfigError("the run's task names no files")
    for split in found:
        task.size(split)
    return found


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write down how a folder's chains are made, or refuse to go on otherwise."""
    if not path.is_file():
        write_json(path, settings)
        return
    before = read_json(path)
    if not isinstance(before, dict):
        raise CheckpointError(
            f"{path} does not say how the chains were made: {shown(before)}; choose another folder"
        )
    for key, value in settings.items():
        if before.get(key) != value:
            raise CheckpointError(
                f"{path.parent} holds chains whose {key} is {before.get(key)} and not {value}; "
                "choose another folder"
            )


def write_split(
    model: Any,
    tokenizer: Any,
    task: GSM8K,
    split: Split,
    file: Path,
    temperature: float,
    max_new_tokens: int,
    batch: int,
    seed: int,
) -> None:
    """Write one split's file, under another name until it is whole."""
    part = file.with_name(f".{file.name}.part")
    kept = (
        [line for _, line in read_lines(part, CheckpointError) if line.endswith("\n")]
        if part.exists()
        else []
    )
    start = len(kept) // batch * batch  # draws depend on the batch, so a batch is written whole
    write_text(part, "".join(kept[:start]))
    with part.open("a", encoding="utf-8") as out:
        for first in tqdm(
            range(start, task.size(split), batch), desc=f"{split} chains", unit="batch"
        ):
            indices = range(first, min(first + batch, task.size(split)))
            torch.manual_seed(seed + first)
            texts = generate(
                model,
                tokenizer,
                [task.example(split, i) for i in indices],
                batch,
                temperature,
                max_new_tokens,
            )
            for index, text in zip(indices, texts, strict=True):
                chain, finished = task.split_chain(text)
                right = finished and task.score(task.example(split, index), text)
                row = task.row(split, index) | {
                    "chain": chain,
                    "finished": finished,
                    "right": right,
                }
                out.write(json.dumps(row) + "\n")
            out.flush()
    os.replace(part, file)


def count(task: GSM8K, split: Split, file: Path) -> Written:
    """What a file holds.

    Raises:
        CheckpointError: not one chain for each problem, or a line is none.
    """
    rows = []
    for where, row in rows_of(file):
        if (
            not isinstance(row, dict)
            or type(row.get("finished")) is not bool
            or type(row.get("right")) is not bool
        ):
            raise CheckpointError(
                f"{where} is no chain that undertow chains wrote: {shown(row)}; remove it and run "
                "again"
            )
        rows.append(row)
    if len(rows) != task.size(split):
        raise CheckpointError(
            f"{file} has {len(rows)} chains for {task.size(split)} problems; remove it and run "
            "again"
        )
    return Written(
        len(rows), sum(not row["finished"] for row in rows), sum(row["right"] for row in rows)
    )
