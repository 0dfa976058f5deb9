"""How an inspection becomes part of the command: by registering itself."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from undertow.cli.main import main
from undertow.lab.inspections import inspection as module
from undertow.lab.inspections.inspection import all_inspections, examples, inspection


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INSPECTIONS", dict(all_inspections()))

    @inspection("names", "what runs are called", examples(3))
    def names(run: Path, examples: int) -> str:
        return f"{run.name}: {examples}"

    @inspection("count", "how many there are", together=True)
    def count(paths: Sequence[Path]) -> str:
        return str(len(paths))


def test_one_that_registers_itself_is_a_command(
    registered: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "names", "a/b", "c", "--examples=5"]) == 0
    assert capsys.readouterr().out == "b: 5\n\nc: 5\n"
    assert main(["inspect", "names", "a"]) == 0
    assert capsys.readouterr().out == "a: 3\n"
    assert main(["inspect", "count", "a", "b"]) == 0
    assert capsys.readouterr().out == "2\n"
    assert main(["inspect", "count", "a", "--examples=5"]) == 2, "an option of others"
    assert "does not know '--examples=5'" in capsys.readouterr().err


def test_every_one_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    own = {
        "choices",
        "fidelity",
        "gates",
        "latency",
        "lengths",
        "parameters",
        "positions",
        "probes",
    }
    assert set(all_inspections()) == own | {"depth"}
    assert all(f"{name} {each.help}" in said for name, each in all_inspections().items())
    with pytest.raises(SystemExit):
        main(["inspect", "names", "a"])  # the control: not registered here
    assert "invalid choice: 'names'" in capsys.readouterr().err
