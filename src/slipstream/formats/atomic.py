"""Writes files and folders completely or not at all: a half-written one never has its final name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from slipstream.errors import SourceError


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that gets the name `path` when the block ends, and is deleted if the block fails."""
    with _renamed_at_the_end(path) as partial, partial.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Makes an empty folder that gets the name `path` when the block ends; `path` must not exist yet."""
    with _renamed_at_the_end(path) as partial:
        partial.mkdir()
        yield partial


@contextmanager
def _renamed_at_the_end(path: Path) -> Iterator[Path]:
    """Gives a name in the same folder as the final one, so that the last step is a rename in one file system."""
    partial = path.with_name(f".{path.name[:200]}.{uuid4().hex[:8]}.partial")
    try:
        yield partial
        os.replace(partial, path)
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        hint = "check the folder and the free space"
        raise SourceError(f"{path} cannot be written: {error.strerror or error}", hint) from None
    finally:
        with suppress(OSError):  # a second failure of the disk must not hide the first one
            partial.unlink(missing_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
