"""A folder that can prove itself: a list of its files with sizes and hashes, written last, when all
are on the disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from undertow.errors import CheckpointError
from undertow.files import MANIFEST, sync, write_text
from undertow.reading import is_text


def write_manifest(folder: Path) -> None:
    """Bring a folder's files to the disk, and then list them in its `manifest.json`."""
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    names = [name for name in names if name != MANIFEST]
    for name in names:
        sync(folder / name)
    described = {
        name: {"size": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, digests(folder / name for name in names), strict=True)
    }
    write_text(folder / MANIFEST, json.dumps({"files": described}, indent=1) + "\n")
    sync(folder / MANIFEST)
    sync(folder)


def check_manifest(folder: Path, needed: Iterable[str] = ()) -> None:
    """Make sure that a folder holds what its manifest lists; one without a manifest, as other
    programs make them, passes.

    Args:
        folder: where `write_manifest` may have been.
        needed: files that the manifest has to list.

    Raises:
        CheckpointError: a file is missing, or another than the one that was listed; or the manifest
            itself is damaged.
        OSError: something could not be read.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return
    files = listed(text, folder)
    for name in needed:
        if name not in files:
            raise CheckpointError(f"{folder / MANIFEST} does not list {name}")
    for name, about in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder / name} is missing") from error
        if size != about["size"]:
            raise CheckpointError(
                f"{folder / name} has {size:,} bytes and not {about['size']:,}: it is damaged"
            )
    for name, digest in zip(files, digests(folder / name for name in files), strict=True):
        if digest != files[name]["sha256"]:
            raise CheckpointError(
                f"{folder / name} is not what was saved: its hash differs from the one in "
                f"{MANIFEST}"
            )


def check_model(folder: Path) -> None:
    """Make sure that a model's folder holds what was saved, where it has a manifest to go by.

    Raises:
        CheckpointError: it does not, or it cannot be read.
    """
    try:
        check_manifest(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; restore it, or remove {folder} and train again, or remove {MANIFEST} if you "
            "made the change yourself"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def listed(text: bytes, folder: Path) -> dict[str, Any]:
    """The files that a manifest lists, by name.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        files = json.loads(text)["files"]
        if files and all(is_text(name) and is_entry(about) for name, about in files.items()):
            return dict(files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise CheckpointError(f"{folder / MANIFEST} is damaged")


def is_entry(about: Any) -> bool:
    """Whether this is what a manifest says of a file."""
    return isinstance(about, dict) and {key: type(value) for key, value in about.items()} == {
        "size": int,
        "sha256": str,
    }


def digests(paths: Iterable[Path]) -> list[str]:
    """The SHA-256 of files, a few at a time: hashing lets other threads run."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(digest, paths))


def digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
