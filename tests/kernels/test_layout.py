"""The rows of draft blocks, laid out by the kernel and by torch."""

import pytest
import torch

from slipstream.kernels.gpu.block_layout import block_rows, block_rows_reference
from slipstream.kernels.gpu.device_rows import DeviceRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 64


@pytest.mark.parametrize(("sequences", "each", "window"), [(1, 16, 0), (3, 7, 100), (8, 16, 40)])
def test_blocks_stand_behind_what_is_committed(sequences: int, each: int, window: int) -> None:
    generator = torch.Generator().manual_seed(each * 7 + sequences)
    base = torch.randint(0, 300, (sequences,), generator=generator, dtype=torch.int32)
    pages = torch.randperm(sequences * 8, generator=generator).to(torch.int32).view(sequences, 8)
    anchors = torch.randint(0, 1000, (sequences,), generator=generator, dtype=torch.int32).to(DEVICE)
    found = []
    for lay_out in (block_rows, block_rows_reference):
        rows = DeviceRows.empty("block", sequences, each, 8, DEVICE)
        rows.base.copy_(base)
        rows.pages.copy_(pages)
        for tensor in (rows.tokens, rows.positions, rows.places, rows.earliest):
            tensor.fill_(-7)
        lay_out(rows, anchors, 999, window, PAGE)
        found.append((rows.tokens, rows.positions, rows.places, rows.earliest))
    for own, other in zip(*found, strict=True):
        assert torch.equal(own, other)
    last = int(base[-1]) + each - 1
    assert int(found[0][2][sequences * each - 1]) == int(pages[-1, last // PAGE]) * PAGE + last % PAGE
