"""Start a second process in the folder of a run that is under way.

    python scripts/chaos/two_processes.py [--seed 0]

Exactly one may train. The other is refused, saying which process holds the folder, and changes
nothing: the weights are those of a run that was alone. A process that was killed holds nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from forked import Child, Outcome, run, start
from small_runs import RUN, SEED, recipe, whole, write
from tally import Tally, first, main

# How far the first is when the second starts: seconds after its start, or a name that has come to
# be.
MOMENTS = (
    0.0,
    0.05,
    0.2,
    0.5,
    "log.jsonl",
    "checkpoint-4",
    "checkpoint-8",
    "checkpoint-16",
    "model",
)


def reach(first_one: Child, moment: float | str, folder: Path) -> None:
    if isinstance(moment, str):
        first_one.wait_for(lambda: (folder / moment).exists(), limit=60)
    else:
        first_one.wait_for(lambda: False, limit=moment)


def refused_by_name(outcome: Outcome, holder: Child) -> str:
    if outcome.kind != "refused":
        return f"the other one: {outcome}"
    return (
        ""
        if str(holder.pid) in outcome.said
        else f"it does not say that process {holder.pid} holds it; {outcome}"
    )


def together(case: Path, reference: Path, moment: float | str) -> str:
    """What is wrong with two trainings of one run, "" if nothing."""
    command = write(case, recipe())
    one = start(command, case)
    reach(one, moment, case / SEED)
    late = one.ended()
    other = start(command, case)
    outcomes = {child: child.wait() for child in (other, one)}
    won = [child for child, outcome in outcomes.items() if outcome.kind == "ok"]
    if not won:
        return f"neither was done: {outcomes[one]}; {outcomes[other]}"
    loser = one if won[0] is other else other
    # The other one may come when all is done: it is told so then, as it is without the first.
    told = (
        ""
        if len(won) == 2 and (late or moment == "model")
        else refused_by_name(outcomes[loser], won[0])
    )
    return first(told, whole(case / SEED, reference))


def trials(work: Path, seed: int) -> list[Tally]:
    alone = work / "alone"
    outcome = run(write(alone, recipe()), alone)
    if outcome.kind != "ok":
        raise SystemExit(
            f"the training that the others are compared with failed: {outcome}\n{outcome.text}"
        )
    reference = alone / SEED
    one = Tally("two processes in one folder: one trains as if alone, one is refused")
    for moment in MOMENTS:
        case = work / f"case {moment}"
        one.add(f"started after {moment}", together(case, reference, moment))

    free = Tally("a killed process holds no folder; runs side by side do not meet")
    case = work / "killed"
    command = write(case, recipe())
    held = start(command, case)
    reach(held, "checkpoint-8", case / SEED)
    held.kill()
    held.wait()
    outcome = run(command, case)
    free.add(
        "killed", first("" if outcome.kind == "ok" else str(outcome), whole(case / SEED, reference))
    )
    beside = work / "beside"
    children = []
    for name in ("trial", "other"):
        write(beside, recipe(name=name))
        shutil.move(beside / "recipe.yaml", beside / f"{name}.yaml")
        children.append(start(["train", f"{name}.yaml"], beside))
    for child in children:
        outcome = child.wait()
        free.add("beside another run", "" if outcome.kind == "ok" else str(outcome))
    free.add("beside another run, its results", whole(beside / RUN / "seed-0", reference))
    return [one, free]


if __name__ == "__main__":
    main(trials, __doc__)
