"""What is imported is declared, and what is declared is imported."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What a package is called to import, where that is not its name.
IMPORTED_AS = {"pyyaml": "yaml"}
COMES_WITH_TORCH = {"triton"}
# Imports a plugin of ours, and so is there.
IMPORTS_US = {"axolotl"}
# What is an extra for scripts or for programs that use undertow, not for its own code.
OF_OTHERS = {"trl", "gguf"}


def imported() -> set[str]:
    """The packages of others that the code imports, anywhere in it."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"undertow"}


def declared(project: dict[str, Any]) -> set[str]:
    """The packages that an installation brings, with all extras but that of developers."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(p for e in extras if e != "dev" for p in extras[e])]
    names = {re.split(r"[^\w.-]", each)[0].lower() for each in wanted}
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert imported() - COMES_WITH_TORCH - IMPORTS_US == declared(project) - OF_OTHERS
    developers = " ".join(project["optional-dependencies"]["dev"])
    assert "trl" in developers, "without it the tests of TRL's trainers are skipped"
    for name in ("numpy", "datasets"):  # the control: one that is left out is told
        kept = [each for each in project["dependencies"] if each != name]
        less = {"dependencies": kept, "optional-dependencies": {"data": []}}
        assert name in imported() - declared(less)
