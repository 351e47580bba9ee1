"""The rows of one device step: tensors of fixed size and address, so that a captured graph can be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LEAST_ROWS = 16  # from here to 64 rows, matmuls give a row the same bits
MAX_DEPTH = 64  # positions that a proposal can occupy, including its anchor
Kind = Literal["tree", "chain", "block"]


def padded_rows(rows: int) -> int:
    """Returns the number of rows with which matmuls run: 16, 32 or 64, and beyond that a multiple of 16."""
    return -(-rows // LEAST_ROWS) * LEAST_ROWS if rows > 64 else max(LEAST_ROWS, 1 << (rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """`sequences` times `each` rows; row r is row r % each of sequence r // each.

    Behind them there may be padding rows that only fill up a matmul's number of rows; attention ignores them.

    In a "tree" a row sees what was committed before the step and its own ancestors (`paths`). In a "chain" rows have
    consecutive positions and see everything up to their own. In a "block" every row sees what was committed and all
    rows of its sequence. Unused rows have their place in the scratch page and are otherwise like row 0.
    """

    kind: Kind
    sequences: int
    each: int
    tokens: Tensor  # int32 [padded rows]
    positions: Tensor  # int32 [padded rows]
    places: Tensor  # int32 [padded rows]: page * page tokens + offset, where keys and values are stored
    base: Tensor  # int32 [sequences]: positions committed before the step; row i of a sequence is in slot base + i
    earliest: Tensor  # int32 [sequences]: keys at positions before this one are hidden
    pages: Tensor  # int32 [sequences, most pages]
    paths: Tensor  # int32 [rows, MAX_DEPTH]: the row's ancestor at each depth, as a row within its sequence

    @property
    def rows(self) -> int:
        return self.sequences * self.each

    @classmethod
    def empty(
        cls, kind: Kind, sequences: int, each: int, most_pages: int, device: torch.device, padding_place: int = 0
    ) -> DeviceRows:
        """Makes rows at position 0; padding rows store their keys and values at `padding_place`, which is never read.
        """
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows = sequences * each
        padded = padded_rows(rows)
        return cls(
            kind, sequences, each, numbers(padded), numbers(padded), numbers(padded) + padding_place,
            numbers(sequences), numbers(sequences), numbers(sequences, most_pages), numbers(rows, MAX_DEPTH),
        )
