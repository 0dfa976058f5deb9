"""Plugins: named in a recipe, on the command line or by an installed package; each mistake is one
sentence, and no folder brings code of its own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from helpers import unhosted
from transformers import AutoModelForCausalLM

import undertow
from undertow.cli.main import main
from undertow.errors import CheckpointError, ConfigError
from undertow.lab.runs.recipe import Recipe
from undertow.lab.runs.run import Run
from undertow.lab.tasks import TASKS
from undertow.mapping import from_mapping
from undertow.plugins import GROUP, load_installed, load_plugins
from undertow.solvers import SOLVERS

OWN = '''
from dataclasses import dataclass
from typing import ClassVar
import undertow
from undertow.lab.tasks import Example, GeneratedTask

@undertow.register
@dataclass(frozen=True, kw_only=True)
class Reverse(GeneratedTask):
    """A word backwards."""
    kind: ClassVar[str] = "reverse"
    longest: int = 8
    """Most letters."""
    def draw(self, generator, length):
        text = "".join(generator.choices("ab", k=length or generator.randint(1, self.longest)))
        return Example(text + "=", text[::-1], len(text))
    def characters(self):
        return "=ab"

@undertow.register
class Patient(undertow.Sequential):
    kind = "patient"

@undertow.register
class Mine(undertow.T2MLR):
    kind = "mine"
'''
COMMAND = "import sys; from undertow.cli.main import main; sys.exit(main())"
LATER = """
from undertow.cli.main import main
assert main(["generate", "{run}", "ab="]) == 0
assert main(["inspect", "fidelity", "--examples=2", "{run}"]) == 0
assert main(["eval", "{run}"]) == 0
"""
MINE = {"kind": "mine", "first_layer": 0, "last_layer": 1}


@pytest.fixture
def folder(tmp_path: Path, own_kinds: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a plugin, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "own.py").write_text(OWN)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Runs a command that must fail, and returns its one sentence."""

    def run(arguments: list[str]) -> str:
        capsys.readouterr()
        assert main(arguments) == 2
        output = capsys.readouterr()
        assert not output.out and output.err.startswith("undertow: ")
        (line,) = output.err.splitlines()
        return line

    return run


def with_plugin(folder: Path, *plugins: str, **changes: Any) -> Path:
    settings = {"evaluation": {"lengths": [8], "examples": 4}, **changes}
    names = {"plugins": list(plugins)} if plugins else {}
    task = {"kind": "reverse", "longest": 8}
    own = {"task": task, "recurrence": MINE, "solver": "patient"}
    return tiny.recipe_file(folder, **own, **names, **settings)


@pytest.mark.parametrize("named", ["own", "own.py", "recipe"])
def test_every_command_knows_it(
    named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained in this process, and read by commands in fresh ones that name no plugin."""
    path = str(with_plugin(folder, *(["own"] if named == "recipe" else [])))
    options = [] if named == "recipe" else [f"--plugin={named}"]
    assert main(["train", path, *options, "--training.steps=2"]) == 0
    whole = str(folder / "own.py") if named == "own.py" else "own"
    run = folder / "tiny" / "seed-0"
    assert Run(run).recipe().plugins == (whole,)
    if named == "own.py":
        done = in_another_process([], folder.parent, LATER.format(run=run))
        assert done.returncode == 0, done.stderr


def in_another_process(
    arguments: list[str], folder: Path, program: str = COMMAND
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    environment = tiny.environment()
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_a_study_hands_it_to_its_workers(folder: Path) -> None:
    common = {key: value for key, value in tiny.TINY.items() if key not in ("name", "task")}
    common |= {"task": "reverse", "evaluation": {"lengths": [8], "examples": 2}}
    axes = {"solver": {"patient": {"recurrence": MINE, "solver": "patient"}}}
    path = folder / "study.yaml"
    grid = {"name": "grid", "recipe": common, "axes": axes, "output": str(folder), "seeds": [0]}
    path.write_text(tiny.yaml.safe_dump(grid))
    options = ["--plugin=own.py", "--recipe.training.steps=1", "--recipe.training.save_every=null"]
    done = in_another_process(["study", str(path), *options], folder)
    assert done.returncode == 0, done.stderr
    assert Run(folder / "grid" / "patient" / "seed-0").recipe().plugins == (str(folder / "own.py"),)


def test_help_lists_its_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--plugin", "own.py", "--help"])
    text = capsys.readouterr().out
    assert "with task.kind=reverse: A word backwards." in text
    assert "--plugin MODULE_OR_FILE" in text


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("none.py", None, "there is no plugin none.py; give the path of a Python file"),
        ("absent", None, "plugin absent cannot be imported: no module absent is installed or in "),
        ("a-b.py", OWN, "plugin 'a-b.py' has a name that no module can have"),
        ("", None, "plugin '' has a name that no module can have"),
        ("idle.py", "x = 1", "plugin idle.py registers nothing; put @undertow.register above its"),
        ("needy.py", "import absent_too", "needs absent_too; install it"),
        ("slip.py", "x = (1", "slip.py cannot be imported: SyntaxError: "),
        ("fails.py", "\n1 / 0", "ZeroDivisionError: division by zero ("),
        ("leaves.py", "raise SystemExit(3)", "leaves.py cannot be imported: SystemExit: 3"),
        ("yaml.py", OWN, "plugin yaml.py has the name of another module, "),
        ("taken.py", OWN.replace('"patient"', '"scan"'), "kind 'scan' of taken.Patient is taken"),
    ],
)
def test_a_plugin_that_cannot_be_used(
    name: str, source: str | None, expected: str, folder: Path, refused: Callable[[list[str]], str]
) -> None:
    if source is not None:
        (folder / name).write_text(source)
    path = str(with_plugin(folder))
    assert expected in refused(["train", path, f"--plugin={name}"])
    path = str(with_plugin(folder, name))
    line = refused(["train", path])
    assert expected in line and line.startswith(f"undertow: {path}, line ")
    assert not (folder / "tiny").exists()


def test_without_it_a_recipe_says_what_to_do(
    folder: Path, refused: Callable[[list[str]], str]
) -> None:
    line = refused(["train", str(with_plugin(folder))])
    assert "got 'mine'" in line and "plugins: [my_module]" in line


def test_a_runs_folder_brings_no_code(folder: Path) -> None:
    run = folder / "elsewhere" / "seed-0"
    run.mkdir(parents=True)
    for inside in (run, run.parent):
        (inside / "brought.py").write_text("raise RuntimeError('imported')")
    for name in (f"{run}/brought.py", "elsewhere/brought.py", "seed-0/brought.py"):
        with_plugin(folder, name).rename(run / "recipe.yaml")
        with pytest.raises(ConfigError, match=r"from which nothing is imported|there is no plugin"):
            Run(run).recipe()
    with_plugin(folder, "own").rename(run / "recipe.yaml")
    assert Run(run).recipe().plugins == ("own",), "control: one of the user's is imported"


def test_a_module_in_the_run_is_not_imported_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "elsewhere"
    run.mkdir()
    (run / "brought.py").write_text("raise RuntimeError('imported')")
    with_plugin(folder, "brought").rename(run / "recipe.yaml")
    monkeypatch.chdir(run)
    with pytest.raises(ConfigError, match="from which nothing is imported"):
        Run(run).load_plugins()
    with pytest.raises(ConfigError, match="RuntimeError: imported"):  # control
        load_plugins(["brought"])


def test_a_missing_plugin_of_a_run_is_not_damage(folder: Path) -> None:
    run = folder / "seed-0"
    run.mkdir()
    with_plugin(folder, "gone.py").rename(run / "recipe.yaml")
    with pytest.raises(ConfigError, match=r"there is no plugin gone\.py"):
        Run(run).recipe()
    (folder / "moved").mkdir()
    (folder / "own.py").rename(folder / "moved" / "gone.py")
    load_plugins(["moved/gone.py"])  # as by --plugin
    assert Run(run).recipe().task.kind == "reverse"


def test_a_saved_folder_names_the_class_that_it_needs(folder: Path) -> None:
    load_plugins(["own"])
    own: Any = sys.modules["own"]
    model = undertow.attach(unhosted("llama"), own.Mine(0, 1), own.Patient())
    model.save_pretrained(folder / "out")
    del undertow.registry._families[undertow.Recurrence]["mine"]  # type: ignore[attr-defined]
    expected = r"kind 'mine', whose class Mine is not known here; import own, or name it by --plug"
    with pytest.raises(CheckpointError, match=expected):
        AutoModelForCausalLM.from_pretrained(folder / "out")
    undertow.register(own.Mine)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert loaded.model.recurrence.settings == own.Mine(0, 1)
    assert loaded.model.recurrence.solver == own.Patient()


def test_installed_packages_have_entry_points(folder: Path) -> None:
    info = folder / "site" / "own_plugins-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nmine = own_installed\n")
    module = folder / "site" / "own_installed.py"
    module.write_text("1 / 0")
    sys.path.append(str(folder / "site"))
    recipe = {"name": "x", "task": "reverse"}
    with pytest.raises(ConfigError, match="plugin mine of the installed package own-plugins "):
        from_mapping(Recipe, recipe)
    module.write_text(OWN)
    assert from_mapping(Recipe, recipe).task.kind == "reverse"
    assert "reverse" in TASKS and "patient" in SOLVERS and not load_installed()
