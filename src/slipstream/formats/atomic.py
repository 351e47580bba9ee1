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
    partial = _partial(path)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from None
    finally:
        with suppress(OSError):  # a second failure of the disk must not hide the first one
            partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Makes an empty folder that gets the name `path` when the block ends; `path` must not exist yet."""
    partial = _partial(path)
    try:
        partial.mkdir()
        yield partial
        os.rename(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(path: Path) -> Path:
    """Returns a name in the same folder as the final one, so that the last step is a rename in one file system."""
    return path.with_name(f".{path.name[:200]}.{uuid4().hex[:8]}.partial")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path: Path, error: OSError) -> SourceError:
    return SourceError(f"{path} cannot be written: {error.strerror or error}", "check the folder and the free space")
