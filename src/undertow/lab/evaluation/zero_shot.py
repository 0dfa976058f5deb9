"""Zero-shot benchmarks with lm-eval, on the model as it is: its own tasks by name, or local YAML
files without a network."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, nearest
from undertow.files import write_json
from undertow.host import set_solver
from undertow.host.attachment import recurs_in_time
from undertow.lab.evaluation.run import depth_suffix
from undertow.lab.runs.loading import first_line, is_model, load, quiet_libraries
from undertow.lab.runs.run import Experiment
from undertow.lab.tables import table
from undertow.paths import takes_paths
from undertow.solvers import Jacobi

logger = logging.getLogger("undertow")

Scores = dict[str, dict[str, float]]


@takes_paths
def zero_shot(
    run: Path,
    tasks: Sequence[str],
    folder: Path | None,
    limit: int | None,
    batch: int,
    prefill: str,
    depth: int | None = None,
) -> str:
    """Score a run's models, or a model in any folder; returns a table and writes `zero_shot.json`
    beside each run's model.

    Args:
        tasks: names of lm-eval's tasks, or of those in `folder`.
        folder: where YAML tasks of one's own are, as lm-eval describes them.
        limit: examples of each task; all if None.
        prefill: exact, or jacobi for T²MLR's Jacobi(16, 4) instead.
        depth: iterations of recurrent-depth models; as many as they were trained with if None. It
            ends the file's name.

    Raises:
        CheckpointError: there is no model.
        ConfigError: lm-eval is not installed, there is no such task, its data cannot be had, or a
            model cannot run at the depth.
    """
    for key, value in (("limit", limit), ("batch", batch)):
        if value is not None and value < 1:
            raise ConfigError(f"{key} is {value}; use 1 or more")
    quiet_libraries()
    runs = [] if is_model(run) else Experiment(run).runs
    for seed in runs:
        seed.load_plugins()
    paths = [seed.model_folder for seed in runs] or [run]
    found: dict[str, Scores] = {}
    for path in paths:
        model, tokenizer = load(str(path), depth)
        if prefill == "jacobi":
            if not recurs_in_time(model):
                raise ConfigError(
                    f"prefill is jacobi, but {path} has no recurrence in time; leave prefill out"
                )
            set_solver(model, prefill=Jacobi(16, 4))
        scores = zero_shot_scores(model, tokenizer, tasks, folder, limit, batch)
        name = path.parent.name if len(runs) > 1 else path.name
        found[name if depth is None else f"{name} at depth {depth}"] = scores
        if path.name == "model":
            settings = {
                "tasks": list(tasks),
                "limit": limit,
                "prefill": prefill,
                "depth": depth,
                "scores": scores,
            }
            write_json(path.parent / f"zero_shot{depth_suffix(depth)}.json", settings)
    return zero_shot_table(found)


@takes_paths
def zero_shot_scores(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    folder: Path | None = None,
    limit: int | None = None,
    batch: int = 8,
) -> Scores:
    """The metrics of each task, as lm-eval names them. The prefill is the one that the model is set
    to.

    lm-eval cuts the beginning of what is too long for the model; a warning says how often.

    Raises:
        ConfigError: as `zero_shot`.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            'zero-shot tasks need lm-eval; install it with: pip install "undertow[eval]"'
        ) from error
    if not tasks:
        raise ConfigError("tasks is empty; name at least one, such as --tasks=arc_easy")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the one that your YAML tasks are in")
    include = None if folder is None else str(folder)
    manager = (
        TaskManager(include_path=include, include_defaults=False) if folder is not None else None
    )
    if manager is None or not set(tasks) <= set(
        manager.all_tasks
    ):  # reading lm-eval's own thousands takes a while
        manager = TaskManager(include_path=include)
    for name in tasks:
        if name not in manager.all_tasks:
            raise ConfigError(
                f"there is no zero-shot task {name!r}{nearest(name, manager.all_tasks)}"
            )
    training = model.training
    try:
        evaluated = counting_cuts(HFLM)(
            pretrained=model.eval(), tokenizer=tokenizer, batch_size=batch
        )
        results: Any = simple_evaluate(
            evaluated,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            log_samples=False,
            bootstrap_iters=0,
        )
    except (
        OSError,
        ValueError,
        ImportError,
    ) as error:  # of datasets, which fetches what a task is made of
        raise ConfigError(
            f"the tasks {', '.join(tasks)} could not be run: {first_line(error)}"
        ) from error
    finally:
        model.train(training)
    if evaluated.cut:
        logger.warning(
            "%d of the prompts have more than the %d tokens that the model reads: lm-eval cut "
            "their beginnings",
            evaluated.cut,
            evaluated.max_length,
        )
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in sorted(values.items())
            if isinstance(value, int | float)
            and "stderr" not in name
            and name not in ("sample_len", "samples")
        }
        for task, values in results["results"].items()
    }


def counting_cuts(base: Any) -> Any:
    """A subclass of lm-eval's HFLM that counts in `cut` what it makes shorter."""

    class CountingLM(base):
        cut = 0

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            # The last token is predicted and not read.
            self.cut += sum(
                len(context) + len(rest) > self.max_length + 1 for _, context, rest in requests
            )
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def tok_batch_encode(
            self, strings: Any, *args: Any, left_truncate_len: int | None = None, **kwargs: Any
        ) -> Any:
            if left_truncate_len:
                self.cut += sum(len(self.tok_encode(text)) > left_truncate_len for text in strings)
            return super().tok_batch_encode(
                strings, *args, left_truncate_len=left_truncate_len, **kwargs
            )

    return CountingLM


def zero_shot_table(found: Mapping[str, Scores]) -> str:
    """A row a task and metric, a column a model."""
    pairs = dict.fromkeys(
        (task, metric) for scores in found.values() for task in scores for metric in scores[task]
    )
    rows = [
        [
            f"{task}: {metric}",
            *(f"{scores.get(task, {}).get(metric, float('nan')):.4f}" for scores in found.values()),
        ]
        for task, metric in pairs
    ]
    return table(["task", *found], rows)
