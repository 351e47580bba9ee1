"""Writes requirements.lock: each version in constraints.txt with the SHA-256 hashes of its files on the package index.

    python scripts/lock.py

torch is left out: which of its builds is right (CPU, CUDA) depends on the machine, and so do the packages it brings.
llama.cpp's package is left out too: it is only compared with, and no test needs it.
"""

from __future__ import annotations

import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

INDEX = "https://pypi.org/simple"
ROOT = Path(__file__).parents[1]
LEFT_OUT = {"torch", "xllamacpp"}
MARKERS = {"triton": "platform_system == 'Linux' and platform_machine == 'x86_64'"}
_LINK = re.compile(r'href="[^"#]*/([^"/#]+)#sha256=([0-9a-f]{64})"')
_HEADER = """\
# The files with which everything is tested (Linux on x86-64, CPython 3.11), by their hashes; `make lock` writes this.
# `make setup LOCKED=1` installs only these; torch is left out, because its build depends on the machine.
"""


def pins(text: str) -> list[tuple[str, Version]]:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return [(name, Version(version)) for name, version in pairs if name.lower() not in LEFT_OUT]


def version_of(filename: str) -> Version | None:
    """The version of a file on the index; None for kinds of files that pip does not install."""
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        return parse_sdist_filename(filename)[1]
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return None


def entry(name: str, version: Version) -> str:
    with urllib.request.urlopen(f"{INDEX}/{name.lower().replace('_', '-')}/", timeout=60) as answer:
        page = unescape(answer.read().decode())
    hashes = sorted({digest for filename, digest in _LINK.findall(page) if version_of(filename) == version})
    if not hashes:
        raise SystemExit(f"the index has no file of {name} {version}")
    marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
    return " \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{digest}" for digest in hashes)])


def main() -> None:
    wanted = pins((ROOT / "constraints.txt").read_text())
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda pin: entry(*pin), wanted))
    (ROOT / "requirements.lock").write_text(_HEADER + "\n".join(entries) + "\n")
    print(f"requirements.lock: {len(entries)} packages")


if __name__ == "__main__":
    main()
