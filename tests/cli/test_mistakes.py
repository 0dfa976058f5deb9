"""A mistake of the user's: exit code 2 and one sentence that says what to mend, never a
traceback."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from undertow.cli.main import main
from undertow.lab.runs.run import Run
from undertow.mapping import save_yaml

CONNECTIONS = "--recurrence.connections="


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Runs a command that must fail, and returns its one sentence."""

    def run(arguments: list[str]) -> str:
        code: Any
        try:
            code = main(arguments)
        except SystemExit as exit_:  # what argparse itself finds
            code = exit_.code
        output = capsys.readouterr()
        assert code == 2
        assert not output.out
        assert "Traceback" not in output.err
        (line,) = [line for line in output.err.splitlines() if line.startswith("undertow: ")]
        return line

    return run


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A tiny recipe with a recurrence."""
    return str(tiny.recipe_file(tmp_path, recurrence=tiny.TURBOCONN))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--trainig.steps=3", "unknown key trainig; did you mean 'training'?"),
        ("--training.step=3", "unknown key training.step; did you mean 'steps'?"),
        ("--training.steps=many", "training.steps: expected whole number, got 'many'"),
        ("--training.steps", "'--training.steps' has no value; write --training.steps=value"),
        ("--steps=3", "unknown key steps"),
        ("steps=3", "'steps=3' is not a setting; write it as --section.key=value"),
        ("-x", "'-x' is not a setting; write it as --section.key=value"),
        (CONNECTIONS + "[[5, 0]]", "layer 5"),
        (CONNECTIONS + "[[0, 1]]", "connection 0 -> 1 goes up"),
        (CONNECTIONS + "[]", "TurboConn has no connections"),
        ("--recurrence.lag=0", "lag is 0, but a state can only reach a later token; use 1 or more"),
        ("--model.architecture=rwkv", "(model_type 'rwkv') cannot carry a recurrence"),
        ("--model.architecture=mamba", "(model_type 'mamba') cannot carry a recurrence"),
        ("--model.architecture=lama", "did you mean 'llama'?"),
        ("--model={path: /no/such/model}", "there is no folder /no/such/model"),
        ("--task=gsm8k", "evaluation.lengths is set, but gsm8k reads a file as it is"),
        ("--lora={}", "model.path is not set; set it or remove lora"),
        (
            "--task.max_length=3",
            "valid split, which seems to hold no such prompt; ask for a greater length",
        ),
        ("--training.max_tokens=2", "have more than 2 tokens; raise training.max_tokens"),
        ("--evaluation.batch=0", "evaluation: batch is 0; use 1 or more"),
        ("--evaluation.lengths=[8, 2]", "at length 2 falls in the test split"),
    ],
)
def test_train(
    override: str, expected: str, path: str, refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    assert expected in refused(["train", path, override])
    assert not (tmp_path / "tiny").exists(), (
        "it left a folder, which would refuse the mended recipe"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--limit=3"], "--limit is an option of --tasks alone; use --evaluation.examples"),
        (["--batch=3"], "--batch is an option of --tasks alone; use --evaluation.batch"),
        (["--prefill=jacobi"], "--prefill is an option of --tasks alone"),
        (["--tasks=arc_easy", "--data=x.jsonl"], "give one of them"),
        (["--solver=jacobi"], "--solver=jacobi says how a model is made"),
        (["--training.steps=9"], "--training.steps=9 says how a model is made"),
    ],
)
def test_eval(
    arguments: list[str], expected: str, refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    assert expected in refused(["eval", str(tmp_path), *arguments])


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--key_value_heads=3", "heads, 4, are no multiple of key_value_heads, 3"),
        ("--threads=0", "threads is 0; use 1 or more"),
        ("--layers=1000000000000", "layers is 1000000000000; use 10,000 or less"),
        ("--width=1000000", "parameters, and its training takes"),
        ("--vocabulary=0", "vocabulary is 0; use 1 or more"),
        ("--device=gpu", "device is 'gpu'; use cpu or cuda"),
        pytest.param(
            "--device=cuda",
            "PyTorch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_bench(argument: str, expected: str, refused: Callable[[list[str]], str]) -> None:
    assert expected in refused(["bench", argument])


def test_several_processes(
    path: str, refused: Callable[[list[str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT not set; start" in refused(
        ["train", path]
    )


def test_compiling_without_a_compiler(
    path: str, refused: Callable[[list[str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    line = refused(["train", path, "--training.compile=regional"])
    assert "there is no no-such-compiler; install one" in line


def test_a_rank_without_other_processes_trains_alone(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["train", path, "--seeds=[0]"]) == 0
    assert (tmp_path / "tiny" / "seed-0" / "accuracy.json").is_file()


def test_seeds_of_another_recipe(
    path: str,
    refused: Callable[[list[str]], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They would be pooled with this one's."""
    assert main(["train", path, "--seeds=[0]"]) == 0
    capsys.readouterr()
    line = refused(["train", path, "--seeds=[1]", "--model.width=32"])
    assert "seed-0 was made by another recipe, whose model.width is 16 and not 32" in line
    assert not (tmp_path / "tiny" / "seed-1").exists()


def test_train_with_a_file_that_is_no_recipe(
    refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    assert refused(["train", "absent.yaml"]) == "undertow: absent.yaml: no such file"
    assert "is a folder" in refused(["train", str(tmp_path)])
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: x\ntask: [")
    assert "broken.yaml, line 2" in refused(["train", str(broken)])
    broken.write_text("name: x\nname: y\ntask: parity")
    assert "line 2: the key 'name' is given twice" in refused(["train", str(broken)])


def test_a_bad_test_file_is_told_before_the_training(
    refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    good, bad, empty = tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    row = '{"question": "1 + 1", "answer": "#### 2"}\n'
    good.write_text(row * 40)
    bad.write_text(row + '{"question": "1 + 1", "answer": "#### two"}\n')
    empty.write_text("")
    lines = {
        str(bad): (
            "bad.jsonl, line 2: expected a number as the answer, found 'two'; correct or remove "
            "the line"
        ),
        str(empty): "empty.jsonl holds no problems",
        str(tmp_path / "absent.jsonl"): "absent.jsonl cannot be read (No such file or directory)",
        "null": "The test split needs the field 'test' of gsm8k",
    }
    for test, expected in lines.items():
        task = f"--task={{kind: gsm8k, train: {good}, test: {test}}}"
        path = str(tiny.recipe_file(tmp_path, evaluation={"lengths": []}))
        assert expected in refused(["train", path, task, "--evaluation.lengths=[]"])
        study = tmp_path / "study.yaml"
        study.write_text(
            f"name: grid\noutput: {tmp_path}\nrecipe: {{}}\naxes: {{a: {{right: {{}}}}}}\n"
        )
        assert expected in refused(["study", str(study), task.replace("--task", "--recipe.task")])
        assert not (tmp_path / "tiny").exists() and not (tmp_path / "grid").exists()


def test_train_where_nothing_can_be_written(
    path: str, refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(["train", path, f"--output={tmp_path / 'file'}"])


def test_train_on_a_folder_that_is_no_checkpoint(
    path: str, refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    message = refused(["train", path, f"--model={{path: {tmp_path}}}"])
    assert (
        f"{tmp_path} is no checkpoint: it has no config.json; give a folder that save_pretrained "
        "wrote" in message
    )


def test_train_in_the_folder_of_another_recipe(
    path: str, refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    recipe = tiny.recipe(tmp_path, recurrence=tiny.TURBOCONN)
    save_yaml(recipe, Run.of(recipe, 0).folder / "recipe.yaml")
    message = refused(["train", path, "--training.steps=7"])
    assert (
        "was made by another recipe, whose training.steps is 6 and not 7; choose another name or "
        "remove" in message
    )


def test_eval_of_what_is_no_finished_run(
    path: str, refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    assert "there is no such folder" in refused(["eval", str(tmp_path / "absent")])
    assert "it has no recipe.yaml" in refused(["eval", str(tmp_path)])
    recipe = tiny.recipe(tmp_path)
    save_yaml(recipe, Run.of(recipe, 0).folder / "recipe.yaml")
    for folder in (tmp_path / "tiny", tmp_path / "tiny" / "seed-0"):
        assert "is no finished run: its training has not finished" in refused(["eval", str(folder)])
        assert "is no finished run: its training has not finished" in refused(
            ["generate", str(folder), "1="]
        )
    (tmp_path / "tiny" / "seed-0" / "model").mkdir()
    assert "is no checkpoint: it has no config.json" in refused(["eval", str(tmp_path / "tiny")])
    assert "unknown key evaluation.length; did you mean 'lengths'?" in refused(
        ["eval", str(tmp_path / "tiny"), "--evaluation.length=[3]"]
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--recipe.training.step=3", "unknown key training.step; did you mean 'steps'?"),
        ("--axes.a.b={training.step: 3}", "unknown key training.step; did you mean 'steps'?"),
        ("--axes.a.b=3", "axes.a.b: expected"),
        ("--axes={}", "axes is empty; give at least one choice"),
        ("--workers=0", "workers is 0; use 1 or more"),
        ("--seed=3", "unknown key seed; did you mean 'seeds'?"),
    ],
)
def test_study(
    override: str, expected: str, refused: Callable[[list[str]], str], tmp_path: Path
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(
        f"name: grid\noutput: {tmp_path}\nrecipe: {{task: parity}}\naxes: {{a: {{right: {{}}}}}}\n"
    )
    assert expected in refused(["study", str(path), override])
    assert [each.name for each in tmp_path.iterdir()] == ["study.yaml"]


def test_generate(refused: Callable[[list[str]], str], tmp_path: Path) -> None:
    assert "there is no folder" in refused(["generate", str(tmp_path / "absent"), "1="])
    assert (
        "undertow generate does not know '--temprature=1'; see undertow generate --help"
        in refused(["generate", str(tmp_path), "1=", "--temprature=1"])
    )
    assert "max-new-tokens is 0; use 1 or more" in refused(
        ["generate", str(tmp_path), "1=", "--max-new-tokens=0"]
    )
    assert "temperature is -1.0; use 0" in refused(
        ["generate", str(tmp_path), "1=", "--temperature=-1"]
    )


def test_demo(refused: Callable[[list[str]], str]) -> None:
    assert "undertow demo does not know '--fast'; see undertow demo --help" in refused(
        ["demo", "--fast"]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["eval"],
        ["study"],
        ["generate", "run"],
        ["generate", "run", "1=", "--max-new-tokens=x"],
    ],
)
def test_what_argparse_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert "error: " in output.err and "Traceback" not in output.err


def test_a_mistake_of_ours_is_not_taken_for_the_users(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr("undertow.lab.evaluation.run.train", broken)
    with pytest.raises(AttributeError):
        main(["train", path])


def test_a_real_process(path: str) -> None:
    command = [sys.executable, "-m", "undertow.cli.main", "train", path, CONNECTIONS + "[[5, 0]]"]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment())
    assert done.returncode == 2
    assert not done.stdout
    assert re.fullmatch(r"undertow: .*layer 5.*\n", done.stderr), done.stderr


# --- what is no file, no text, or too much


def test_places_that_are_no_files(refused: Callable[[list[str]], str], tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    task = f"--task={{kind: gsm8k, train: {pipe}, test: {pipe}}}"
    path = str(tiny.recipe_file(tmp_path, evaluation={"lengths": []}))
    for arguments in (["train", str(pipe)], ["study", str(pipe)], ["train", path, task]):
        assert "is a named pipe, which is not read; save what comes from it in a file" in refused(
            arguments
        )
    for arguments in (["train", str(loop)], ["generate", str(loop), "1="], ["eval", str(loop)]):
        assert str(loop) in refused(arguments)


@pytest.mark.parametrize("argument", ["--name=\ud800", "a\0b", "\udcff"])
def test_arguments_that_are_no_text(argument: str, refused: Callable[[list[str]], str]) -> None:
    assert "is no UTF-8 text; write it otherwise" in refused(["train", argument])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RecursionError("maximum recursion depth exceeded"), "nested too deep"),
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory ran out"),
        (OverflowError("int too large"), "a number that was given is too large"),
        (
            UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
            "a text that was given cannot be read",
        ),
    ],
)
def test_the_last_resort(
    error: Exception,
    expected: str,
    path: str,
    refused: Callable[[list[str]], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("undertow.lab.runs.recipe.load_recipe", fail)
    assert expected in refused(["train", path])


def test_a_fault_of_ours_keeps_its_traceback(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the last resort."""

    def fail(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("undertow.lab.runs.recipe.load_recipe", fail)
    with pytest.raises(RuntimeError, match="mat1"):
        main(["train", path])
