"""Eliminated choices and expected accuracy against models whose probabilities are known, and
against sampling."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from matplotlib import image
from torch import nn

from undertow.cli.main import main
from undertow.errors import ConfigError
from undertow.lab.evaluation import accuracy_by_length
from undertow.lab.inspections.choices import Choices, Chosen, choices_table, measure_choices
from undertow.lab.runs.loading import load
from undertow.lab.tasks import GSM8K, Example, MultiStepArithmetic, Parity, character_tokenizer
from undertow.lab.training import train

BARE = MultiStepArithmetic(template="bare", max_operands=3)
PAPER = MultiStepArithmetic(max_operands=3)
DIGITS = "0123456789"


class Known(nn.Module):
    """Gives every completion's tokens the same known probabilities whatever the prompt: the
    digits', and an end's."""

    def __init__(
        self, task: MultiStepArithmetic, digits: list[float], end: float = 1.0, blank: float = 1.0
    ) -> None:
        super().__init__()
        self.tokenizer = character_tokenizer(task.characters())
        self.device = torch.device("cpu")
        tokens = {
            name: self.tokenizer.convert_tokens_to_ids(name) for name in self.tokenizer.get_vocab()
        }
        rows = {
            "digit": dict(zip(DIGITS, digits, strict=True)),
            "end": {"<eos>": end, "<pad>": 1 - end},
        }
        rows["blank"] = {" ": blank, "(": 1 - blank} if " " in tokens else {}
        self.rows = {name: torch.full((len(tokens),), -1e9) for name in rows}
        for name, row in rows.items():
            for token, probability in row.items():
                self.rows[name][tokens[token]] = math.log(probability) if probability > 0 else -1e9
        self.paper = task.template == "paper"

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool
    ) -> Any:
        logits = torch.zeros(*input_ids.shape, len(self.rows["digit"]))
        for row, length in enumerate(attention_mask.sum(1).tolist()):
            places = ["blank", "digit", "end"] if self.paper else ["digit", "end"]
            for place, name in zip(
                range(length - len(places) - 1, length - 1), places, strict=True
            ):
                logits[row, place] = self.rows[name]
        return SimpleNamespace(logits=logits)


def measure(model: Known, task: MultiStepArithmetic, **settings: Any) -> Choices:
    (found,) = measure_choices(model, model.tokenizer, task, examples=40, batch=7, **settings)
    return found


def answers(task: MultiStepArithmetic) -> list[int]:
    return [int(task.example("test", index).completion) for index in range(40)]


@pytest.mark.parametrize("task", [BARE, PAPER], ids=["bare", "paper"])
def test_a_model_that_knows_nothing_rules_nothing_out(task: MultiStepArithmetic) -> None:
    found = measure(Known(task, [0.1] * 10), task)
    assert (found.eliminated, found.right_eliminated, found.examples, found.length) == (
        0,
        0,
        40,
        None,
    )
    assert found.expected == {1.0: pytest.approx(0.1), 0.01: pytest.approx(0.1)}


@pytest.mark.parametrize("task", [BARE, PAPER], ids=["bare", "paper"])
def test_a_model_that_is_sure_rules_out_all_but_one(task: MultiStepArithmetic) -> None:
    found = measure(Known(task, [0.9955] + [0.0005] * 9), task)
    zeros = answers(task).count(0) / 40
    assert 0 < zeros < 1
    assert found.eliminated == 9 and found.right_eliminated == pytest.approx(1 - zeros)
    assert found.greedy == pytest.approx(zeros)
    assert found.expected[1.0] == pytest.approx(0.9955 * zeros + 0.0005 * (1 - zeros))
    assert found.expected[0.01] == pytest.approx(zeros)


def test_the_threshold_is_a_thousandth() -> None:
    below, above = [0.0009] * 5, [0.0011] * 4
    found = measure(Known(BARE, [1 - sum(below) - sum(above), *below, *above]), BARE)
    assert found.eliminated == 5
    assert (
        measure(
            Known(BARE, [1 - sum(below) - sum(above), *below, *above]), BARE, threshold=0.01
        ).eliminated
        == 9
    )


def test_blank_and_end_count() -> None:
    digits = [0.9] + [0.1 / 9] * 9
    zeros = answers(PAPER).count(0) / 40
    mean = 0.9 * zeros + 0.1 / 9 * (1 - zeros)
    found = measure(Known(PAPER, digits, end=0.8, blank=0.5), PAPER)
    assert found.expected[1.0] == pytest.approx(0.5 * 0.8 * mean)
    assert found.eliminated == 0
    assert measure(Known(PAPER, digits, blank=0.05), PAPER).eliminated == 9, (
        "0.05 * 0.1 / 9 is under a thousandth"
    )
    assert measure(Known(PAPER, digits, end=0.3), PAPER).greedy == 0, (
        "it would go on after the answer"
    )


def test_choices_of_several_tokens_are_refused() -> None:
    class Wide(MultiStepArithmetic):
        def choices(self) -> tuple[str, ...]:
            return ("10", "21")

    task = Wide(template="bare", max_operands=3)
    with pytest.raises(
        ConfigError, match="this tokenizer writes the choices 10, 21 in more than one token each"
    ):
        measure(Known(task, [0.1] * 10), task)
    with pytest.raises(ConfigError, match="the answers of gsm8k are not one of a few choices"):
        measure_choices(None, character_tokenizer("1"), GSM8K())
    assert Parity().choices() == ("0", "1") and Example("", "", 1)


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_a_row_is_the_mean_over_seeds_with_the_range() -> None:
    one, two = Choices(4, 10, 2.0, 0.1, 0.5, {1.0: 0.4}), Choices(4, 10, 3.0, 0.3, 1.0, {1.0: 0.8})
    header, _, first, second = cells(
        choices_table([Chosen("both", 10, [[one], [two]]), Chosen("single", 2, [[one]])])
    )
    assert (
        header[:6] == ["run", "seeds", "length", "of", "choices", "eliminated"]
        and header[-1] == "expected at 1"
    )
    assert first[:6] == ["both", "2", "4", "20", "10", "2.500 (2.000 - 3.000)"]
    assert first[6:] == ["20.0% (10.0% - 30.0%)", "75.0% (50.0% - 100.0%)", "60.0% (40.0% - 80.0%)"]
    assert second == ["single", "1", "4", "10", "2", "2.000", "10.0%", "50.0%", "40.0%"]


# On trained runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = tiny.recipe(
        tmp_path_factory.mktemp("runs"),
        recurrence=tiny.TURBOCONN,
        solver="sequential",
        training={"steps": 30, "save_every": None},
        evaluation={"lengths": [7, 8], "examples": 8},
    )
    for seed in (0, 1):
        folder = train(recipe, seed)
    return folder.parent


def test_expected_accuracy_is_what_sampling_gives(trained: Path) -> None:
    model, tokenizer = load(str(trained / "seed-0" / "model"))
    task = Parity(template="bare", max_length=8)
    found = measure_choices(model, tokenizer, task, [7, 8], examples=8)
    for one in found:
        drawn = [
            accuracy_by_length(
                model, tokenizer, task, [one.length or 0], 8, 8, temperature=1.0, seed=seed
            )[0].share
            for seed in range(60)
        ]
        mean = sum(drawn) / len(drawn)
        assert 0.05 < one.expected[1.0] < 0.95
        assert mean == pytest.approx(one.expected[1.0], abs=4 * 0.5 / math.sqrt(480))
        (greedy,) = accuracy_by_length(model, tokenizer, task, [one.length or 0], 8)
        assert one.greedy == greedy.share


def test_inspect_choices(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "tiny"))
    assert main(["inspect", "choices", str(run), "--examples=6"]) == 0
    header, _, *rows = cells(capsys.readouterr().out)
    assert header[-1] == "expected at 0.01"
    by_seed = [json.loads((run / f"seed-{seed}" / "choices.json").read_text()) for seed in (0, 1)]
    assert [[one["length"] for one in found] for found in by_seed] == [[7, 8]] * 2
    assert by_seed[0] != by_seed[1]
    for row, (first, second) in zip(rows, zip(*by_seed, strict=True), strict=True):
        assert row[:5] == ["tiny", "2", str(first["length"]), "12", "2"]
        assert row[5].split()[0] == f"{(first['eliminated'] + second['eliminated']) / 2:.3f}"
    assert image.imread(run / "choices.png").size
    assert main(["inspect", "choices", str(run), "--examples=0"]) == 2
    assert "examples is 0; use 1 or more" in capsys.readouterr().err
    assert main(["inspect", "choices", str(run), "--evaluation.examples=3"]) == 2
    assert "undertow inspect does not know '--evaluation.examples=3'" in capsys.readouterr().err
