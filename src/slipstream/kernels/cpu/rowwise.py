"""Activations whose result does not depend on a number's place, although torch rounds a tensor's end differently."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

# Torch processes this many numbers together, and those left at a tensor's end one by one with another formula.
_VECTOR = 32


def row_by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Applies a function to every number of rows [..., width], in whole vectors only."""
    width = rows.shape[-1]
    missing = -width % _VECTOR
    return function(F.pad(rows, (0, missing)))[..., :width] if missing else function(rows)
