"""Shared by the tests of native kernels: every instruction set that this machine can run, and made-up tensors."""

# mypy: disable-error-code="list-item, unused-ignore"

from __future__ import annotations

import functools
from dataclasses import dataclass

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from slipstream.formats.quants import decode_rows
from slipstream.kernels.cpu.native_library import Library, availability

QUANTISED = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
FLOATS = ("F16", "BF16", "F32")
# a value this many times a block's mean magnitude makes the block spiky; the same number as in matmul.cpp
_SPIKE = 12.0
# For each type: the places of the half-precision scales in a block.
_SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}


@functools.cache
def libraries() -> list[Library]:
    """The library once per instruction set, the plainest first; amx means avx512 with tiles."""
    found = availability().library
    if found is None:
        return []
    plain = [Library(found.handle, isa, False) for isa in ("avx2", found.isa)]
    return list(dict.fromkeys(plain))


def compiled(isa: str) -> Library:
    """The library with the kernels of one instruction set; it skips the test if this machine cannot run them."""
    found = availability().library
    if found is None:
        pytest.skip("no compiled kernels")
    if isa == "avx512" and not found.handle.slip_has_avx512():
        pytest.skip("no AVX-512")
    return Library(found.handle, isa, False)


def every_library() -> pytest.MarkDecorator:
    known = libraries() or [pytest.param(None, marks=pytest.mark.skip(reason="no compiled kernels"))]
    return pytest.mark.parametrize("library", known, ids=lambda each: each.isa if each else "none")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file would store it."""

    shape: tuple[int, int]
    type_name: str
    bytes: NDArray[np.uint8]

    def raw(self) -> NDArray[np.uint8]:
        return self.bytes

    def dense(self) -> torch.Tensor:
        return torch.from_numpy(decode_rows(self.bytes, self.type_name).reshape(self.shape))


def stored(type_name: str, outputs: int, inputs: int, seed: int = 0) -> Stored:
    """Random weights of any type: quantised from floats if there is a quantiser, and else random codes."""
    source = np.random.default_rng(seed)
    if type_name in _SCALES:
        kind = GGMLQuantizationType[type_name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = source.integers(0, 256, (outputs, inputs // elements, size), dtype=np.uint8)
        for place in _SCALES[type_name]:
            halves = (source.random((outputs, inputs // elements)) * 0.01).astype(np.float16)
            blocks[:, :, place : place + 2] = halves[..., None].view(np.uint8)
        return Stored((outputs, inputs), type_name, blocks.reshape(outputs, -1))
    values = source.standard_normal((outputs, inputs)).astype(np.float32)
    if type_name == "F32":
        return Stored((outputs, inputs), type_name, values.view(np.uint8))
    if type_name == "F16":
        return Stored((outputs, inputs), type_name, values.astype(np.float16).view(np.uint8))
    return Stored((outputs, inputs), type_name, gguf.quants.quantize(values, GGMLQuantizationType[type_name]))


def reference_product(rows: torch.Tensor, weight: torch.Tensor, float_rows: bool) -> torch.Tensor:
    """Computes in plain torch what `NativeMatrix` computes; `float_rows` says whether the weight is of a float type.

    If it is not, rows are rounded to int8 in blocks of 32 inputs.
    Blocks with a spike are rounded in two steps, because the spike alone would use up the 8 bits.
    """
    if not float_rows:
        blocks = rows.view(rows.shape[0], -1, 32)
        coarse = _rounded(blocks)
        spiky = blocks.abs().amax(dim=-1, keepdim=True) > _SPIKE * blocks.abs().mean(dim=-1, keepdim=True)
        rows = torch.where(spiky, coarse + _rounded(blocks - coarse), coarse).view_as(rows)
    return (rows.double() @ weight.double().t()).float()


def _rounded(blocks: torch.Tensor) -> torch.Tensor:
    top = blocks.abs().amax(dim=-1, keepdim=True)
    return torch.where(top > 0, blocks * (127.0 / top), 0.0).round() * (top / 127.0)


def gumbel_row(library: Library, seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """The compiled noise of all tokens at one position; the rankings compute it only where it can matter."""
    noise = np.empty(vocab_size, np.float32)
    library.function("slip_gumbel_row", "ulip")(seed, position, vocab_size, noise.ctypes.data)
    return noise
