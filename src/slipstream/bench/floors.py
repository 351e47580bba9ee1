"""Compares the time of a step of N rows with two floors, below which it cannot be.

One is the time to read every weight once, the other the time of all products (multiplications of a weight and a value
of a row).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROWS = (1, 2, 4, 8, 16, 32, 64)  # doublings up to the most rows that one sequence verifies in mode auto


@dataclass(frozen=True, slots=True)
class RowCost:
    """The measured time of one step of `rows` rows, and its two floors."""

    rows: int
    ms: float
    of_one: float  # the time in units of a step of one row
    byte_floor_ms: float
    product_floor_ms: float | None  # None if the machine's peak is unknown

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
) -> list[RowCost]:
    """The costs of all ROWS that were measured; a step of one row must be among them.

    `bandwidth` is in bytes per second, `products` counts the products of one row, and `peak` is in products per second.
    """
    byte_ms = 1000 * weight_bytes / bandwidth
    return [
        RowCost(
            rows,
            steps_ms[rows],
            steps_ms[rows] / steps_ms[1],
            byte_ms,
            1000 * rows * products / peak if products and peak else None,
        )
        for rows in ROWS
        if rows in steps_ms
    ]


def measured_costs(costs: Mapping[str, object], describe: Mapping[str, object]) -> list[RowCost]:
    """The row costs of an engine, from what `LLM.measure_costs` and `LLM.describe` return."""
    steps: Any = costs["steps_ms"]
    weights, bandwidth, products, peak = (
        number_in(describe, key) for key in ("weight_bytes", "bandwidth_gbs", "row_products", "peak_products")
    )
    return row_costs(steps, weights, 1e9 * bandwidth, products, peak)


def number_in(describe: Mapping[str, object], key: str) -> float:
    """One number of an engine's description; 0 if it was not measured."""
    value = describe.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
