"""Loads the compiled kernels, says which instruction set they use or why torch's run, and sets their threads."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Limits the instruction set to avx2, avx512 or amx; `none` selects torch's kernels. This is the only way to try the
# kernels of an older machine on a newer one.
CAP_VARIABLE = "SLIPSTREAM_CPU"
LEVELS = ("none", "avx2", "avx512", "amx")
PATH_VARIABLE = "SLIPSTREAM_NATIVE"  # the path of a build to load instead of the installed one
# p: a pointer, i: int32, l: int64, u: uint64, f: float, d: double
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled kernels; `isa` names the instruction set in use, and `amx` says whether AMX tiles multiply."""

    handle: ctypes.CDLL
    isa: str
    amx: bool

    def function(self, name: str, arguments: str, result: str | None = None) -> Any:
        """Returns a kernel of the chosen instruction set, or one that all sets share, by its name without suffix.

        The types of arguments and results are letters of `_TYPES`.
        """
        return _function(self, name, arguments, result)


@functools.cache
def _function(library: Library, name: str, arguments: str, result: str | None) -> Any:
    found = getattr(library.handle, f"{name}_{library.isa}", None) or getattr(library.handle, name)
    found.argtypes = [_TYPES[letter] for letter in arguments]
    found.restype = None if result is None else _TYPES[result]
    return found


@dataclass(frozen=True, slots=True)
class Availability:
    """The library if it can be used, and one line that explains the choice."""

    library: Library | None
    reason: str


def address(values: NDArray[Any]) -> int:
    """Returns the address of a writable array's numbers; numpy's own way creates several Python objects per call."""
    # numpy declares arrays as buffers only for Python 3.12 and newer
    return ctypes.addressof(ctypes.c_char.from_buffer(values)) if values.size else 0  # type: ignore[arg-type]


def library() -> Library | None:
    return availability().library


@functools.cache
def availability() -> Availability:
    cap = os.environ.get(CAP_VARIABLE, LEVELS[-1])
    if cap not in LEVELS:
        raise ConfigError(f"{CAP_VARIABLE} is '{cap}'", f"use one of {', '.join(LEVELS)}, or leave it out")
    if cap == "none":
        return Availability(None, f"torch's kernels, as {CAP_VARIABLE} asks")
    path = _built()
    if path is None:
        return Availability(None, "torch's kernels: none were compiled (install with a C++17 compiler for faster ones)")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return Availability(None, f"torch's kernels: the compiled ones do not load ({error})")
    return _choose(handle, LEVELS.index(cap))


def _choose(handle: ctypes.CDLL, cap: int) -> Availability:
    from slipstream.kernels.machine import amx_works

    if not handle.slip_has_avx2():
        return Availability(None, "torch's kernels: this processor lacks AVX2")
    if cap < LEVELS.index("avx512") or not handle.slip_has_avx512():
        return Availability(Library(handle, "avx2", False), "compiled kernels, AVX2")
    amx = cap >= LEVELS.index("amx") and amx_works(handle)
    return Availability(Library(handle, "avx512", amx), f"compiled kernels, {'AMX' if amx else 'AVX-512 VNNI'}")


def _built() -> Path | None:
    if PATH_VARIABLE in os.environ:
        return Path(os.environ[PATH_VARIABLE])
    here = Path(__file__).parent
    return next((here / f"_rows{suffix}" for suffix in EXTENSION_SUFFIXES if (here / f"_rows{suffix}").is_file()), None)


_chosen_threads = 0  # 0 means as many threads as torch uses


def set_threads(count: int) -> None:
    """Sets how many threads native kernels use, for the whole process, because all its engines share one team.

    0 means as many as torch uses.
    """
    global _chosen_threads
    _chosen_threads = count


def threads() -> int:
    import torch  # imported here, because the policy imports this module and does not need torch

    return _chosen_threads or torch.get_num_threads()
