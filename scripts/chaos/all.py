"""Try every promise of docs/reliability.md, two scripts at a time, and write down what was kept.

    python scripts/chaos/all.py [--seed 0] [kills damage ...]

Prints a table. Without names it writes the table into docs/reliability.md too, and
docs/results/reliability.json. Exits with 1 if a promise was broken or could not be tried to the
end. Needs Linux; the trials with full disks need root besides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from undertow.lab.runs.versions import versions
from undertow.lab.tables import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE, FIGURES = ROOT / "docs" / "reliability.md", ROOT / "docs" / "results" / "reliability.json"
BEGIN, END = "<!-- figures: written by make chaos -->", "<!-- end of figures -->"
# The longest come first.
SCRIPTS = ("malformed", "kills", "damage", "nonfinite", "interrupts", "two_processes", "disks")
NAMES = {"malformed": "malformed recipes, data and folders: "}
AT_ONCE, LIMIT = 2, 1200  # scripts, and seconds for one
COUNT = re.compile(r"^(\d+) of (\d+) (.+?)(?: \((\d+) s\))?$", re.MULTILINE)


@dataclass
class Row:
    """A promise, and how often it was tried and kept."""

    promise: str
    tried: int
    kept: int
    seconds: int


@dataclass
class Report:
    """What a script has said."""

    script: str
    rows: list[Row] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def run(script: str, seed: int) -> Report:
    """Run a script to its end, or to its limit."""
    command = [sys.executable, str(HERE / f"{script}.py"), f"--seed={seed}"]
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    try:
        text, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate()
        text += f"\nit was stopped after {LIMIT} s"
    seconds = round(time.monotonic() - started)
    report = read(script, text, seconds)
    failed = process.returncode != 0
    if (failed or not report.rows) and not report.broken and not (report.skipped and not failed):
        report.broken.append(f"broken: {script} ended with {process.returncode}:\n{text[-3000:]}")
    print(f"{script}: {'broken' if report.broken else 'kept'}, {seconds} s", flush=True)
    return report


def read(script: str, text: str, seconds: int) -> Report:
    """What a script printed; `seconds` are for a promise that has no time of its own."""
    lines = text.splitlines()
    report = Report(script)
    for kept, tried, promise, own in COUNT.findall(text):
        report.rows.append(
            Row(NAMES.get(script, "") + promise, int(tried), int(kept), int(own or seconds))
        )
    report.broken = [line for line in lines if line.startswith("broken: ")]
    report.skipped = [
        line.removeprefix("skipped: ") for line in lines if line.startswith("skipped: ")
    ]
    if not report.broken and any(row.kept < row.tried for row in report.rows):
        report.broken.append(f"broken: {script}:\n{text[-3000:]}")
    return report


def rows_of(reports: list[Report]) -> str:
    """The table, in Markdown."""
    rows = [
        [row.promise, row.tried, row.kept, row.seconds] for report in reports for row in report.rows
    ]
    rows += [[text, "skipped", "", ""] for report in reports for text in report.skipped]
    return table(["promise", "tried", "kept", "seconds"], [list(map(str, row)) for row in rows])


def write(reports: list[Report], about: dict[str, Any]) -> None:
    """Put the figures into the page and beside it."""
    found = {
        **about,
        "promises": [
            {"script": report.script, **asdict(row)} for report in reports for row in report.rows
        ],
    }
    found["skipped"] = [text for report in reports for text in report.skipped]
    FIGURES.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    package = ", ".join(
        f"{name} {about[name]}" for name in ("torch", "transformers", "safetensors")
    )
    told = (
        f"`make chaos`, seed {about['seed']}: {about['seconds']} seconds on {about['cores']} "
        f"cores, {about['date']}; {package}, Python {about['python']}, {about['system']}."
    )
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(
        f"{before}{BEGIN}\n\n{told}\n\n{rows_of(reports)}\n\n{END}{after}", encoding="utf-8"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "scripts",
        nargs="*",
        metavar="script",
        help=f"some of {', '.join(SCRIPTS)}; all if left out",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is random in the trials")
    options = parser.parse_args()
    there = [name for name in SCRIPTS if (HERE / f"{name}.py").exists()]
    if unknown := set(options.scripts) - set(there):
        parser.error(f"there is no {min(unknown)}; choose some of {', '.join(there)}")
    started = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        chosen = options.scripts or there
        reports = list(pool.map(lambda script: run(script, options.seed), chosen))
    about = versions() | {
        "command": "make chaos",
        "seed": options.seed,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - started),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    print(f"\n{rows_of(reports)}\n\n{about['seconds']} s")
    if not options.scripts:
        write(reports, about)
    broken = [line for report in reports for line in report.broken]
    print("\n".join(["", *broken]) if broken else "every promise was kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
