"""Calls the compiled code that grows chains and trees; the package `speculative` does the same in Python."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.native_library import Library, library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_ROWS = 256  # the size of the arrays in SlipGrown; the same as MAX_TREE_ROWS of requests
FLOAT, HALF, BRAIN = range(3)  # the number types of a head's tables, as growth.cpp numbers them
_BROKEN, _UNKNOWN_TOKEN = 1, 2  # results of slip_grow: numbers that are not finite, and a token outside the tables
_int, _double, _pointer = ctypes.c_int32, ctypes.c_double, ctypes.c_void_p


class HeadTables(ctypes.Structure):
    """SlipHead of growth.cpp: tables that correct the candidates of a slot once the token before it is chosen."""

    _fields_ = [
        ("vocabulary", _int),
        ("rank", _int),
        ("before_type", _int),
        ("after_type", _int),
        ("before", _pointer),
        ("after", _pointer),
        ("trusted", _pointer),
    ]


class CompiledWalk:
    """A drafter's heads for one block: the tables, and per slot what its hidden row contributes to the confidence."""

    def __init__(self, tables: HeadTables, confidence: NDArray[np.float32] | None) -> None:
        self._tables = tables
        self._confidence = confidence
        self.tables_at = ctypes.addressof(tables)
        self.confidence_at: int | None = None if confidence is None else confidence.ctypes.data


class CandidateBlock(ctypes.Structure):
    """SlipBlock: candidates and what corrects them. The caller keeps alive what the pointers refer to."""

    _fields_ = [
        ("slots", _int),
        ("candidates", _int),
        ("tokens", _pointer),
        ("scores", _pointer),
        ("head", _pointer),
        ("confidence", _pointer),
        ("scale", _double),
        ("min_confidence", _double),
    ]


class CalibrationTable(ctypes.Structure):
    """SlipCalibration: factors that turn a claimed probability into an acceptance probability, by claim and depth."""

    _fields_ = [
        ("claims", _int),
        ("depths", _int),
        ("claim_edges", _pointer),
        ("depth_edges", _pointer),
        ("least", _double),
        ("most", _double),
        ("factors", _pointer),
    ]


class GrownNodes(ctypes.Structure):
    """SlipGrown: nodes in the order in which they were added, the anchor first."""

    _fields_ = [
        ("rows", _int),
        ("tokens", _int * MOST_ROWS),
        ("parents", _int * MOST_ROWS),
        ("depths", _int * MOST_ROWS),
        ("claims", _double * MOST_ROWS),
        ("survivals", _double * MOST_ROWS),
    ]

    def lists(self) -> tuple[list[int], list[int], list[float], list[float], list[int]]:
        """Returns tokens, parents, claims, survivals and depths."""
        rows = self.rows
        return (self.tokens[:rows], self.parents[:rows], self.claims[:rows], self.survivals[:rows], self.depths[:rows])


class Grower:
    """The compiled growth of chains and trees; several threads may call it at once."""

    def __init__(self, kernels: Library) -> None:
        self._call = kernels.function("slip_grow", "ppiiiidp", "i")

    def grow(
        self,
        block: CandidateBlock,
        calibration: CalibrationTable | None,
        anchor: int,
        shape: int,
        nodes: int,
        depth: int,
        floor: float,
    ) -> tuple[GrownNodes, bool]:
        """Returns at most `nodes` nodes in one of the shapes of `kernels.rows`, and whether a head gave NaN or Inf."""
        grown = GrownNodes()
        table = None if calibration is None else ctypes.addressof(calibration)
        state = self._call(ctypes.addressof(block), table, anchor, shape, nodes, depth, floor, ctypes.addressof(grown))
        if state == _UNKNOWN_TOKEN:
            raise IntegrityError(
                "a drafted token is not in the table of the drafter's head", "the drafter belongs to another target"
            )
        return grown, state == _BROKEN


@functools.cache
def grower() -> Grower | None:
    """Returns the compiled growth, or None if no kernels were compiled for this machine."""
    kernels = library()
    return Grower(kernels) if kernels is not None else None
