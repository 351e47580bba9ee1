"""Calls the compiled index of a text's earlier occurrences; `speculative/suffix_index.py` does the same in Python."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from types import SimpleNamespace

from slipstream.kernels.cpu.native_growth import CalibrationTable, GrownNodes
from slipstream.kernels.cpu.native_library import library

# The functions of text_index.cpp, with the types of arguments and results as `Library.function` takes them.
_SIGNATURES = {
    "new": ("iii", "p"),
    "copy": ("p", "p"),
    "free": ("p", None),
    "extend": ("ppi", None),
    "truncate": ("pi", None),
    "occurrences": ("pp", "i"),
    "grow": ("ppiiddp", None),
}


class CompiledText:
    """One text in compiled memory, which is freed with this object; one thread at a time may use it."""

    def __init__(self, calls: SimpleNamespace, text: int) -> None:
        self._calls = calls
        self._text = text
        self._grown = GrownNodes()
        self._grown_at = ctypes.addressof(self._grown)

    def __del__(self) -> None:
        self._calls.free(self._text)

    def copy(self) -> CompiledText:
        return CompiledText(self._calls, self._calls.copy(self._text))

    def extend(self, tokens: Sequence[int]) -> None:
        values = array("i", tokens)
        self._calls.extend(self._text, values.buffer_info()[0], len(values))

    def truncate(self, length: int) -> None:
        self._calls.truncate(self._text, length)

    def occurrences(self, most: int) -> list[tuple[int, int]]:
        """Returns how many tokens match and the position of the last of them, for each occurrence."""
        found = (ctypes.c_int32 * (2 * most))()
        count = self._calls.occurrences(self._text, found)
        return [(found[2 * place], found[2 * place + 1]) for place in range(count)]

    def grow(
        self, calibration: CalibrationTable | None, most_nodes: int, depth: int, floor: float, first: float
    ) -> GrownNodes:
        """Returns nodes that are valid until the next call."""
        table = None if calibration is None else ctypes.addressof(calibration)
        self._calls.grow(self._text, table, most_nodes, depth, floor, first, self._grown_at)
        return self._grown


@functools.cache
def _calls() -> SimpleNamespace | None:
    found = library()
    if found is None:
        return None
    functions = {name: found.function(f"slip_text_{name}", *types) for name, types in _SIGNATURES.items()}
    return SimpleNamespace(**functions)


def compiled_text(levels: int, longest_match: int, most_occurrences: int) -> CompiledText | None:
    """Returns an empty text, or None if no kernels were compiled for this machine."""
    calls = _calls()
    return CompiledText(calls, calls.new(levels, longest_match, most_occurrences)) if calls is not None else None
