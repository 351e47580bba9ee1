"""Adapters that clients have loaded from the server's folder, each as a private copy of the files it consists of.

A name that was checked can be a link to somewhere else a moment later. So each file is opened once, below the folder
and through no link, and everything that is read afterwards, also when the model is loaded again, is the copy of it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

from slipstream.formats.adapters import PEFT_CONFIG, PEFT_WEIGHTS
from slipstream.server.errors_http import ApiError

_THROUGH = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not make the thread wait for a writer


class AdapterCopies:
    """The copies of one server; they go when it ends."""

    def __init__(self) -> None:
        self._home: Path | None = None

    def take(self, folder: Path, path: Path) -> Path:
        """Copies the adapter at a path in the folder; takes as long as reading it."""
        if not path.exists():
            raise ApiError(400, "there is no adapter at 'path'", "give a PEFT folder or a .gguf file", param="path")
        names = _files_of(path)
        copy = Path(tempfile.mkdtemp(dir=self._own_home())) / path.name
        target = copy if path.is_dir() else copy.parent
        target.mkdir(exist_ok=True)
        try:
            for file in names:
                with open_inside(folder, file) as source, (target / file.name).open("xb") as made:
                    shutil.copyfileobj(source, made)
        except BaseException:
            self.drop(copy)
            raise
        return copy

    def drop(self, copy: Path) -> None:
        """Removes a copy; any other path is left alone."""
        if self._home is not None and copy.is_relative_to(self._home):
            shutil.rmtree(copy.parent, ignore_errors=True)

    def _own_home(self) -> Path:
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix="slipstream-adapters-"))
            weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        return self._home


def _files_of(path: Path) -> list[Path]:
    """The files an adapter at this path is read from, as far as they are there."""
    if path.is_dir():
        peft = (PEFT_CONFIG, PEFT_WEIGHTS)
        return [file for file in sorted(path.iterdir()) if file.name in peft or file.suffix == ".gguf"]
    beside = path.parent / PEFT_CONFIG
    return [path, beside] if path.suffix == ".safetensors" and beside.exists() else [path]


def open_inside(folder: Path, path: Path) -> BinaryIO:
    """Opens a plain file that lies in the folder, links followed; none can be put in its way meanwhile."""
    try:
        parts = path.resolve(strict=True).relative_to(folder).parts
        place = os.open(folder, _THROUGH)
        try:
            for part in parts[:-1]:
                inner = os.open(part, _THROUGH, dir_fd=place)
                os.close(place)
                place = inner
            opened = os.open(parts[-1], _FILE, dir_fd=place)
        finally:
            os.close(place)
    except (OSError, RuntimeError, ValueError, IndexError):
        raise outside() from None
    file = os.fdopen(opened, "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise outside()
    return file


def outside() -> ApiError:
    return ApiError(
        400, "'path' is not in the folder of this server's adapters", "give it relative to that folder", param="path",
        code="invalid_value",
    )
