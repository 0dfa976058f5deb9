"""Malformed recipes, overrides, studies and names, for `malformed_inputs.py`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import yaml

RECIPE: dict[str, Any] = {
    "name": "x",
    "output": "runs",
    "seeds": [0],
    "task": {"kind": "parity", "template": "bare", "min_length": 1, "max_length": 16, "seed": 0},
    "model": {
        "architecture": "llama",
        "layers": 2,
        "width": 16,
        "heads": 2,
        "positions": 64,
        "settings": {},
        "pauses": 0,
    }
    | {
        "head_width": 8,
        "key_value_heads": 2,
        "feed_forward": 16,
        "initializer_range": 0.1,
        "vocabulary": None,
        "path": None,
    },
    "recurrence": {"kind": "t2mlr", "first_layer": 0, "last_layer": 1},
    "solver": {
        "kind": "auto",
        "tolerance": 0.01,
        "every": 32,
        "gradient": "adjoint(0.1)",
        "rollout_cost": 2.0,
    },
    "depth": None,
    "lora": None,
    "training": {
        "steps": 2,
        "batch": 2,
        "accumulate": 1,
        "learning_rate": 1e-3,
        "schedule": "linear",
        "warmup_steps": 1,
    }
    | {
        "floor": 0.0,
        "gate_multiplier": 1.0,
        "weight_decay": 0.01,
        "clip": 1.0,
        "precision": "fp32",
        "max_tokens": None,
    }
    | {
        "log_every": 1,
        "evaluate_every": None,
        "evaluate_examples": 2,
        "save_every": None,
        "threads": 1,
        "epochs": None,
    },
    "evaluation": {
        "lengths": [8],
        "examples": 2,
        "batch": 2,
        "temperature": None,
        "max_new_tokens": 2,
    },
}
TURBOCONN = {
    "kind": "turboconn",
    "connections": [[1, 0]],
    "lag": 1,
    "alpha": 1.0,
    "rank": 4,
    "normalize": False,
}
LOOPED = {
    "prelude": [0],
    "core": [1],
    "coda": [],
    "injection": "adapter",
    "depth": 2,
    "backward": 2,
    "state_std": 0.1,
}
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
    variants = [
        RECIPE,
        RECIPE | {"recurrence": TURBOCONN, "solver": "sequential"},
        plain | {"depth": DEPTH},
    ]
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
        "comment": "# x\n",
        "list": "- a\n",
        "scalar": "5",
        "tab": "name:\tx\n\ttask: parity\n",
        "unclosed": "name: [",
        "nul": "name: x\0",
        "tag": "name: !!python/object/apply:os.system ['touch hacked']\n",
        "tuple": start + "seeds: !!python/tuple [0]\n",
        "merge scalar": start + "training: {<<: 3}\n",
        "twice": "name: x\nname: y\n",
        "twice inside": start + "training: {steps: 1, steps: 2}\n",
        "list key": "? [a]\n: c\n",
        "alias of nothing": "name: *x\n",
        "alias of itself": start + "seeds: &a [*a]\n",
        "alias of the settings": start + "model: {settings: &s {rope_parameters: *s}}\n",
        "alias of all": "&r\nname: x\ntask: *r\n",
        "deep list": "name: " + "[" * 5000 + "]" * 5000,
        "deep map": "name: " + "{a: " * 3000 + "1" + "}" * 3000,
        "deep block": "".join(" " * n + "a:\n" for n in range(900)),
        "laughs": laughs(9, start + "output: "),
        "laughs in settings": start + "model: {settings: {x: " + laughs(9) + "}}\n",
        "long line": "name: " + "x" * 2_000_000,
        "many keys": "".join(f"k{n}: 1\n" for n in range(40_000)),
        "two documents": good.decode() + "---\nname: y\n",
        "directive": "%YAML 9.9\n---\nname: x\n",
        "date key": "2020-01-01: x\n",
        "bad date": "name: 2020-13-45\n",
        "date": "name: 2020-01-01\n",
        "yes": start + "seeds: yes\n",
        "on": "on: x\n",
        "binary": "name: !!binary '@@@'\n",
        "int": "name: !!int abc\n",
        "bool": "name: !!bool abc\n",
        "timestamp": "name: !!timestamp abc\n",
        "set": start + "seeds: !!set {0}\n",
        "octal": start + "training: {steps: 010}\n",
        "sexagesimal": start + "training: {steps: 1:30}\n",
        "digits": start + "training: {steps: " + "9" * 5000 + "}\n",
        "digits of a rate": start + "training: {learning_rate: " + "9" * 5000 + "}\n",
        "surrogate": 'name: "\\ud800"\ntask: parity\n',
        "escape": 'name: "\\q"\n',
        "bell": 'name: "a\\ab"\ntask: parity\n',
        "line in a name": 'name: "a\\nb"\ntask: parity\n',
        "seed twice": start + "seeds: [0, 0]\n",
        "nan key": ".nan: 1\n",
        "nothing": "",
        "blank": "\n \n",
        "garbage": good.decode() + "\n}{\n",
    }
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
