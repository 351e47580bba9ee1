"""Quantised blocks of a GGUF file, repacked for the GPU into planes of codes and of scales that are read in whole
lines.

A group is the inputs that share a scale. A word has sixteen bits and holds one code of each of several neighbouring
groups, always of the same place in the group. Each of these groups is a plane of the words: one shift and one mask of a
tile of words give its codes in the layout of the matrix. Words are stored in tiles of 64 outputs, one step (the groups
of a word) after the other: [tiles, steps, 64, group]. Scales are rounded to bf16, and so are weights before they are
multiplied. Both roundings change a weight by less than any block type does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

RawRows = NDArray[np.uint8]  # rows of a file as they are stored [rows, bytes]

TILE_ROWS = 64  # outputs of a tile
_WORD_BITS = 16
_PIECE_ELEMENTS = 2**24  # weights that are unpacked at a time, so that a large tensor is never unpacked as a whole
# The bits of an integer below 256, read as a bf16, are the integer times 2^-133. Scales are multiplied by 2^133 to make
# up for that, in two factors because no float is as large.
_CODE_FACTORS = (2.0**70, 2.0**63)
_TOP_EXPONENT = -7  # the exponent of the largest scale in units: times those factors it stays within bf16's range


@dataclass(frozen=True, slots=True)
class UnpackedBlocks:
    """Unpacked blocks with a scale per `group` inputs: (code - zero) * scale, or with minima code * scale - minimum."""

    codes: Tensor  # uint8 [rows, inputs]
    scales: Tensor  # fp32 [rows, groups]
    minima: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What kernels must know of a block type.

    `high` says that two bits of a code are in a separate plane. `zero` is the middle of the range of codes; subtracting
    it makes the offsets small, so that they lose few bits in bf16.
    """

    bits: int
    high: bool
    group: int
    zero: int
    minima: bool
    block: int  # weights per block
    block_bytes: int
    unpack: Callable[[Tensor], UnpackedBlocks]

    @property
    def planes(self) -> int:
        return _WORD_BITS // self.bits

    @property
    def step(self) -> int:
        """How many inputs have their codes in one word."""
        return self.planes * self.group


@dataclass(frozen=True, slots=True)
class QuantPlanes:
    """A packed weight [outputs, inputs]: ((code - zero) * scale * 2^-133 + offset) * unit, scale and offset in bf16."""

    kind: BlockKind
    outputs: int
    inputs: int
    words: Tensor  # int16 [tiles, steps, 64, group]
    high: Tensor | None  # int16 [tiles, steps / 2, 64, group]: a word has the planes of two steps
    scales: Tensor  # [tiles, steps, 64] int64 or int32: each integer holds the scales of all planes
    offsets: Tensor | None
    unit: float

    @property
    def steps(self) -> int:
        return self.words.shape[1]

    @property
    def tiles(self) -> int:
        return self.words.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in (self.words, self.high, self.scales, self.offsets) if plane is not None)


def _halves(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Splits bytes into low nibbles and then high ones, along a new dimension before the last."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _unpack_q8_0(blocks: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(blocks[..., 2:].flatten(1) ^ 128, _halves(blocks[..., :2]).flatten(1), None)


def _unpack_q4_0(blocks: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(blocks[..., 2:]).flatten(1), _halves(blocks[..., :2]).flatten(1), None)


def _unpack_q4_1(blocks: Tensor) -> UnpackedBlocks:
    scales, minima = _halves(blocks[..., :2]), -_halves(blocks[..., 2:4])
    return UnpackedBlocks(_nibbles(blocks[..., 4:]).flatten(1), scales.flatten(1), minima.flatten(1))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Reads the eight scales and minima in the head of a Q4_K or Q5_K block [rows, blocks, 16 bytes and more]."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=-1).float()
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=-1).float()
    return (scales * _halves(blocks[..., :2])).flatten(1), (minima * _halves(blocks[..., 2:4])).flatten(1)


def _unpack_q4_k(blocks: Tensor) -> UnpackedBlocks:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return UnpackedBlocks(codes.flatten(1), *_six_bit_scales(blocks))


def _unpack_q5_k(blocks: Tensor) -> UnpackedBlocks:
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2)
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[..., None, 16:48] >> places) & 1
    return UnpackedBlocks((codes | fifth << 4).flatten(1), *_six_bit_scales(blocks))


def _unpack_q6_k(blocks: Tensor) -> UnpackedBlocks:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (2, 32)).flatten(-3, -2)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places) & 3
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _halves(blocks[..., 208:210])
    return UnpackedBlocks((low | high << 4).flatten(1), scales.flatten(1), None)


KINDS: dict[str, BlockKind] = {
    "Q8_0": BlockKind(8, False, 32, 128, False, 32, 34, _unpack_q8_0),
    "Q4_0": BlockKind(4, False, 32, 8, False, 32, 18, _unpack_q4_0),
    "Q4_1": BlockKind(4, False, 32, 8, True, 32, 20, _unpack_q4_1),
    "Q4_K": BlockKind(4, False, 32, 8, True, 256, 144, _unpack_q4_k),
    "Q5_K": BlockKind(4, True, 32, 16, True, 256, 176, _unpack_q5_k),
    "Q6_K": BlockKind(4, True, 16, 32, False, 256, 210, _unpack_q6_k),
}


def unpacked(raw: Tensor, kind: BlockKind) -> UnpackedBlocks:
    """Unpacks the blocks of contiguous rows of bytes [rows, bytes]."""
    return kind.unpack(raw.unflatten(1, (-1, kind.block_bytes)))


def dequantised(raw: Tensor, kind: BlockKind) -> Tensor:
    """Returns the weights of rows of bytes in fp32."""
    blocks = unpacked(raw, kind)
    codes, scales = blocks.codes.float().unflatten(1, (-1, kind.group)), blocks.scales[..., None]
    if blocks.minima is None:
        return ((codes - kind.zero) * scales).flatten(1)
    return (codes * scales - blocks.minima[..., None]).flatten(1)


def pieces(stored: Sequence[RawRows], inputs: int, device: torch.device) -> Iterator[Tensor]:
    """Yields rows of bytes on the device, as many at a time as may be unpacked at once."""
    rows = max(TILE_ROWS, _PIECE_ELEMENTS // inputs // TILE_ROWS * TILE_ROWS)
    for raw in stored:
        for start in range(0, raw.shape[0], rows):
            yield torch.from_numpy(raw[start : start + rows].copy()).to(device)


def pack(stored: Sequence[RawRows], kind: BlockKind, inputs: int, device: torch.device) -> QuantPlanes:
    """Packs tensors of a file one below the other; all but the last must have a multiple of 64 rows."""
    outputs = sum(raw.shape[0] for raw in stored)
    tiles, steps = -(-outputs // TILE_ROWS), -(-inputs // kind.step)
    words = torch.empty(tiles, steps, TILE_ROWS, kind.group, dtype=torch.int16, device=device)
    high = words.new_empty(tiles, steps // 2, TILE_ROWS, kind.group) if kind.high else None
    scales = torch.empty(tiles, steps, TILE_ROWS, kind.planes, device=device)
    offsets = torch.empty_like(scales) if kind.minima else None
    tile = 0
    for raw in pieces(stored, inputs, device):
        blocks = unpacked(raw, kind)
        until = tile + -(-raw.shape[0] // TILE_ROWS)
        codes = _tiled(blocks.codes, steps, kind.step).unflatten(-1, (kind.planes, kind.group))
        words[tile:until] = _joined(codes & (1 << kind.bits) - 1, kind.bits).to(torch.int16)
        if high is not None:
            pairs = (codes >> 4).unflatten(1, (-1, 2)).transpose(2, 3).flatten(3, 4)
            high[tile:until] = _joined(pairs, 2).to(torch.int16)
        scales[tile:until] = _tiled(blocks.scales, steps, kind.planes)
        if offsets is not None and blocks.minima is not None:
            offsets[tile:until] = _tiled(kind.zero * blocks.scales - blocks.minima, steps, kind.planes)
        tile = until
    unit = _unit(scales)
    packed = _side_by_side(scales / unit * _CODE_FACTORS[0] * _CODE_FACTORS[1])
    return QuantPlanes(
        kind, outputs, inputs, words, high, packed, None if offsets is None else _side_by_side(offsets / unit), unit
    )


def _side_by_side(numbers: Tensor) -> Tensor:
    """Packs the numbers of all planes [..., planes] as bf16 into one integer each [...]."""
    wide = torch.int64 if numbers.shape[-1] == 4 else torch.int32
    return numbers.to(torch.bfloat16).view(wide).squeeze(-1)


def _tiled(numbers: Tensor, steps: int, each: int) -> Tensor:
    """Reshapes [rows, n] to [tiles, steps, 64, each], filled up with zeros."""
    rows, count = numbers.shape
    padded = F.pad(numbers, (0, steps * each - count, 0, -rows % TILE_ROWS))
    return padded.view(-1, TILE_ROWS, steps, each).transpose(1, 2)


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Packs the codes of planes [..., planes, group] side by side into integers [..., group]."""
    word = codes[..., 0, :].to(torch.int32)
    for plane in range(1, codes.shape[-2]):
        word |= codes[..., plane, :].to(torch.int32) << (bits * plane)
    return word


def _unit(scales: Tensor) -> float:
    """Returns the power of two by which scales are divided, so that the largest one has the exponent _TOP_EXPONENT."""
    top = float(scales.abs().max())
    if not math.isfinite(top) or top == 0.0:
        return 1.0
    return 2.0 ** max(-126, math.frexp(top)[1] - _TOP_EXPONENT)


def unpacked_planes(planes: QuantPlanes) -> Tensor:
    """Returns the weights [outputs, inputs] of packed planes in plain torch, rounded as kernels round them."""
    kind = planes.kind
    shifts = torch.arange(kind.planes, dtype=torch.int32, device=planes.words.device)[:, None]
    codes = (planes.words.to(torch.int32)[..., None, :] >> (kind.bits * shifts)) & (1 << kind.bits) - 1
    if planes.high is not None:
        crumbs = torch.arange(2 * kind.planes, dtype=torch.int32, device=planes.words.device)[:, None]
        high = (planes.high.to(torch.int32)[..., None, :] >> (2 * crumbs)) & 3
        codes = codes | high.unflatten(-2, (2, kind.planes)).transpose(2, 3).flatten(1, 2) << 4
    scales = _plane_numbers(planes.scales) / _CODE_FACTORS[0] / _CODE_FACTORS[1]
    numbers = (codes - kind.zero).float() * scales
    if planes.offsets is not None:
        numbers = numbers + _plane_numbers(planes.offsets)
    rounded = numbers.to(torch.bfloat16).float() * planes.unit
    rows = rounded.flatten(-2).transpose(1, 2).flatten(2).flatten(0, 1)
    return rows[: planes.outputs, : planes.inputs].contiguous()


def _plane_numbers(wide: Tensor) -> Tensor:
    """Unpacks bf16 numbers from integers [...] to fp32 [..., planes, 1]."""
    return wide.unsqueeze(-1).view(torch.bfloat16).float().unsqueeze(-1)
