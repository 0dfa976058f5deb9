"""Writing to disk so that nothing is lost or half-written: under a temporary name first, then
renamed. Reading it back."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from undertow import reading
from undertow.errors import CheckpointError

# What `undertow.manifest` writes.
MANIFEST = "manifest.json"


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` to write into; it takes the place of `folder` when the
    block succeeds.

    It does so whole, in one step where the system can exchange two folders. What an existing folder
    held besides and is not written again comes along, but for weights, of which none may be left of
    another checkpoint, and a manifest. When the block fails, for a full disk or any other reason,
    what was there before is untouched.

    Raises:
        CheckpointError: the folder could not be written.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot save to {folder}: it is a file; give the name of a folder")
    temporary = folder.with_name(f".{folder.name}.writing")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)  # left behind by a save that was killed
        temporary.mkdir()
        yield temporary
        if folder.exists():
            _bring_along(folder, temporary)
            _exchange(temporary, folder)
        else:
            os.replace(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"could not write {folder}: {error}; what was there before is untouched"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"could not write {path}: {error}; what was there before is untouched"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write what JSON can hold, and dataclasses in it, as a text file, whole or not at all."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=dataclasses.asdict)
    write_text(path, text + "\n")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, where the system can tell."""
    if path.is_dir() and os.name == "nt":
        return
    number = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without it
            raise
    finally:
        os.close(number)


def remove_leftovers(folder: Path) -> None:
    """Remove what writers into a folder left behind when they were killed. No other process may be
    writing there."""
    for path in folder.glob(".*.replaced"):  # killed between the two renames of an exchange
        name = path.name.removeprefix(".").removesuffix(".replaced")
        if not (folder / name).exists():
            path.rename(folder / name)
    for path in [*folder.glob(".*.writing"), *folder.glob(".*.replaced")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """What a JSON file of a run holds.

    Raises:
        CheckpointError: it is damaged.
    """
    return reading.read_json(
        path, CheckpointError, "the file is damaged; remove it and run again what wrote it"
    )


def _bring_along(old: Path, new: Path) -> None:
    """Put what the old folder holds besides into the new one: as links, or copies where there are
    no links."""
    for path in old.iterdir():
        if (new / path.name).exists() or ".safetensors" in path.name or path.name == MANIFEST:
            continue
        if path.is_dir():
            shutil.copytree(path, new / path.name, copy_function=_link)
        else:
            _link(path, new / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change names: at once on Linux, elsewhere with a moment between two
    renames."""
    rename = (
        getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if os.name == "posix"
        else None
    )
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    if rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return
    aside = other.with_name(f".{other.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)
