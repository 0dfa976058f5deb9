"""Give the command line malformed input of every kind, and see that each is refused in one
sentence, at once.

    python scripts/chaos/malformed.py [--seed 0] [--only recipe]

Recipes, overrides, studies, data, runs, model folders and names; each in a process of its own,
forked from one that has everything imported, with limits of time and memory. Clean is: exit code 0,
or 2 with a last line of `undertow: ...` within two seconds of CPU time; no traceback, no hang, and
nothing written beside the folder that the case may write to. Prints a table and `N of N clean`;
exits with 1 if any is not.
"""

from __future__ import annotations

import argparse
import collections
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch
from malformed_inputs import cases
from malformed_recipes import STUDY, TRAINED, dumped

import undertow.lab.study.study
import undertow.lab.training.convert
import undertow.lab.training.dry_run  # noqa: F401
from undertow.cli.main import main as command_line
from undertow.lab.inspections.inspection import all_inspections

REFUSED_WITHIN, CPU, WALL, MEMORY = 2.0, 20, 120, 3 << 30


def run(arguments: list[str], folder: Path) -> tuple[str, float, str]:
    """Run a command in a fork: what became of it, its CPU seconds, and what it printed."""
    printed = folder / ".printed"
    child = os.fork()
    if child == 0:
        code: Any = 99
        try:
            os.chdir(folder)
            out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            status = Path("/proc/self/statm").read_text().split()
            limit = int(status[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 2))
            code = command_line(arguments)
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
    started = time.monotonic()
    while True:
        done, status_, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - started > WALL:
            os.kill(child, 9)
            os.wait4(child, 0)
            return "hang", float(WALL), ""
        time.sleep(0.002)
    code, seconds = os.waitstatus_to_exitcode(status_), used.ru_utime + used.ru_stime
    text = printed.read_text(errors="replace")
    return judged(code, seconds, text), seconds, text


def judged(code: int, seconds: float, text: str) -> str:
    """ok, refused, or what is wrong."""
    lines = text.strip().splitlines()
    if code < 0:
        return "hang" if code == -24 else f"killed by signal {-code}"
    if "Traceback (most recent call last)" in text or code not in (0, 2):
        return "traceback" if "Traceback" in text else f"exit code {code}"
    if code == 0:
        return "ok"
    if not lines or not lines[-1].startswith("undertow"):  # also argparse's own errors
        return "no sentence"
    return "refused" if seconds <= REFUSED_WITHIN else "refused late"


def main() -> int:
    all_inspections()  # imported once, before anything is forked
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the junk that each key gets")
    parser.add_argument(
        "--only", help="one group: recipe, override, study, name, data, run, place or argument"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="malformed-"))
    try:
        finished = root / "finished"
        finished.mkdir()
        (finished / "r.yaml").write_bytes(dumped(TRAINED))
        (finished / "s.yaml").write_bytes(dumped(STUDY))
        for command in (["train", "r.yaml"], ["study", "s.yaml"]):
            became, _, text = run(command, finished)
            if became != "ok":
                print(f"the run that is to be damaged could not be made: {became}\n{text}")
                return 1
        return report(options, root, finished)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def report(options: argparse.Namespace, root: Path, finished: Path) -> int:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    slowest, wrong = 0.0, 0
    for group, label, command, prepare in cases(options.seed, finished):
        if options.only not in (None, group):
            continue
        folder = root / "cases" / "case"
        shutil.rmtree(root / "cases", ignore_errors=True)
        if group in ("run", "place", "argument"):
            shutil.copytree(finished, folder)
        else:
            folder.mkdir(parents=True)
        prepare(folder)
        became, seconds, text = run(command, folder)
        beside = [path.name for where in (root, root / "cases") for path in where.iterdir()]
        if sorted(beside) != ["case", "cases", "finished"] or (folder / "hacked").exists():
            became = "wrote outside"
        counts[group][became] += 1
        if became == "refused":
            slowest = max(slowest, seconds)
        elif became != "ok":
            wrong += 1
            last = (text.strip().splitlines() or [""])[-1]
            print(
                f"{group}: {label!a}: {became} after {seconds:.1f} s: {ascii(last)[:200]}",
                flush=True,
            )
    total = sum(sum(counter.values()) for counter in counts.values())
    print(f"\n{'kind':<10} {'inputs':>6} {'refused':>8} {'harmless':>9} {'not clean':>10}")
    for group, counter in counts.items():
        bad = sum(count for became, count in counter.items() if became not in ("ok", "refused"))
        print(
            f"{group:<10} {sum(counter.values()):>6} {counter['refused']:>8} {counter['ok']:>9} "
            f"{bad:>10}"
        )
    print(f"slowest refusal: {slowest:.1f} s of CPU time\n{total - wrong} of {total} clean")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
