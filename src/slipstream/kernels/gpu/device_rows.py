"""The rows of one device step: tensors of fixed size, so that a captured graph finds them where it left them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LEAST_ROWS = 16  # matmuls give a row the same bits from here to 64 rows
MAX_DEPTH = 64  # positions a proposal can reach behind its anchor, the anchor included
Kind = Literal["tree", "chain", "block"]


def padded_rows(rows: int) -> int:
    """How many rows matmuls are given for so many: 16, 32 or 64, or any more sixteens."""
    return -(-rows // LEAST_ROWS) * LEAST_ROWS if rows > 64 else max(LEAST_ROWS, 1 << (rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """`sequences` times `each` rows; row r belongs to sequence r // each and is its row r % each.

    Behind them there may be rows that only fill a matmul's row count; nobody attends for them.

    kind "tree": a row sees what was committed before the step and its own ancestors (`paths`). "chain": rows stand
    at consecutive positions and see what is at or before theirs. "block": every row sees what was committed and all
    rows of its sequence. Rows that are not used have their place in the scratch page and look like row 0.
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
    paths: Tensor  # int32 [rows, MAX_DEPTH]: at depth d, the row (within its sequence) of this row's ancestor

    @property
    def rows(self) -> int:
        return self.sequences * self.each

    @classmethod
    def empty(
        cls, kind: Kind, sequences: int, each: int, most_pages: int, device: torch.device, padding_place: int = 0
    ) -> DeviceRows:
        """Rows at position 0; `padding_place` is where rows that only fill up store what nobody reads."""
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows = sequences * each
        padded = padded_rows(rows)
        return cls(
            kind, sequences, each, numbers(padded), numbers(padded), numbers(padded) + padding_place,
            numbers(sequences), numbers(sequences), numbers(sequences, most_pages), numbers(rows, MAX_DEPTH),
        )
