"""What a step of N rows costs beside what it must cost: reading every weight once, and the products of every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class RowCost:
    """One step of `rows` rows: measured, and the two floors under it (None where the peak is not known)."""

    rows: int
    ms: float
    of_one: float  # in steps of one row
    byte_floor_ms: float
    product_floor_ms: float | None

    @property
    def floor_ms(self) -> float:
        return max(self.byte_floor_ms, self.product_floor_ms or 0.0)

    def to_json(self) -> dict[str, object]:
        products = self.product_floor_ms
        return {
            "rows": self.rows,
            "ms": round(self.ms, 4),
            "of_one_row": round(self.of_one, 4),
            "byte_floor_ms": round(self.byte_floor_ms, 4),
            "product_floor_ms": None if products is None else round(products, 4),
            "floor_share": round(self.floor_ms / self.ms, 4),
        }


def row_costs(
    steps_ms: Mapping[int, float],
    weight_bytes: float,
    bandwidth: float,
    products: float | None = None,
    peak: float | None = None,
    rows: Sequence[int] = ROWS,
) -> list[RowCost]:
    """The table for those of `rows` that were measured, one row among them.

    `bandwidth` is in bytes and `peak` in products a second.
    """
    costs = []
    for count in rows:
        if count in steps_ms:
            product_ms = None if not products or not peak else 1000 * count * products / peak
            costs.append(
                RowCost(
                    count, steps_ms[count], steps_ms[count] / steps_ms[1], 1000 * weight_bytes / bandwidth, product_ms
                )
            )
    return costs
