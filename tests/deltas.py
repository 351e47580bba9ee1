"""An imaginary recurrent model for the tests: layers without weights, whose inputs depend only on a row's number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.cpu.delta_rule import DeltaRule, DeltaShape, DeltaStep

SHAPE = DeltaShape(layers=2, key_heads=2, value_heads=6, key_dim=5, value_dim=7, kernel=4)


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def make_rule(shape: DeltaShape, seed: int = 0) -> DeltaRule:
    rates, shift = -0.2 * draw(shape.value_heads, seed=seed).abs(), draw(shape.value_heads, seed=seed + 1)
    return DeltaRule(shape, draw(shape.channels, shape.kernel, seed=seed + 2), rates, shift)


class Rows:
    """What the layers of a model would pass to the recurrence, for rows that are identified by a number."""

    def __init__(self, shape: DeltaShape) -> None:
        self.shape = shape
        self.rules = [make_rule(shape, seed=100 * layer) for layer in range(shape.layers)]

    def run(self, step: DeltaStep, rows: Sequence[int]) -> list[Tensor]:
        """Runs rows through every layer, and returns the outputs of each layer."""
        read = []
        for layer, rule in enumerate(self.rules):
            inputs, write, forget = (
                torch.stack([draw(width, seed=31 * row + layer) for row in rows])
                for width in (self.shape.channels, self.shape.value_heads, self.shape.value_heads)
            )
            read.append(step.run(layer, rule, inputs, *rule.gates(write, forget)))
        return read
