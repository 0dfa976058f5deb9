"""The malformed inputs of `malformed.py`: what each is called, the command that gets it, and what
prepares its folder."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from malformed_recipes import NAMES, OVERRIDES, TRAINED, dumped, recipes, studies

GSM = '{"question": "1 + 1?", "answer": "#### 2"}\n' * 60
GOOD = {
    "gsm8k": ("jsonl", GSM),
    "chat": ("jsonl", '{"problem": "a", "generated_solution": "b"}\n' * 60),
    "text": ("txt", "a line of text\n" * 200),
    "hotpotqa": ("jsonl", '{"question": "a", "answer": "b", "steps": ["c"]}\n' * 60),
    "prosqa": ("json", "[]"),
    "bbh-arithmetic": ("json", '{"examples": [{"input": "1 + 1 =", "target": "2"}]}'),
    "documents": ("jsonl", '{"text": "some text"}\n' * 200),
}
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
            yield (
                f"{kind} {row[:24]!r}",
                kind,
                ending,
                (good * (ending == "jsonl") + row + "\n").encode(),
            )
        for name, data in {
            "utf-16": good.encode("utf-16"),
            "latin": b"\xe4" + good.encode(),
            "empty": b"",
            "blank": b"\n\n",
        }.items():
            yield f"{kind} {name}", kind, ending, data


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: b"\0" * len(data),
    "list": lambda data: b"[]\n",
    "null": lambda data: b"null\n",
    "object": lambda data: b"{}\n",
    "number": lambda data: b"5\n",
    "deep": lambda data: b"[" * 5000 + b"\n",
    "utf-16": lambda data: data.decode("latin-1").encode("utf-16"),
    "bytes": lambda data: b"\xff\xfa" + data,
    "digits": lambda data: b"9" * 5000 + b"\n",
    "wrong values": lambda data: data.replace(b"0", b'"x"').replace(b"1", b"null"),
    "surrogate": lambda data: b'{"a": "\\ud800"}\n',
    "huge": lambda data: data.replace(b"2", b"1" + b"0" * 12),
}
SEED, OF_STUDY = "runs/x/seed-0", "runs/s/one/seed-0"
READERS = {
    f"{SEED}/recipe.yaml": (
        ["eval", "runs/x"],
        ["inspect", "choices", "runs/x"],
        ["train", "r.yaml"],
    ),
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
OPENERS += (
    ["inspect", "lengths", "PLACE"],
    ["convert", "PLACE", "out", "--whole"],
    ["convert", "PLACE", "out", "--huginn"],
)
OPENERS += (
    ["chains", "PLACE", "out"],
    ["eval", "runs/x", "--data=PLACE"],
    ["train", "r.yaml", "--model={path: PLACE}"],
)
OPENERS += (
    [
        "train",
        "r.yaml",
        "--task={kind: gsm8k, train: PLACE, test: PLACE}",
        "--evaluation.lengths=[]",
    ],
)
ARGUMENTS = [
    ["generate", "runs/x", ""],
    ["generate", "runs/x", "\ud800"],
    ["generate", "runs/x", "1=", "--temperature=nan"],
]
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
        with (
            contextlib.chdir(path.parent),
            socket.socket(socket.AF_UNIX) as made,
        ):  # names of sockets are short
            made.bind(path.name)
    elif place == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "dangling": "nowhere"}[place])


def cases(
    seed: int, finished: Path
) -> Iterator[tuple[str, str, list[str], Callable[[Path], None]]]:
    """Group, label, command, and what prepares the folder that it runs in."""

    def writes(name: str, data: bytes) -> Callable[[Path], None]:
        return lambda folder: (folder / name).write_bytes(data) and None

    for label, data in recipes(random.Random(seed)):
        yield "recipe", label, ["train", "r.yaml"], writes("r.yaml", data)
    for override in OVERRIDES:
        yield (
            "override",
            override[:40],
            ["train", "r.yaml", override],
            writes("r.yaml", dumped(TRAINED)),
        )
    for label, data in studies():
        yield "study", label, ["study", "s.yaml"], writes("s.yaml", data)
    for name in NAMES:
        yield (
            "name",
            repr(name[:20]),
            ["train", "r.yaml"],
            writes("r.yaml", dumped(TRAINED | {"name": name})),
        )
    for label, kind, ending, data in data_files():
        task = {"kind": kind, "test": f"d.{ending}"} | (
            {} if kind == "bbh-arithmetic" else {"train": f"d.{ending}"}
        )
        if kind in ("text", "documents"):
            task = {"kind": "text", "files": [f"d.{ending}"], "context": 8}
        model = TRAINED["model"] | (
            {}
            if kind in ("text", "documents")
            else {"tokenizer": str(finished / "runs/x/seed-0/model")}
        )
        evaluation = {"examples": 2, "batch": 2}
        recipe = dumped(TRAINED | {"task": task, "model": model, "evaluation": evaluation})

        def both(
            folder: Path, data: bytes = data, ending: str = ending, recipe: bytes = recipe
        ) -> None:
            (folder / f"d.{ending}").write_bytes(data)
            (folder / "r.yaml").write_bytes(recipe)

        yield "data", label, ["train", "r.yaml"], both
    for name, commands in READERS.items():
        for how, damage in DAMAGE.items():
            for command in commands:

                def harm(
                    folder: Path, name: str = name, damage: Callable[[bytes], bytes] = damage
                ) -> None:
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
