"""Finds where the last tokens of a sequence occurred in it before, and what followed there, on the device.

The tokens lie in the pages of their keys, so a prefix hit brings them, and what a step rolls back is never read.
speculative/suffix_index.py weighs several earlier occurrences; here the longest one counts, and the last of equal ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.tree_growth import CALIBRATION_WORDS, TEXT_FACTORS, TextDraft, Wishes, calibrated
from slipstream.kernels.gpu.tree_growth_reference import calibrated_reference

_WORDS = tl.constexpr(CALIBRATION_WORDS)
_BLOCK = 2048  # positions that a program compares at a time; with fewer, long texts take more turns


@triton.jit
def _token(position, pages, page_tokens, there, stored):  # type: ignore[no-untyped-def]
    page = tl.load(pages + position // page_tokens, mask=there, other=0)
    return tl.load(stored + page.to(tl.int64) * page_tokens + position % page_tokens, mask=there, other=-1)


@triton.jit
def _match_kernel(  # type: ignore[no-untyped-def]
    stored, base, anchors, pages, most_pages, page_tokens, wanted, calibration, tokens, claims, worths, counts,
    LONGEST: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """Handles one sequence, whose anchor stands at position `last` and is not stored yet."""
    sequence = tl.program_id(0)
    pages += sequence * most_pages
    anchor, last = tl.load(anchors + sequence), tl.load(base + sequence)
    best = tl.full((), 0, tl.int64)  # matching tokens << 32 | the position of the last of them
    for start in range(0, tl.where(tl.load(wanted + sequence) > 0, last, 0), BLOCK):
        end = start + tl.arange(0, BLOCK)
        same = end < last
        same = same & (_token(end, pages, page_tokens, same, stored) == anchor)
        match, back = same.to(tl.int64), tl.full((), 1, tl.int32)
        going = tl.max(match) > 0
        while going:
            same = same & (end >= back)
            before = tl.load(pages + (last - back) // page_tokens, mask=last >= back, other=0).to(tl.int64)
            own = tl.load(stored + before * page_tokens + (last - back) % page_tokens, mask=last >= back, other=-1)
            same = same & (_token(end - back, pages, page_tokens, same, stored) == own)
            match += same.to(tl.int64)
            back += 1
            going = (back < LONGEST) & (tl.max(same.to(tl.int32)) > 0)
        best = tl.maximum(best, tl.max(tl.where(match > 0, (match << 32) | end, 0)))
    known, end = (best >> 32).to(tl.int32), (best & 0xFFFFFFFF).to(tl.int32)
    tl.store(counts + sequence, tl.where(known > 0, DEPTH, 0))
    if known > 0:
        step = tl.arange(0, WIDTH)
        inside, out = step < DEPTH, sequence * DEPTH + step
        behind = end + 1 + step % (last - end)  # a text that has repeated itself is expected to do so again
        found = _token(behind, pages, page_tokens, inside & (behind < last), stored)
        tl.store(tokens + out, tl.where(behind == last, anchor, found), mask=inside)
        claim = (known + step).to(tl.float64) / (known + step + 1).to(tl.float64)
        tl.store(claims + out, claim, mask=inside)
        worth = calibrated(calibration + sequence * _WORDS, claim, step + 1, TEXT_FACTORS)
        tl.store(worths + out, worth, mask=inside)


def match_text(
    stored: Tensor, rows: DeviceRows, wishes: Wishes, page_tokens: int, longest: int, draft: TextDraft
) -> None:
    """Fills `draft` for all sequences that wish for text; `stored` holds the token of every place.

    A match counts as `longest` tokens at most.
    """
    sequences, depth = draft.tokens.shape
    _match_kernel[(sequences,)](
        stored, rows.base, wishes.anchors, rows.pages, rows.pages.stride(0), page_tokens, wishes.text,
        wishes.calibration, draft.tokens, draft.claims, draft.worths, draft.counts, longest, depth,
        triton.next_power_of_2(depth), _BLOCK, num_warps=8, enable_fp_fusion=False,
    )


def match_text_reference(
    stored: Tensor, rows: DeviceRows, wishes: Wishes, page_tokens: int, longest: int, draft: TextDraft
) -> None:
    """Does what `match_text` does, in plain Python."""
    depth, steps = draft.tokens.shape[1], torch.arange(draft.tokens.shape[1])
    for sequence, last in enumerate(rows.base.tolist()):
        draft.counts[sequence] = 0
        if not int(wishes.text[sequence]) or not last:
            continue
        positions = torch.arange(last, device=stored.device)
        pages = rows.pages[sequence, positions // page_tokens].long()
        text = [*stored[pages * page_tokens + positions % page_tokens].tolist(), int(wishes.anchors[sequence])]
        known, end = max((_alike(text, end, longest), end) for end in range(last))
        if not known:
            continue
        draft.counts[sequence] = depth
        following = [text[end + 1 + step % (last - end)] for step in range(depth)]
        draft.tokens[sequence] = torch.tensor(following, dtype=torch.int32)
        claim = (known + steps).double() / (known + steps + 1)
        draft.claims[sequence] = claim
        line = wishes.calibration[sequence].cpu()
        draft.worths[sequence] = calibrated_reference(line, claim, steps + 1, int(TEXT_FACTORS.value))


def _alike(text: list[int], end: int, longest: int) -> int:
    """Returns how many tokens up to `end` equal those up to the end of the text."""
    count = 0
    while count < min(longest, end + 1) and text[end - count] == text[-1 - count]:
        count += 1
    return count
