"""Plugins: modules of one's own that register recurrences, solvers, tasks and exit rules.

Who runs Undertow names them: in a recipe (``plugins: [my_module, folder/my_file.py]``), on the
command line (``--plugin my_file.py``), or by installing a package with an entry point in the group
`undertow.plugins`. Nothing is imported because a model's or a run's folder holds it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType

from undertow.errors import ConfigError, UndertowError
from undertow.registry import registered

GROUP = "undertow.plugins"


def load_plugins(names: Iterable[str], outside: Path | None = None) -> None:
    """Import plugins, each a module's name or the path of a Python file; a file's folder is where
    its own imports are looked for too.

    Args:
        outside: a folder that may hold none of them.

    Raises:
        ConfigError: one is not there, cannot be imported, registers nothing, or is in `outside`.
    """
    for name in names:
        path = Path(name).resolve() if is_file(name) else None
        module_name = name if path is None else path.stem
        if module_name not in sys.modules:
            find(name, module_name, path, outside)
        import_plugin(module_name, f"plugin {name}", path)


def find(name: str, module_name: str, path: Path | None, outside: Path | None) -> None:
    """Let Python find a plugin, as the last of all: no file beside it stands before an installed
    module.

    Raises:
        ConfigError: there is no such file, its name is no module's, or it is in `outside`.
    """
    if path is not None and not path.is_file():
        raise ConfigError(f"there is no plugin {name}; give the path of a Python file", "plugins")
    parts = module_name.split(".") if path is None else [module_name]
    if not all(part.isidentifier() for part in parts):
        mend = "use letters, digits and underscores"
        raise ConfigError(f"plugin {name!r} has a name that no module can have; {mend}", "plugins")
    folder = str(Path.cwd() if path is None else path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    if outside is None:
        return
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(module_name.partition(".")[0])
    origins = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or [])]
    if any(Path(origin).is_relative_to(outside) for origin in origins):
        raise ConfigError(
            f"plugin {name} is in the folder that names it, {outside}, from which nothing is "
            "imported; if you trust it, give it with --plugin",
            "plugins",
        )


def load_installed() -> bool:
    """Import the plugins of installed packages; whether there are any that were not imported yet.

    Raises:
        ConfigError: as `load_plugins`; names the package.
    """
    points = metadata.entry_points(group=GROUP)
    new = [point for point in points if point.module not in sys.modules]
    for point in new:
        package = "" if point.dist is None else f" of the installed package {point.dist.name}"
        import_plugin(point.module, f"plugin {point.name}{package}")
    return bool(new)


def is_file(name: str) -> bool:
    """Whether a plugin's name is the path of a file, and not the name of a module."""
    return name.endswith(".py") or "/" in name or "\\" in name


def full_name(name: str) -> str:
    """A plugin's name as a recipe keeps it: a file by its whole path."""
    return str(Path(name).resolve()) if is_file(name) else name


def import_plugin(module_name: str, named: str, path: Path | None = None) -> None:
    """Import a module that registers something, from the file at `path` if there still is one;
    every failure is one sentence that calls it `named`."""
    importlib.invalidate_caches()  # it may have been written a moment ago
    before = registered()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        is_needed = error.name != module_name and not module_name.startswith(f"{error.name}.")
        where = f"no module {module_name} is installed or in {Path.cwd()}"
        said = f"needs {error.name}" if is_needed else where
        mend = "install it" if is_needed else "give a module's name or the path of a Python file"
        raise ConfigError(f"{named} cannot be imported: {said}; {mend}", "plugins") from error
    except UndertowError as error:
        raise ConfigError(f"{named} cannot be imported: {error}", "plugins") from error
    except (Exception, SystemExit) as error:  # whatever the module does
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        said = f"{type(error).__name__}: {error}{at}"
        raise ConfigError(f"{named} cannot be imported: {said}", "plugins") from error
    held = getattr(module, "__file__", None)
    if path is not None and path.is_file() and path != Path(held or "").resolve():
        other = held or module_name
        raise ConfigError(f"{named} has the name of another module, {other}; rename it", "plugins")
    if registered() == before and not any(package(cls) == package(module) for cls in before):
        mend = "put @undertow.register above its classes"
        raise ConfigError(f"{named} registers nothing; {mend}", "plugins")


def package(held: type | ModuleType) -> str:
    """The outermost package, or the module, that a class is defined in, or that a module is of."""
    name = held.__name__ if isinstance(held, ModuleType) else held.__module__
    return name.partition(".")[0]
