"""Calls the compiled index of a text's earlier occurrences; `speculative/suffix_index.py` has the same in Python."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence

from slipstream.kernels.cpu.native_growth import CalibrationTable, GrownNodes
from slipstream.kernels.cpu.native_library import library

_int, _double, _pointer = ctypes.c_int32, ctypes.c_double, ctypes.c_void_p


class TextCalls:
    """The functions of text_index.cpp."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        def function(name: str, *arguments: type, result: type | None = None) -> ctypes._NamedFuncPointer:
            found = getattr(handle, f"slip_text_{name}")
            found.argtypes, found.restype = arguments, result
            return found

        self.new = function("new", _int, _int, _int, result=_pointer)
        self.copy = function("copy", _pointer, result=_pointer)
        self.free = function("free", _pointer)
        self.extend = function("extend", _pointer, _pointer, _int)
        self.truncate = function("truncate", _pointer, _int)
        self.occurrences = function("occurrences", _pointer, _pointer, result=_int)
        self.grow = function("grow", _pointer, _pointer, _int, _int, _double, _double, _pointer)


class CompiledText:
    """One text in compiled memory, which is freed with this object; one thread at a time may use it."""

    def __init__(self, calls: TextCalls, text: int) -> None:
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
        found = (_int * (2 * most))()
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
def _calls() -> TextCalls | None:
    found = library()
    return TextCalls(found.handle) if found is not None else None


def compiled_text(levels: int, longest_match: int, most_occurrences: int) -> CompiledText | None:
    """Returns an empty text, or None if no kernels were compiled for this machine."""
    calls = _calls()
    return CompiledText(calls, calls.new(levels, longest_match, most_occurrences)) if calls is not None else None
