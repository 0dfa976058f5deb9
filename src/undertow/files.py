"""Writing to disk so that nothing is lost or half-written: under a temporary name first, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from undertow.errors import CheckpointError


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` to write into; its files take their place in `folder` when the block succeeds.

    A new folder appears whole. In an existing one each file is replaced whole, `config.json` last, and files that are not
    written again stay, but for weights, of which none may be left of another kind. When the block fails, for a full disk or
    any other reason, what was there before is untouched.

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
        if not folder.exists():
            os.replace(temporary, folder)
            return
        written = sorted(temporary.iterdir(), key=lambda path: path.name == "config.json")
        for path in written:
            os.replace(path, folder / path.name)
        for path in folder.glob("*.safetensors*"):
            if path.name not in {new.name for new in written}:
                path.unlink()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {folder}: {error}; what was there before is untouched") from error
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
        raise CheckpointError(f"could not write {path}: {error}; what was there before is untouched") from error
