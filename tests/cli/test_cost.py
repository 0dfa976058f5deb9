"""What the command line says without PyTorch and transformers, whose import takes seconds."""

import subprocess
import sys

import pytest
import tiny

SAYS = """
import sys
from undertow.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit_:
    code = exit_.code
heavy = [name for name in ("torch", "transformers", "numpy", "pydantic") if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


def said(arguments: list[str], program: str = SAYS) -> tuple[int, str]:
    """The exit code, and what is printed, of a command in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment())
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--help"], 0, "train | eval | study"),
        (["--version"], 0, "undertow 0.1.0\n"),
        (["generate", "--help"], 0, "--max-new-tokens"),
        (
            ["trian", "x.yaml"],
            2,
            "undertow: error: there is no command 'trian'; did you mean 'train'?\n",
        ),
        (["zzz"], 2, "undertow: error: there is no command 'zzz'; use one of train, eval, study, "),
        (["generate"], 2, "the following arguments are required: run, prompt"),
        (["demo", "--outptu=x"], 2, "undertow demo does not know '--outptu=x'"),
    ],
)
def test_at_once(arguments: list[str], code: int, expected: str) -> None:
    found, text = said(arguments)
    assert (found, expected in text) == (code, True), text


def test_control_a_command_that_imports_pytorch() -> None:
    code, text = said(["--help"], "import torch\n" + SAYS)
    assert code == 1 and "AssertionError: ['torch'" in text
