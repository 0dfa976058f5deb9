"""A recurrence and its solvers as plain data, as a folder's config holds them, and back."""

from __future__ import annotations

import warnings
from typing import Any

from undertow.depth.looped import Looped
from undertow.errors import CheckpointError, ConfigError
from undertow.host.attachment import Attachment
from undertow.mapping import from_mapping, to_mapping
from undertow.pathways import Recurrence
from undertow.registry import kinds
from undertow.solvers import Solver


def recurrences_of(attachment: Attachment) -> dict[str, dict[str, Any]]:
    """What is attached, as plain data: a `recurrence` in time, a `looped` one in depth, or both."""
    held = {"recurrence": attachment.settings, "looped": attachment.looped}
    return {name: plain(settings) for name, settings in held.items() if settings is not None}


def recurrences_from_mappings(
    recurrence: dict[str, Any], looped: dict[str, Any]
) -> list[Recurrence | Looped]:
    """The settings that `recurrences_of` describes, in the order to attach them in.

    Raises:
        ConfigError: they describe none.
    """
    found: list[Recurrence | Looped] = []
    if looped:
        found.append(from_mapping(Looped, looped, where="looped"))
    if recurrence or not found:
        found.append(read(Recurrence, recurrence, "recurrence"))
    return found


def solvers_of(attachment: Attachment) -> dict[str, dict[str, Any]]:
    """How the attached recurrence in time is solved, as plain data."""
    if attachment.settings is None:
        return {}
    return {
        "solver": solver_to_mapping(attachment.solver),
        "prefill": solver_to_mapping(attachment.prefill),
    }


def set_saved_solvers(attachment: Attachment, saved: dict[str, dict[str, Any]]) -> None:
    """Give a loaded model the solvers that `solvers_of` described; one that is not known here stays
    the default, with a warning, as exact generation does not depend on it."""
    for name, mapping in saved.items():
        if not mapping:
            continue
        try:
            setattr(attachment, name, read_solver(mapping, name))
        except (ConfigError, TypeError, ValueError) as error:
            warnings.warn(
                f"the model was saved with a {name} that is not known here ({error}), so it has "
                "the default one; choose with undertow.set_solver, or import the module that "
                "registers it with undertow.register before loading",
                stacklevel=5,
            )


def solver_to_mapping(solver: Solver) -> dict[str, Any]:
    """A solver as plain data; of one that could not be read back from it, only the name of its
    class."""
    try:
        mapping = plain(solver)
        if read_solver(mapping) == solver:
            return mapping
    except (ConfigError, TypeError, ValueError):
        pass
    return {"kind": type(solver).__name__, "class": defined_at(type(solver))}


def read_solver(mapping: dict[str, Any], where: str = "solver") -> Solver:
    """Read a solver from plain data with a `kind`.

    Raises:
        ConfigError: it describes none that is known.
    """
    solver: Solver = read(Solver, mapping, where)
    return solver


def plain(settings: Any) -> dict[str, Any]:
    """Settings as plain data; of a class that is not Undertow's, with where it is defined."""
    cls = type(settings)
    is_ours = cls.__module__.partition(".")[0] == "undertow"
    return to_mapping(settings) | ({} if is_ours else {"class": defined_at(cls)})


def read(family: type, mapping: dict[str, Any], where: str) -> Any:
    """Settings of a family from what `plain` gave.

    Raises:
        CheckpointError: they are of a class of someone's own that is not known here.
        ConfigError: they are of no known kind, or do not fit it.
    """
    settings = dict(mapping)
    defined = settings.pop("class", None)
    try:
        return from_mapping(family, settings, where)
    except ConfigError as error:
        kind = settings.get("kind")
        if not isinstance(defined, str) or kind in kinds(family):
            raise
        module, _, name = defined.partition(":")
        mend = f"import {module}, or name it by --plugin or in plugins,"
        if module == "__main__":
            mend = "define and register it, as the program that saved it did,"
        raise CheckpointError(
            f"the saved {where} is of kind {kind!r}, whose class {name} is not known here; {mend} "
            "before loading"
        ) from error


def defined_at(cls: type) -> str:
    """Where a class is defined, as entry points write it."""
    return f"{cls.__module__}:{cls.__qualname__}"
