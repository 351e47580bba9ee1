"""Builds the compiled kernels with sanitizers in a temporary folder and runs their tests against that build.

python scripts/sanitize.py            AddressSanitizer, ThreadSanitizer, then UndefinedBehaviorSanitizer
python scripts/sanitize.py thread     one of "memory", "thread" and "undefined"
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/unit/test_native_*.py"))
# test_native_library is left out: it starts compilers and other Pythons, some of which do not run with a sanitizer.
TESTS = [test for test in TESTS if "library" not in test]
# Only every sixteenth case runs, because a sanitized kernel is some ten times slower and cases differ only in sizes.
SHARE = "16"
# The two sanitizers are built separately, because both together make the kernels' templates compile for many minutes.
FLAGS = {
    "memory": "-fsanitize=address",
    "thread": "-fsanitize=thread",
    "undefined": "-fsanitize=undefined -fno-sanitize-recover=undefined",
}
RUNTIMES = {"memory": "libasan.so", "thread": "libtsan.so", "undefined": "libubsan.so"}
SYMBOLS = {"memory": b"__asan_report", "thread": b"__tsan_write", "undefined": b"__ubsan_handle"}
OPTIONS = {
    # Python and torch keep memory until the process ends, and load libraries that were built without sanitizers.
    "memory": {"ASAN_OPTIONS": "detect_leaks=0"},
    "undefined": {"UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:report_signal_unsafe=0"},
}


def build(kind: str, folder: Path) -> Path:
    """Compiles the kernels with a sanitizer."""
    flags = f"{FLAGS[kind]} -fno-omit-frame-pointer"
    places = ["--build-temp", str(folder / "objects"), "--build-lib", str(folder / "library")]
    environment = {**os.environ, "CFLAGS": flags, "CXXFLAGS": flags, "LDFLAGS": flags}
    command = [sys.executable, "setup.py", "-q", "build_ext", *places]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    library = next((folder / "library").rglob("_rows*.so"))
    if SYMBOLS[kind] not in library.read_bytes():
        sys.exit(f"{library.name} was built without its sanitizer: this Python's compiler takes its flags elsewhere")
    return library


def runtime(name: str) -> str:
    """The path of the compiler's sanitizer library, which must be loaded before everything else."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def check(kind: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            **OPTIONS[kind],
            "SLIPSTREAM_NATIVE": str(build(kind, Path(folder))),
            "LD_PRELOAD": runtime(RUNTIMES[kind]),
            "SLIPSTREAM_TEST_SHARE": SHARE,
            "PYTHONPATH": str(ROOT / "src"),
        }
        # ThreadSanitizer needs memory at fixed addresses, which address randomisation prevents.
        fixed = ["setarch", "-R"] if kind == "thread" else []
        command = [*fixed, sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *TESTS]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    print(f"{kind}: {'clean' if code == 0 else f'failed with {code}'}")
    return code


if __name__ == "__main__":
    sys.exit(max(abs(check(kind)) for kind in sys.argv[1:] or FLAGS))
