"""Compares the time of a step of N rows with its floors: reading every weight once, and the products of every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 16, 32, 64)  # doublings up to the most rows that one sequence verifies in mode auto


@dataclass(frozen=True, slots=True)
class RowCost:
    """The measured time of one step of `rows` rows, and its two floors (None if the machine's peak is unknown)."""

    rows: int
    ms: float
    of_one: float  # the time in units of a step of one row
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
    """The costs of all `rows` that were measured; a step of one row must be among them.

    `bandwidth` is in bytes per second, and `peak` in products per second.
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
