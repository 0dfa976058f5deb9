"""T²MLR's two gates over training."""

from __future__ import annotations

from pathlib import Path

from undertow.errors import ConfigError
from undertow.lab.evaluation.figures import lines_figure
from undertow.lab.inspections.inspection import inspection
from undertow.lab.runs.run import Experiment
from undertow.lab.tables import table


@inspection("gates", "those of T²MLR over training")
def inspect_gates(run: Path) -> str:
    """Both gates of T²MLR over training, of each of a run's seeds: a figure `gates.png` and a table
    of where they ended.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: it has no such gates.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for seed in Experiment(run).runs:
        for entry in seed.log():
            for gate in (name for name in entry if name.startswith("gate_")):
                point = (entry["step"], entry[gate])
                lines.setdefault(f"{seed.name}, {gate}", []).append(point)
    if not lines:
        raise ConfigError(
            f"the log of {run} has no gates: only T²MLR has them; train with recurrence.kind t2mlr"
        )
    lines_figure(lines, run / "gates.png", "input-independent gates", "step", "tanh(γ)", zero=True)
    rows = [
        [
            label,
            f"{points[-1][0]:.0f}",
            f"{points[-1][1]:+.4f}",
            f"{max(abs(y) for _, y in points):.4f}",
        ]
        for label, points in lines.items()
    ]
    return f"{table(['gate', 'step', 'tanh(γ)', 'largest'], rows)}\n\nFigure: {run / 'gates.png'}"
