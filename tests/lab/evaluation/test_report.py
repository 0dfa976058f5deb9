"""Tables and figures of results."""

from pathlib import Path

import pytest
from matplotlib import image

from undertow.lab.evaluation import Accuracy
from undertow.lab.evaluation.figures import accuracy_figure
from undertow.lab.runs.results import accuracy_table
from undertow.lab.tables import percent, table

CURVE = [Accuracy(4, 0.0, 30, 30), Accuracy(8, 0.0, 15, 30), Accuracy(16, 0.0, 0, 30)]


def test_table_is_aligned_markdown() -> None:
    text = table(["model", "right", "ms"], [["Transformer", 7, "1.25"], ["T²MLR", 1234, "10.5"]])
    assert text.splitlines() == [
        "| model       | right |   ms |",
        "|-------------|------:|-----:|",
        "| Transformer |     7 | 1.25 |",
        "| T²MLR       |  1234 | 10.5 |",
    ]


def test_table_of_nothing() -> None:
    assert table(["a", "b"], []).splitlines() == ["| a | b |", "|---|--:|"]


def test_accuracy_table_tells_length_and_decoding() -> None:
    text = accuracy_table(
        [Accuracy(8, 0.0, 2, 3), Accuracy(8, 0.7, 1, 3), Accuracy(None, 1.0, 3, 3)]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == ["length", "decoding", "right", "of", "accuracy"]
    assert rows[2:] == [
        ["8", "greedy", "2", "3", "66.7%"],
        ["8", "temperature 0.7", "1", "3", "33.3%"],
        ["all", "temperature 1", "3", "3", "100.0%"],
    ]


def test_accuracy_by_symbol_has_a_column_where_there_is_any() -> None:
    text = accuracy_table([Accuracy(8, 0.0, 1, 3, 20, 24), Accuracy(16, 0.0, 0, 3)])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == ["length", "decoding", "right", "of", "accuracy", "by symbol"]
    assert rows[2:] == [
        ["8", "greedy", "1", "3", "33.3%", "83.3%"],
        ["16", "greedy", "0", "3", "0.0%", ""],
    ]


def test_percent() -> None:
    assert [percent(share) for share in (0, 0.5, 0.9996, 1)] == [
        "0.0%",
        "50.0%",
        "100.0%",
        "100.0%",
    ]


@pytest.mark.parametrize("marked", [True, False])
def test_figure_is_a_png_with_the_curves(marked: bool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "accuracy.png"
    curves = {"T²MLR": CURVE, "plain": [Accuracy(4, 0.0, 15, 30), Accuracy(16, 0.0, 30, 30)]}
    accuracy_figure(curves, path, "title", "bits", *((8, 0.5) if marked else ()))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in path.parent.iterdir()] == ["accuracy.png"]
    pixels = image.imread(path)
    assert pixels.shape[:2] == (600, 1050)
    # Both curves' colours are there: those of matplotlib's default cycle.
    for color in ((31, 119, 180), (255, 127, 14)):
        near = abs(255 * pixels[..., :3] - color).max(axis=-1) < 3
        assert near.sum() > 200, f"no curve of colour {color}"


def test_a_figure_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.png"
    accuracy_figure({"a": CURVE}, path, "title", "bits")
    first = path.read_bytes()
    accuracy_figure({"a": CURVE[:2]}, path, "another", "bits")
    assert path.read_bytes() != first
    accuracy_figure(
        {f"seed-{i}": CURVE for i in range(20)}, path, "more curves than markers", "bits"
    )
