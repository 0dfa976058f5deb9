"""Recurrent depth from the command line: --depth of generate and eval, and what convert takes and
refuses."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from helpers import unhosted
from small_huginn import small
from transformers import AutoModelForCausalLM, AutoTokenizer

from undertow.cli.main import main
from undertow.depth.handle import get_depth
from undertow.host.attachment import find_attachment
from undertow.lab.evaluation import run as evaluation
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training import train

TOKENIZER = character_tokenizer("".join(chr(65 + i) for i in range(40)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a recurrent-depth model of depth 2 with one seed."""
    looped = {"prelude": [0], "core": [1], "coda": [], "depth": 2}
    depth = {"looped": looped, "schedule": {"kind": "fixed", "depth": 2}, "evaluate_depths": [2]}
    training = {"steps": 12, "save_every": None}
    return train(
        tiny.recipe(tmp_path_factory.mktemp("runs"), depth=depth, training=training), 0
    ).parent


def test_generate_at_a_depth(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []
    plain = evaluation.generate

    def watched(model, *arguments):  # type: ignore[no-untyped-def]
        answer = plain(model, *arguments)
        ran.append(find_attachment(model).depth_report.mean)
        return answer

    monkeypatch.setattr(evaluation, "generate", watched)
    for options in ([], ["--depth", "5"]):
        assert main(["generate", str(trained), "1011=", "--max-new-tokens=3", *options]) == 0
    assert ran == [2, 5]


def test_eval_at_a_depth(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = trained / "seed-0"
    assert main(["eval", str(trained)]) == 0
    before, recipe, figure = (
        path.read_bytes()
        for path in (seed / "accuracy.json", seed / "recipe.yaml", trained / "accuracy.png")
    )
    capsys.readouterr()
    assert main(["eval", str(trained), "--depth=3", "--evaluation.lengths=[7]"]) == 0
    assert capsys.readouterr().out.startswith("tiny at depth 3\n")
    assert [
        each["length"] for each in json.loads((seed / "accuracy-depth-3.json").read_text())
    ] == [7]
    assert (trained / "accuracy-depth-3.png").is_file()
    assert (seed / "accuracy.json").read_bytes() == before, (
        "the trained depth's results are another depth's"
    )
    assert (seed / "recipe.yaml").read_bytes() == recipe
    assert (trained / "accuracy.png").read_bytes() == figure


def test_a_loss_at_a_depth(tmp_path: Path) -> None:
    text = tmp_path / "squares.txt"
    text.write_text("".join(f"{number * number}\n" for number in range(200)))
    folder = train(
        tiny.recipe(
            tmp_path,
            task={"kind": "text", "files": [str(text)], "context": 16},
            depth={
                "shape": [0, 1, 1],
                "schedule": {"kind": "fixed", "depth": 2},
                "evaluate_depths": [2],
            },
            training={"steps": 2, "save_every": None},
            evaluation={"lengths": [], "examples": 4},
        ),
        0,
    )
    found = {}
    for depth in (None, 2, 6):
        assert evaluation.evaluate(folder, [], depth)
        found[depth] = json.loads(
            (folder / f"loss{evaluation.depth_suffix(depth)}.json").read_text()
        )["loss"]
    assert found[None] == found[2] != found[6]


def test_zero_shot_at_a_depth(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("undertow.lab.evaluation.zero_shot")
    seen = []
    monkeypatch.setattr(
        module,
        "zero_shot_scores",
        lambda model, *_: seen.append(get_depth(model)) or {"t": {"acc": 0.5}},
    )
    for options in ([], ["--depth=7"]):
        assert main(["eval", str(trained), "--tasks=t", *options]) == 0
    assert seen == [2, 7]
    written = [
        json.loads((trained / "seed-0" / f"zero_shot{end}.json").read_text())["depth"]
        for end in ("", "-depth-7")
    ]
    assert written == [None, 7]


@pytest.mark.parametrize("command", [["generate", "1011="], ["eval"], ["eval", "--tasks=t"]])
@pytest.mark.parametrize("depth", [0, -1])
def test_no_depth(
    command: list[str], depth: int, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command
    assert main([name, str(trained), *rest, f"--depth={depth}"]) == 2
    assert (
        f"depth is {depth}; use a whole number of iterations, 1 or more" in capsys.readouterr().err
    )


def test_a_model_without_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.recipe(
        tmp_path, recurrence=tiny.TURBOCONN, training={"steps": 1, "save_every": None}
    )
    run = str(train(recipe, 0))
    capsys.readouterr()
    for command in (["generate", run, "1011="], ["eval", run], ["eval", run, "--tasks=t"]):
        assert main([*command, "--depth=3"]) == 2
        error = capsys.readouterr().err
        assert error == (
            f"undertow: depth is 3, but {run}/model has no recurrence in depth; leave depth out\n"
        )


def test_an_imported_model_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    model.config.to_json_file(tmp_path / "config.json")
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    convert = ["convert", str(tmp_path / "weights.pth"), str(tmp_path / "out"), "--huginn"]
    assert main([*convert, f"--tokenizer={tmp_path / 'none'}"]) == 2
    assert f"no tokenizer could be loaded from {tmp_path / 'none'}" in capsys.readouterr().err
    assert main([*convert, f"--tokenizer={tmp_path / 'tokenizer'}"]) == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert main(["generate", str(tmp_path / "out"), "ABC", "--max-new-tokens=2", "--depth=3"]) == 0


def test_convert_loops_a_whole_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, output = tmp_path / "base", tmp_path / "out"
    unhosted("llama").save_pretrained(base)
    TOKENIZER.save_pretrained(base)
    assert main(["convert", str(base), str(output), "--whole", "--depth=3"]) == 0
    assert (
        "(0, 4, 0) layers, 3 iterations; one iteration equals the model, bit for bit"
        in capsys.readouterr().out
    )
    looped = find_attachment(AutoModelForCausalLM.from_pretrained(output)).looped
    assert looped.gate and looped.norm and looped.injection == "none"
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "other"), "--whole"]) == 2
    assert f"{tmp_path / 'none'} has no model config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--huginn", "--core=1"], "--core does nothing beside --huginn; leave out one of them"),
        (["--huginn", "--depth=4"], "--depth does nothing beside --huginn; leave out one of them"),
        (
            ["--huginn", "--no-injection"],
            "--no-injection does nothing beside --huginn; leave out one of them",
        ),
        (
            ["--preset=llama-3.2-1b", "--core=1"],
            "--core does nothing beside --preset; leave out one of them",
        ),
        (["--whole", "--coda=1"], "--coda does nothing beside --whole; leave out one of them"),
        (
            ["--core=1", "--tokenizer=x"],
            "--tokenizer is an option of --huginn alone; give --huginn, or leave it out",
        ),
    ],
)
def test_convert_ignores_nothing(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), *arguments]) == 2
    assert capsys.readouterr().err == f"undertow: {expected}\n"
