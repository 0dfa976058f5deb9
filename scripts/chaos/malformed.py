"""Give the command line malformed input of every kind, and see that each is refused in one sentence, at once.

    python scripts/chaos/malformed.py [--seed 0] [--only recipe]

Recipes, overrides, studies, data, runs, model folders and names; each in a process of its own, forked from one that has
everything imported, with limits of time and memory. Clean is: exit code 0, or exit code 2 with a last line of `undertow: ...`
within two seconds of CPU time; no traceback, no hang, and nothing written beside the folder that the case may write to.
Prints a table and `N of N clean`; exits with 1 if any is not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import os
import random
import resource
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch
import yaml

import undertow.analysis.run
import undertow.evaluation.study
import undertow.training.convert
import undertow.training.dry_run  # noqa: F401
from undertow.cli.main import main as command_line

REFUSED_WITHIN, CPU, WALL, MEMORY = 2.0, 20, 120, 3 << 30
RECIPE: dict[str, Any] = {
    "name": "x",
    "output": "runs",
    "seeds": [0],
    "task": {"kind": "parity", "template": "bare", "min_length": 1, "max_length": 16, "seed": 0},
    "model": {"architecture": "llama", "layers": 2, "width": 16, "heads": 2, "positions": 64, "settings": {}, "pauses": 0}
    | {
        "head_width": 8,
        "key_value_heads": 2,
        "feed_forward": 16,
        "initializer_range": 0.1,
        "vocabulary": None,
        "path": None,
    },
    "recurrence": {"kind": "t2mlr", "first_layer": 0, "last_layer": 1},
    "solver": {"kind": "auto", "tolerance": 0.01, "every": 32, "gradient": "adjoint(0.1)", "rollout_cost": 2.0},
    "depth": None,
    "lora": None,
    "training": {"steps": 2, "batch": 2, "accumulate": 1, "learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 1}
    | {"floor": 0.0, "gate_multiplier": 1.0, "weight_decay": 0.01, "clip": 1.0, "precision": "fp32", "max_tokens": None}
    | {"log_every": 1, "evaluate_every": None, "evaluate_examples": 2, "save_every": None, "threads": 1, "epochs": None},
    "evaluation": {"lengths": [8], "examples": 2, "batch": 2, "temperature": None, "max_new_tokens": 2},
}
TURBOCONN = {"kind": "turboconn", "connections": [[1, 0]], "lag": 1, "alpha": 1.0, "rank": 4, "normalize": False}
LOOPED = {"prelude": [0], "core": [1], "coda": [], "injection": "adapter", "depth": 2, "backward": 2, "state_std": 0.1}
DEPTH = {
    "looped": LOOPED,
    "objective": "last",
    "entropy": 0.1,
    "evaluate_depths": [1],
    "schedule": {"kind": "sampled", "mean": 2},
}
TRAINED = RECIPE | {"model": {"layers": 2, "width": 16, "heads": 2, "positions": 64}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


JUNK: list[Any] = [
    None,
    True,
    False,
    "",
    " ",
    "abc",
    "none",
    "NaN",
    float("nan"),
    float("inf"),
    0,
    -1,
    0.5,
    -0.0,
    1e308,
    3,
    1.0,
]
JUNK += [
    10**30,
    -(10**30),
    2**31,
    2**63,
    2**64,
    [],
    {},
    [[]],
    [None],
    {"kind": None},
    {"kind": ["x"]},
    {"": 1},
    {1: 2},
    [-1],
]
JUNK += [
    "ÄÖ 💥 \u202e",
    "\0",
    "a\0b",
    "a\nb",
    "../../x",
    "/etc/passwd",
    "~nobody-here",
    "a/b",
    ".",
    "..",
    "x" * 300,
    "\ud800",
    nested(60),
]
JUNK += [
    [10**30],
    [True],
    ["a"],
    [0.5],
    "1e3",
    "1e999",
    [[0, 0]],
    [[-1, -2]],
    "adjoint(",
    "adjoint(99999999999999999999)",
    "2020-01-01",
]


class Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def dumped(value: Any) -> bytes:
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=False).encode()


def leaves(section: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in section.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


def laughs(levels: int, key: str = "") -> str:
    """A YAML list that its aliases make 9 to the power of `levels` long."""
    lists = [f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(levels)]
    return f"{key}[{', '.join(lists)}]"


def recipes(random_: random.Random) -> Iterator[tuple[str, bytes]]:
    """Every key with some of the junk as its value, and texts that are no recipes."""
    plain = {key: value for key, value in RECIPE.items() if key not in ("recurrence", "depth")}
    variants = [RECIPE, RECIPE | {"recurrence": TURBOCONN, "solver": "sequential"}, plain | {"depth": DEPTH}]
    for variant, only in zip(variants, (None, "recurrence", "depth"), strict=True):
        for path in leaves(variant):
            if only is not None and path[0] != only:
                continue
            for junk in random_.sample(JUNK, 5):
                changed = copy.deepcopy(variant)
                section = changed
                for key in path[:-1]:
                    section = section[key]
                section[path[-1]] = junk
                yield f"{'.'.join(path)}={str(junk)[:30]!r}", dumped(changed)
    yield from texts().items()


def texts() -> dict[str, bytes]:
    good = dumped(RECIPE)
    start = "name: x\ntask: parity\n"
    written = {
        "comment": "# x\n", "list": "- a\n", "scalar": "5", "tab": "name:\tx\n\ttask: parity\n", "unclosed": "name: [", "nul": "name: x\0",
        "tag": "name: !!python/object/apply:os.system ['touch hacked']\n", "tuple": start + "seeds: !!python/tuple [0]\n",
        "merge scalar": start + "training: {<<: 3}\n", "twice": "name: x\nname: y\n", "twice inside": start + "training: {steps: 1, steps: 2}\n",
        "list key": "? [a]\n: c\n", "alias of nothing": "name: *x\n", "alias of itself": start + "seeds: &a [*a]\n",
        "alias of the settings": start + "model: {settings: &s {rope_parameters: *s}}\n", "alias of all": "&r\nname: x\ntask: *r\n",
        "deep list": "name: " + "[" * 5000 + "]" * 5000, "deep map": "name: " + "{a: " * 3000 + "1" + "}" * 3000,
        "deep block": "".join(" " * n + "a:\n" for n in range(900)), "laughs": laughs(9, start + "output: "),
        "laughs in settings": start + "model: {settings: {x: " + laughs(9) + "}}\n", "long line": "name: " + "x" * 2_000_000,
        "many keys": "".join(f"k{n}: 1\n" for n in range(40_000)), "two documents": good.decode() + "---\nname: y\n",
        "directive": "%YAML 9.9\n---\nname: x\n", "date key": "2020-01-01: x\n", "bad date": "name: 2020-13-45\n", "date": "name: 2020-01-01\n",
        "yes": start + "seeds: yes\n", "on": "on: x\n", "binary": "name: !!binary '@@@'\n", "int": "name: !!int abc\n", "bool": "name: !!bool abc\n",
        "timestamp": "name: !!timestamp abc\n", "set": start + "seeds: !!set {0}\n", "octal": start + "training: {steps: 010}\n",
        "sexagesimal": start + "training: {steps: 1:30}\n", "digits": start + "training: {steps: " + "9" * 5000 + "}\n",
        "digits of a rate": start + "training: {learning_rate: " + "9" * 5000 + "}\n", "surrogate": 'name: "\\ud800"\ntask: parity\n',
        "escape": 'name: "\\q"\n', "bell": 'name: "a\\ab"\ntask: parity\n', "line in a name": 'name: "a\\nb"\ntask: parity\n',
        "seed twice": start + "seeds: [0, 0]\n", "nan key": ".nan: 1\n", "nothing": "", "blank": "\n \n", "garbage": good.decode() + "\n}{\n",
    }  # fmt: skip
    found = {f"text {name}": text.encode() for name, text in written.items()}
    encoded = {
        "utf-16": good.decode().encode("utf-16"),
        "utf-16-le": good.decode().encode("utf-16-le"),
        "latin": "name: ä".encode("latin-1"),
    }
    encoded |= {
        "mark": b"\xef\xbb\xbf" + good,
        "windows": good.replace(b"\n", b"\r\n"),
        "half": good[: len(good) // 2],
        "bytes": bytes(range(256)),
    }
    return found | {f"text {name}": data for name, data in encoded.items()}


OVERRIDES = [
    "--training.steps=" + "9" * 5000,
    "--training.steps=" + "[" * 3000,
    "--x",
    "x=1",
    "--=1",
    "--training=5",
    "--name=\ud800",
    "--name=a\0b",
]
OVERRIDES += [
    "--output=" + laughs(9),
    "--training.steps=1e3",
    "--training.steps=0x10",
    "--training.steps=010",
    "--name=!!python/name:os.system",
]
OVERRIDES += [
    "--name=2020-01-01",
    "--seeds=[0, 0]",
    "--seeds=[18446744073709551616]",
    "--seeds=*a",
    "--name=&a [*a]",
    "--training.batch=on",
]
OVERRIDES += [
    "--" + "a." * 2000 + "b=1",
    "--name=" + "x" * 100_000,
    "--name=",
    "--training.steps={",
    "--evaluation.lengths=[1000000000]",
]
OVERRIDES += [
    "--training.steps=2000000000",
    "--training.batch=1000000000",
    "--model.width=100000000000",
    "--model.layers=1000000",
    "--output=",
]

STUDY: dict[str, Any] = {
    "name": "s",
    "output": "runs",
    "recipe": {k: v for k, v in TRAINED.items() if k not in ("name", "output", "seeds")},
}
STUDY |= {"axes": {"a": {"one": {}}}, "seeds": [0], "workers": 1}
NAMES = [
    "../../escaped",
    "/tmp/absolute",
    ".",
    "..",
    "",
    " ",
    "a/b",
    "a\\b",
    "a\nb",
    "a\x07b",
    "\u202egnp",
    "x" * 300,
    "é" * 150,
    "\ud800",
    ".hidden",
    "x ",
]


def studies() -> Iterator[tuple[str, bytes]]:
    for name in NAMES:
        yield f"name={name[:20]!r}", dumped(STUDY | {"name": name})
    for junk in (
        None,
        [],
        {},
        5,
        "x",
        {"a": {}},
        {"a": None},
        {"a": {"b": 5}},
        {"a": {"b": {"c": 1}}},
        {"a": {"..": {}}},
        {"a": {"": {}}},
    ):
        yield f"axes={junk!r}", dumped(STUDY | {"axes": junk})
    wide = {f"a{n}": {f"{m}": {} for m in range(10)} for n in range(12)}
    long = {"a": {"x" * 300: {}}}
    for what, changed in {
        "wide": {"axes": wide},
        "long label": {"axes": long},
        "workers": {"workers": 0},
        "seeds": {"seeds": [1, 1]},
    }.items():
        yield what, dumped(STUDY | changed)


GSM = '{"question": "1 + 1?", "answer": "#### 2"}\n' * 60
GOOD = {
    "gsm8k": ("jsonl", GSM), "chat": ("jsonl", '{"problem": "a", "generated_solution": "b"}\n' * 60), "text": ("txt", "a line of text\n" * 200),
    "hotpotqa": ("jsonl", '{"question": "a", "answer": "b", "steps": ["c"]}\n' * 60), "prosqa": ("json", "[]"),
    "bbh-arithmetic": ("json", '{"examples": [{"input": "1 + 1 =", "target": "2"}]}'), "documents": ("jsonl", '{"text": "some text"}\n' * 200),
}  # fmt: skip
ROWS = [
    "5",
    "null",
    "[]",
    "{}",
    '{"question": 5}',
    "{",
    '"x"',
    "[" * 5000,
    '{"a":' * 3000,
    "9" * 5000,
    "NaN",
    '{"text": "\\ud800"}',
    "{} trailing",
    "\0",
]
ROWS += [
    '{"question": "\\ud800", "answer": "#### 2"}',
    '{"question": "q", "answer": "#### ' + "9" * 6000 + '"}',
    '{"messages": [5]}',
]
ROWS += [
    '{"question": "a", "answer": "b", "supporting_facts": [[[], 0]], "context": [["t", ["s"]]]}',
    '[{"question": 1e999}]',
    '{"text": null}',
]
ROWS += [
    '{"examples": [5]}',
    '{"examples": [{"input": "1+1=", "target": "' + "9" * 6000 + '"}]}',
    '[{"question": "q", "edges": [[1e400, 0]]}]',
]


def data_files() -> Iterator[tuple[str, str, str, bytes]]:
    """Label, kind, ending and content."""
    for kind, (ending, good) in GOOD.items():
        for row in ROWS:
            yield f"{kind} {row[:24]!r}", kind, ending, (good * (ending == "jsonl") + row + "\n").encode()
        for name, data in {
            "utf-16": good.encode("utf-16"),
            "latin": b"\xe4" + good.encode(),
            "empty": b"",
            "blank": b"\n\n",
        }.items():
            yield f"{kind} {name}", kind, ending, data


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"", "half": lambda data: data[: len(data) // 2], "zeros": lambda data: b"\0" * len(data), "list": lambda data: b"[]\n",
    "null": lambda data: b"null\n", "object": lambda data: b"{}\n", "number": lambda data: b"5\n", "deep": lambda data: b"[" * 5000 + b"\n",
    "utf-16": lambda data: data.decode("latin-1").encode("utf-16"), "bytes": lambda data: b"\xff\xfa" + data, "digits": lambda data: b"9" * 5000 + b"\n",
    "wrong values": lambda data: data.replace(b"0", b'"x"').replace(b"1", b"null"), "surrogate": lambda data: b'{"a": "\\ud800"}\n',
    "huge": lambda data: data.replace(b"2", b"1" + b"0" * 12),
}  # fmt: skip
SEED, OF_STUDY = "runs/x/seed-0", "runs/s/one/seed-0"
READERS = {
    f"{SEED}/recipe.yaml": (["eval", "runs/x"], ["inspect", "choices", "runs/x"], ["train", "r.yaml"]),
    f"{SEED}/log.jsonl": (["inspect", "latency", "runs/x"], ["inspect", "gates", "runs/x"]),
    f"{SEED}/accuracy.json": (["inspect", "lengths", "runs/x"],),
    f"{SEED}/versions.json": (["eval", "runs/x"],),
    f"{SEED}/model/config.json": (["generate", "runs/x", "1="], ["eval", "runs/x"]),
    f"{SEED}/model/tokenizer.json": (["generate", "runs/x", "1="],),
    f"{SEED}/model/tokenizer_config.json": (["generate", "runs/x", "1="],),
    f"{SEED}/model/generation_config.json": (["generate", "runs/x", "1="],),
    f"{SEED}/model/model.safetensors": (["generate", "runs/x", "1="],),
    "runs/s/summary.json": (["inspect", "lengths", "runs/s"], ["inspect", "choices", "runs/s"]),
    f"{OF_STUDY}/recipe.yaml": (["study", "s.yaml"],),
    f"{OF_STUDY}/log.jsonl": (["study", "s.yaml"],),
    f"{OF_STUDY}/accuracy.json": (["study", "s.yaml"],),
}
PLACES = ("pipe", "socket", "device", "folder", "loop", "dangling")
OPENERS = (
    ["train", "PLACE"],
    ["study", "PLACE"],
    ["eval", "PLACE"],
    ["generate", "PLACE", "1="],
    ["inspect", "parameters", "PLACE"],
)
OPENERS += (["inspect", "lengths", "PLACE"], ["convert", "PLACE", "out", "--whole"], ["convert", "PLACE", "out", "--huginn"])
OPENERS += (["chains", "PLACE", "out"], ["eval", "runs/x", "--data=PLACE"], ["train", "r.yaml", "--model={path: PLACE}"])
OPENERS += (["train", "r.yaml", "--task={kind: gsm8k, train: PLACE, test: PLACE}", "--evaluation.lengths=[]"],)
ARGUMENTS = [["generate", "runs/x", ""], ["generate", "runs/x", "\ud800"], ["generate", "runs/x", "1=", "--temperature=nan"]]
ARGUMENTS += [
    ["generate", "runs/x", "1=", f"--max-new-tokens={10**30}"],
    ["generate", "runs/x", "1" * 500 + "="],
    ["generate", "a\0b", "1="],
]
ARGUMENTS += [
    ["generate", "x" * 5000, "1="],
    ["eval", "runs/x", f"--depth={10**30}"],
    ["bench", "--layers=1000000000000"],
    ["bench", "--batch=x"],
]
ARGUMENTS += [
    ["convert", "runs/x/seed-0/model", "out", "--core=0-99999999999", "--prelude=", "--coda="],
    ["inspect", "choices", "runs/x", "--examples=-1"],
]
ARGUMENTS += [
    ["convert", "runs/x/seed-0/model", "out", "--core=²", "--prelude=", "--coda="],
    ["eval", "runs/x", f"--evaluation.examples={2**62}"],
]


def put(place: str, path: Path) -> None:
    """Make what is no file where a file is wanted."""
    path.unlink(missing_ok=True)
    if place == "pipe":
        os.mkfifo(path)
    elif place == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # names of sockets are short
            made.bind(path.name)
    elif place == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "dangling": "nowhere"}[place])


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
    if not lines or not lines[-1].startswith(("undertow: ", "undertow")):
        return "no sentence"
    return "refused" if seconds <= REFUSED_WITHIN else "refused late"


def cases(seed: int, finished: Path) -> Iterator[tuple[str, str, list[str], Callable[[Path], None]]]:
    """Group, label, command, and what prepares the folder that it runs in."""

    def writes(name: str, data: bytes) -> Callable[[Path], None]:
        return lambda folder: (folder / name).write_bytes(data) and None

    for label, data in recipes(random.Random(seed)):
        yield "recipe", label, ["train", "r.yaml"], writes("r.yaml", data)
    for override in OVERRIDES:
        yield "override", override[:40], ["train", "r.yaml", override], writes("r.yaml", dumped(TRAINED))
    for label, data in studies():
        yield "study", label, ["study", "s.yaml"], writes("s.yaml", data)
    for name in NAMES:
        yield "name", repr(name[:20]), ["train", "r.yaml"], writes("r.yaml", dumped(TRAINED | {"name": name}))
    for label, kind, ending, data in data_files():
        task = {"kind": kind, "test": f"d.{ending}"} | ({} if kind == "bbh-arithmetic" else {"train": f"d.{ending}"})
        if kind in ("text", "documents"):
            task = {"kind": "text", "files": [f"d.{ending}"], "context": 8}
        model = TRAINED["model"] | (
            {} if kind in ("text", "documents") else {"tokenizer": str(finished / "runs/x/seed-0/model")}
        )
        evaluation = {"examples": 2, "batch": 2}
        recipe = dumped(TRAINED | {"task": task, "model": model, "evaluation": evaluation})

        def both(folder: Path, data: bytes = data, ending: str = ending, recipe: bytes = recipe) -> None:
            (folder / f"d.{ending}").write_bytes(data)
            (folder / "r.yaml").write_bytes(recipe)

        yield "data", label, ["train", "r.yaml"], both
    for name, commands in READERS.items():
        for how, damage in DAMAGE.items():
            for command in commands:

                def harm(folder: Path, name: str = name, damage: Callable[[bytes], bytes] = damage) -> None:
                    path = folder / name
                    path.write_bytes(damage(path.read_bytes()))

                yield "run", f"{name} {how}: {' '.join(command[:2])}", command, harm
        for place in ("pipe", "folder", "loop"):
            yield (
                "run",
                f"{name} {place}",
                commands[0],
                lambda folder, place=place, name=name: put(place, folder / name),
            )
    for place in PLACES:
        for command in OPENERS:
            given = [argument.replace("PLACE", "place") for argument in command]
            yield (
                "place",
                f"{place}: {' '.join(command)[:50]}",
                given,
                lambda folder, place=place: put(place, folder / "place"),
            )
    for command in ARGUMENTS:
        yield "argument", ascii(" ".join(command))[:60], command, lambda folder: None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the junk that each key gets")
    parser.add_argument("--only", help="one group: recipe, override, study, name, data, run, place or argument")
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
            print(f"{group}: {label!a}: {became} after {seconds:.1f} s: {ascii(last)[:200]}", flush=True)
    total = sum(sum(counter.values()) for counter in counts.values())
    print(f"\n{'kind':<10} {'inputs':>6} {'refused':>8} {'harmless':>9} {'not clean':>10}")
    for group, counter in counts.items():
        bad = sum(count for became, count in counter.items() if became not in ("ok", "refused"))
        print(f"{group:<10} {sum(counter.values()):>6} {counter['refused']:>8} {counter['ok']:>9} {bad:>10}")
    print(f"slowest refusal: {slowest:.1f} s of CPU time\n{total - wrong} of {total} clean")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
