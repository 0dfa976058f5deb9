"""A manifest tells a folder that is as it was saved from any other."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import undertow
from undertow import manifest
from undertow.errors import CheckpointError
from undertow.files import MANIFEST, remove_leftovers, replacing_folder
from undertow.lab.runs.loading import load
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training.from_scratch import from_scratch
from undertow.manifest import check_manifest, check_model, write_manifest


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is missing"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes and not 5"),
    "flipped": (flipped, "is not what was saved"),
    "exchanged": (lambda path: path.write_bytes(b"there"), "is not what was saved"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    (made / "inner").mkdir(parents=True)
    (made / "one").write_bytes(b"hello")
    (made / "inner" / "two").write_bytes(b"world")
    write_manifest(made)
    return made


@pytest.mark.parametrize("name", ["one", "inner/two"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage: str, name: str, folder: Path) -> None:
    check_manifest(folder, ["one"])
    (folder / "another").write_text("does not matter")
    check_manifest(folder)
    harm, said = DAMAGES[damage]
    harm(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} {said}"):
        check_manifest(folder)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{}",
            "[]",
            "null",
            '{"files": {}}',
            '{"files": {"one": ["size", "sha256"]}}',
            "[" * 9999,
        ),
        *(
            f'{{"files": {{"one": {{"size": {size}, "sha256": "a"}}}}}}'
            for size in ("null", '"5"', "[]", "true", "5.0")
        ),
        *(
            f'{{"files": {{"{name}": {{"size": 5, "sha256": "a"}}}}}}'
            for name in (r"o\u0000ne", r"o\ud800ne")
        ),
        '{"files": {"one": {"size": 5, "sha256": null}}}',
    ],
)
def test_a_damaged_manifest_is_refused(text: str, folder: Path) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        check_manifest(folder)
    (folder / MANIFEST).unlink()
    check_manifest(folder)  # as other programs make folders


def test_a_file_that_is_not_listed_is_missed(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json does not list three"):
        check_manifest(folder, ["three"])


def test_hashes_are_what_finds_other_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "one").write_bytes(b"olleh")
    with pytest.raises(CheckpointError):
        check_manifest(folder)
    monkeypatch.setattr(manifest, "digest", lambda path: check_manifest.__name__)
    write_manifest(folder)
    (folder / "one").write_bytes(b"hello")
    check_manifest(folder)  # the control: sizes alone would not


def test_a_model_of_other_weights_is_never_loaded(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("01=")
    model = from_scratch(ModelSection(width=16, heads=2, positions=64), tokenizer)
    undertow.attach(model, undertow.T2MLR(0, 1))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write_manifest(tmp_path)
    load(str(tmp_path))
    weights = tmp_path / "model.safetensors"
    flipped(weights)
    for loading in (AutoModelForCausalLM.from_pretrained, load):
        with pytest.raises(
            CheckpointError,
            match=r"model\.safetensors is not what was saved.*or remove manifest\.json",
        ):
            loading(str(tmp_path))
    (tmp_path / MANIFEST).unlink()
    AutoModelForCausalLM.from_pretrained(tmp_path)  # the control: nothing else notices
    write_manifest(tmp_path)
    model.save_pretrained(tmp_path)  # what replaces a folder takes its manifest away
    check_model(tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def test_leftovers_are_removed_and_what_was_put_aside_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".model.writing").mkdir()
    (tmp_path / ".model.writing" / "half").write_text("")
    (tmp_path / ".recipe.yaml.writing").write_text("")
    (tmp_path / ".model.replaced").mkdir()
    (tmp_path / ".model.replaced" / "whole").write_text("")
    (tmp_path / "kept").write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "kept",
        "model",
        "model/whole",
    ]
    with replacing_folder(tmp_path / "model") as writing:
        assert writing.name == ".model.writing", "leftovers are found by this name"
