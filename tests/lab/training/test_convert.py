"""`undertow convert`: looped checkpoints and imported training weights, from the command line."""

from pathlib import Path

import pytest
import torch
from helpers import ROUNDING, difference, unhosted
from small_huginn import ids, small
from transformers import AutoModelForCausalLM

from undertow.cli.main import main
from undertow.errors import ConfigError
from undertow.host.attachment import find_attachment
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training.convert import picks


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    unhosted("llama").save_pretrained(folder)
    character_tokenizer("".join(chr(65 + i) for i in range(40))).save_pretrained(folder)
    return folder


def test_loops_a_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "looped"
    assert (
        main(
            [
                "convert",
                str(checkpoint),
                str(output),
                "--prelude=0",
                "--core=1-2",
                "--coda=3",
                "--depth=6",
            ]
        )
        == 0
    )
    assert (
        "(1, 2, 1) layers, 6 iterations; one iteration equals the model, bit for bit"
        in capsys.readouterr().out
    )
    model = AutoModelForCausalLM.from_pretrained(output)
    assert find_attachment(model).looped.depth == 6
    tokens = ids(1, 5)
    with torch.no_grad():
        assert (
            difference(model(tokens, depth=1).logits, unhosted("llama")(tokens).logits) < ROUNDING
        )
    assert (
        main(["convert", str(checkpoint), str(tmp_path / "fewer"), "--core=1,3", "--no-injection"])
        == 0
    )
    assert "2 of 4 layers are left out" in capsys.readouterr().out


def test_imports_training_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokens = small(), ids(1, 4)
    torch.save(
        {"model": {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}},
        tmp_path / "weights.pth",
    )
    model.config.to_json_file(tmp_path / "config.json")
    assert main(["convert", str(tmp_path / "weights.pth"), str(tmp_path / "out"), "--huginn"]) == 0
    assert "parameters" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert difference(loaded(tokens, depth=3).logits, model(tokens, depth=3).logits) < ROUNDING


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--preset=llama-3.2-1b"], "the model's layers are 0 to 3"),
        (["--preset=llama"], "there is no preset 'llama'"),
        (["--core=1-2", "--coda=2"], "layer 2 is picked twice"),
        ([], "core is empty"),
        (["--core=a"], "not written as"),
        (["--core=1", "--depth=0"], "depth is 0"),
    ],
)
def test_mistakes(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    match: str,
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), *arguments]) == 2
    assert match in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_to_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out"), "--core=0"]) == 2
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out"), "--huginn"]) == 2
    assert "config" in capsys.readouterr().err


def test_picks() -> None:
    assert (
        picks("0-3") == (0, 1, 2, 3) and picks("0,2, 5-7") == (0, 2, 5, 6, 7) and picks(None) == ()
    )
    with pytest.raises(ConfigError, match="not written as"):
        picks("3-")
