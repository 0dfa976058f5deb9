"""The package's imports go one way, as the table of rooms in docs/design.md says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import undertow

PACKAGE = Path(undertow.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
LONGEST = 450

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module by its path within the package, such as `host/attach.py`."""
    return {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(source: str) -> Iterator[str]:
    """The dotted names that a module imports of this package, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("undertow"):
            for name in node.names:
                yield f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("undertow"))


def resolve(name: str, known: dict[str, Path]) -> str | None:
    """The module that a dotted name, or what it is imported from, stands for; None for a package
    face that only hands names on."""
    parts = name.split(".")[1:]
    for length in (len(parts), len(parts) - 1):
        path = "/".join(parts[:length])
        if f"{path}.py" in known:
            return f"{path}.py"
        if f"{path}/__init__.py" in known:
            return f"{path}/__init__.py"
    return None


def graph() -> Graph:
    """The modules that each module imports. A package's `__init__.py` counts as a module."""
    known = modules()
    found: Graph = {}
    for module, path in known.items():
        targets = (resolve(name, known) for name in imported(path.read_text(encoding="utf-8")))
        found[module] = {target for target in targets if target is not None} - {module}
    return found


def rooms() -> list[str]:
    """The rooms of the table in docs/design.md, from the ground up."""
    table = DESIGN.read_text(encoding="utf-8").partition("## Rooms")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def room_of(module: str, known: list[str]) -> str:
    """The innermost room that a module lies in; files beside the rooms are on the ground."""
    inside = [room for room in known if module.startswith(room)]
    return max(inside, key=len, default="*.py")


def circles(imports: Graph) -> list[list[str]]:
    """The sets of modules that reach each other, by what is left when all that imports nothing,
    or is imported by nothing, is taken away again and again."""
    left = {module: set(targets) for module, targets in imports.items()}
    while True:
        wanted = set().union(*left.values()) if left else set()
        ends = {m for m, targets in left.items() if not targets & left.keys() or m not in wanted}
        if not ends:
            return [sorted(left)] if left else []
        left = {m: targets - ends for m, targets in left.items() if m not in ends}


def upward(imports: Graph, order: list[str]) -> list[str]:
    """The imports that go up, or sideways to a room that comes later."""
    found = []
    for module, targets in imports.items():
        if module.endswith("__init__.py") or module == "__main__.py":  # which starts the command
            continue
        here = order.index(room_of(module, order))
        found += [
            f"{module} -> {target}"
            for target in targets
            if order.index(room_of(target, order)) > here
        ]
    return found


def test_no_circle():
    assert circles(graph()) == []


def test_no_import_goes_up():
    assert upward(graph(), rooms()) == []


def test_every_folder_is_a_room():
    known = rooms()
    for module in modules():
        if "/" in module:
            assert room_of(module, known) != "*.py", f"{module} lies in no room of docs/design.md"
    for room in known:
        assert room == "*.py" or (PACKAGE / room).is_dir(), f"docs/design.md names {room}"


def test_no_file_is_too_long():
    long = {m: n for m, p in modules().items() if (n := len(p.read_text().splitlines())) > LONGEST}
    assert long == {}


def test_a_circle_and_an_import_that_goes_up_would_be_found():
    imports = {"a/one.py": {"b/two.py"}, "b/two.py": {"a/three.py"}, "a/three.py": {"a/one.py"}}
    assert circles(imports) == [["a/one.py", "a/three.py", "b/two.py"]]
    assert circles({"a/one.py": {"b/two.py"}, "b/two.py": set()}) == []
    assert upward({"a/one.py": {"b/two.py"}}, ["*.py", "a/", "b/"]) == ["a/one.py -> b/two.py"]
    assert upward({"b/two.py": {"a/one.py"}}, ["*.py", "a/", "b/"]) == []


@pytest.mark.parametrize(
    "source",
    [
        "from undertow.host import attach",
        "import undertow.host.attach",
        "def late():\n    from undertow.host.attach import attach",
        "if TYPE_CHECKING:\n    from undertow.host.attach import Attachment",
    ],
)
def test_an_import_is_seen_wherever_it_stands(source):
    known = modules()
    assert {resolve(name, known) for name in imported(source)} <= {
        "host/attach.py",
        "host/__init__.py",
    }
    assert list(imported(source))
