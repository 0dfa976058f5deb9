"""What a recurrence costs and brings, of several runs (TurboConn, Table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undertow.errors import ConfigError
from undertow.files import write_json
from undertow.lab.inspections.compared import read_runs
from undertow.lab.inspections.inspection import OUTPUT, inspection
from undertow.lab.tables import spread, table


@inspection(
    "latency",
    "recursions, time of a step and accuracy of several runs, over the Transformer's",
    OUTPUT,
    together=True,
)
def compare_latency(paths: Sequence[Path], output: Path | None = None) -> str:
    """Recursions, time of a step and accuracy of several runs: a table like the paper's Table 1,
    and `latency.json`.

    One row a run, over its seeds: of accuracies the mean, with the lowest and the highest. A
    study's folder stands for its runs. Times are over the first run's without a recurrence.
    Recursions are the groups of tokens that the exact rollout of a batch goes through; with another
    solver in training there is no such number.

    Raises:
        ConfigError: no run is without a recurrence.
    """
    output = output or paths[0]
    _, runs = read_runs(paths)
    base = next((run for run in runs if run.recipe.recurrence is None), None)
    if base is None:
        raise ConfigError(
            "none of these runs is without a recurrence; add the Transformer's, whose time is the "
            "measure"
        )
    temperatures = sorted({t for run in runs for shares in run.accuracies for _, t in shares})
    header = ["run", "seeds", "tokens", "recursions", "s a step", "x Transformer"]
    header += ["greedy" if t == 0 else f"at temperature {t:g}" for t in temperatures]
    rows: list[list[object]] = []
    found = []
    for run in runs:
        exact = run.recipe.recurrence is None or run.recipe.solver.kind == "sequential"
        recursions = run.groups if exact else None
        entry = {
            "run": run.recipe.name,
            "seeds": len(run.accuracies),
            "tokens": run.tokens,
            "recursions": recursions,
            "seconds_per_step": run.seconds_per_step,
            "over_transformer": run.seconds_per_step / base.seconds_per_step,
            "accuracy_by_seed": {t: run.overall(t) for t in temperatures},
        }
        found.append(entry)
        rows.append(
            [
                run.recipe.name,
                len(run.accuracies),
                *(
                    "-" if number is None else f"{number:.2f}"
                    for number in (run.tokens, recursions)
                ),
                f"{run.seconds_per_step:.4f}",
                f"{run.seconds_per_step / base.seconds_per_step:.2f}",
                *(spread(shares) if (shares := run.overall(t)) else "-" for t in temperatures),
            ]
        )
    write_json(output / "latency.json", found)
    return table(header, rows)
