"""What the page on TRL shows stands in the examples, which `tests/examples` runs."""

import re
from pathlib import Path

import yaml

from undertow import T2MLR, Recurrence
from undertow.mapping import from_mapping

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to-trl.md").read_text(encoding="utf-8")
EXAMPLES = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]


def test_its_blocks_are_parts_of_the_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        assert any(block in text for text in EXAMPLES), block
    assert not any(blocks[0].replace("100", "99") in text for text in EXAMPLES), "the control"


def test_its_commands_are_those_of_the_scripts() -> None:
    commands = re.findall(r"^    python (examples/\w+\.py)(.*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 5
    for path, options in commands:
        text = (ROOT / path).read_text(encoding="utf-8")
        for option in re.findall(r"--\w+", options):
            assert f'"{option}"' in text, (path, option)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([\w./-]+)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target


def test_the_section_for_axolotl_is_one() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    section = yaml.safe_load(block)["undertow"]
    assert from_mapping(Recurrence, section["recurrence"]) == T2MLR(12, 17)  # type: ignore[type-abstract]
    assert "axolotl.UndertowPlugin" in block
