"""The compiled move of rows between pages, against torch's."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.cache.cpu.page_pools import KvPools, PoolShape
from slipstream.kernels.cpu.native_library import library


@pytest.mark.parametrize("heads, dim", [(1, 8), (3, 64), (5, 7)])
def test_rows_move_as_torch_moves_them_even_where_they_overlap(heads: int, dim: int) -> None:
    if library() is None:
        pytest.skip("no compiled kernels")
    chance = random.Random(heads)
    ours, theirs = (KvPools(6, 16, PoolShape.alike(4, heads, dim), None) for _ in range(2))
    for mine, other in zip(ours.target, theirs.target, strict=True):
        for tensor, twin in zip(mine, other, strict=True):
            twin.copy_(tensor.normal_())
    places = [(page, offset) for page in range(6) for offset in range(16)]
    for rows in (1, 2, 7, 40):
        # chosen from the same few pages, so that some rows go where others come from
        sources, destinations = chance.sample(places, rows), chance.sample(places, rows)
        ours.move_rows(sources, destinations)
        theirs.move_rows_plainly(sources, destinations)
        for mine, other in zip(ours.target, theirs.target, strict=True):
            assert all(map(torch.equal, mine, other)), rows


def test_pools_of_a_compiled_machine_use_it() -> None:
    pools = KvPools(2, 16, PoolShape.alike(1, 1, 8), None)
    assert (pools.movers is not None) == (library() is not None)
