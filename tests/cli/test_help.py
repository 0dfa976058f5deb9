"""What the command line says of itself."""

import dataclasses

import pytest

from undertow.annotations import field_types
from undertow.cli.main import main
from undertow.lab.runs.recipe import TrainingSection
from undertow.lab.study.settings import Study
from undertow.lab.training import Recipe


def text_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    output = capsys.readouterr()
    assert not output.err
    return output.out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(["--help"], capsys)
    assert all(command in text for command in ("train", "eval", "study", "generate", "demo"))


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", ["train", "eval"])
def test_help_lists_every_setting_of_a_recipe(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of([command, option], capsys)
    assert "--section.key=value" in text
    lines = {line.strip().partition(":")[0] for line in text.splitlines()}
    assert set(field_types(Recipe)) <= lines
    assert {f"training.{field.name}" for field in dataclasses.fields(TrainingSection)} <= lines
    assert {
        "recurrence.connections",
        "recurrence.first_layer",
        "task.max_length",
        "evaluation.lengths",
    } <= lines


def test_help_lists_every_setting_of_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(["study", "--help"], capsys)
    assert "--section.key=value" in text
    lines = {line.strip().partition(":")[0] for line in text.splitlines()}
    assert set(field_types(Study)) <= lines


@pytest.mark.parametrize(
    ("command", "expected"),
    [("generate", ["--max-new-tokens", "--temperature", "prompt"]), ("demo", ["--output"])],
)
def test_help_of_the_other_commands_lists_their_options(
    command: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of([command, "--help"], capsys)
    assert all(option in text for option in expected)
    assert "training.steps" not in text
