"""The gated delta rule follows its formula, and gives the same bits in whatever batch its rows are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.cpu.delta_rule import DeltaRule, DeltaShape, DeltaStep, delta_is_exact
from tests.deltas import SHAPE, draw, make_rule

SHAPES = [
    SHAPE,
    DeltaShape(layers=1, key_heads=1, value_heads=1, key_dim=8, value_dim=3, kernel=2),
    DeltaShape(layers=3, key_heads=16, value_heads=48, key_dim=16, value_dim=32, kernel=4),
]


def test_the_rule_is_the_formula() -> None:
    """Compares with the sums written out for one head at a time, in double precision."""
    shape, rule = SHAPE, make_rule(SHAPE)
    inputs, write, forget = draw(9, shape.channels), draw(9, shape.value_heads, seed=7), draw(9, shape.value_heads)
    window = torch.zeros(1, 1, shape.window, shape.channels)
    memory = torch.zeros(1, 1, shape.value_heads, shape.key_dim, shape.value_dim)
    got = DeltaStep(window, memory, [0], [(9, None)], [()]).run(0, rule, inputs, *rule.gates(write, forget))
    kernel = draw(shape.channels, shape.kernel, seed=2).double()
    rates, shift = -0.2 * draw(shape.value_heads).abs().double(), draw(shape.value_heads, seed=1).double()
    padded = torch.cat((torch.zeros(shape.window, shape.channels), inputs)).double()
    width = shape.key_heads * shape.key_dim
    states = torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    for row in range(9):
        mixed = torch.nn.functional.silu((padded[row : row + shape.kernel] * kernel.t()).sum(0))
        for head in range(shape.value_heads):
            own = head // 3  # three value heads share a key head
            query, key = (
                part / (part.square().sum() + 1e-6).sqrt()
                for part in (mixed[at + own * 5 : at + own * 5 + 5] for at in (0, width))
            )
            value = mixed[2 * width + head * 7 : 2 * width + head * 7 + 7]
            state = states[head] * (rates[head] * torch.log1p((forget[row, head] + shift[head]).exp())).exp()
            learnt = torch.sigmoid(write[row, head].double()) * (value - key @ state)
            states[head] = state + key[:, None] * learnt
            assert torch.allclose(got[row, head].double(), query @ states[head] / 5**0.5, atol=1e-5)


def test_tiled_heads_are_the_same_heads_in_another_order() -> None:
    shape = SHAPE
    grouped, order = make_rule(shape), torch.arange(6).view(2, 3).t().flatten()  # key head, then value head of it
    width = 2 * shape.key_heads * shape.key_dim
    channels = torch.cat((torch.arange(width), width + (order[:, None] * 7 + torch.arange(7)).flatten()))
    tiled = DeltaRule(
        replace(shape, tiled=True),
        draw(shape.channels, shape.kernel, seed=2)[channels],
        -0.2 * draw(6).abs()[order],
        draw(6, seed=1)[order],
    )
    inputs, write, forget = draw(5, shape.channels), draw(5, 6, seed=7), draw(5, 6, seed=8)

    def read(rule: DeltaRule, *parts: Tensor) -> Tensor:
        zeros = torch.zeros(1, 1, 3, shape.channels), torch.zeros(1, 1, 6, 5, 7)
        return DeltaStep(*zeros, [0], [(5, None)], [()]).run(0, rule, parts[0], *rule.gates(*parts[1:]))

    expected = read(grouped, inputs, write, forget)[:, order]
    assert torch.equal(read(tiled, inputs[:, channels], write[:, order], forget[:, order]), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_the_same_alone_and_together(shape: DeltaShape) -> None:
    assert delta_is_exact(shape, rows=40)
