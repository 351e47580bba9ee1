"""Lays out the rows of draft blocks on the device: an anchor and masks after each sequence's committed positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.device_rows import DeviceRows


def block_rows(rows: DeviceRows, anchors: Tensor, mask_token: int, window: int, page_tokens: int) -> None:
    """Fills a block's tokens, positions, places and earliest keys from `rows.base` and `rows.pages`.

    Keys further back than `window` are hidden; a window of 0 hides none.
    """
    _block_rows[(rows.sequences,)](
        rows.base, anchors, rows.pages, rows.pages.stride(0), mask_token, window, page_tokens,
        rows.tokens, rows.positions, rows.places, rows.earliest, rows.each, BLOCK=triton.next_power_of_2(rows.each),
    )


@triton.jit
def _block_rows(  # type: ignore[no-untyped-def]
    base_at, anchors_at, pages_at, most_pages, mask_token, window, page_tokens,
    tokens_at, positions_at, places_at, earliest_at, each, BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    used = row < each
    base = tl.load(base_at + sequence)
    anchor = tl.load(anchors_at + sequence)
    position = base + row
    page = tl.load(pages_at + sequence * most_pages + position // page_tokens, mask=used, other=0)
    out = sequence * each + row
    tl.store(tokens_at + out, tl.where(row == 0, anchor, mask_token), mask=used)
    tl.store(positions_at + out, position, mask=used)
    tl.store(places_at + out, page * page_tokens + position % page_tokens, mask=used)
    hidden = tl.where(window > 0, tl.maximum(base - window, 0), 0)
    tl.store(earliest_at + sequence, hidden)


def block_rows_reference(rows: DeviceRows, anchors: Tensor, mask_token: int, window: int, page_tokens: int) -> None:
    """Does what `block_rows` does, in plain torch."""
    shape = rows.sequences, rows.each
    offsets = torch.arange(rows.each, device=anchors.device, dtype=torch.int32)
    positions = rows.base[:, None] + offsets
    tokens = torch.full(shape, mask_token, dtype=torch.int32, device=anchors.device)
    tokens[:, 0] = anchors
    pages = rows.pages.gather(1, (positions // page_tokens).long())
    used = slice(0, rows.rows)
    rows.tokens[used] = tokens.view(-1)
    rows.positions[used] = positions.view(-1)
    rows.places[used] = (pages * page_tokens + positions % page_tokens).view(-1)
    rows.earliest.copy_((rows.base - window).clamp_min(0) if window else torch.zeros_like(rows.base))
