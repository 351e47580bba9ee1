"""Matrices of the GPU package under Triton's interpreter: blocks of every type, dense weights, tables, stacks."""

from __future__ import annotations

import sys
from functools import reduce

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import ConfigError, FormatError, IntegrityError
from slipstream.formats.quantise import encode_rows
from slipstream.formats.quants import GGML_TYPES, decode_rows
from slipstream.kernels.gpu import quant_kernels
from slipstream.kernels.gpu.matmul_plans import Launch
from slipstream.kernels.gpu.matrices import (
    FEW_INPUTS,
    FEW_OUTPUTS,
    GpuDense,
    GpuQuantised,
    GpuStacked,
    Scratch,
    make_gpu_matrix,
    matmul_reference,
    rows_agree,
)
from slipstream.kernels.gpu.packing import KINDS

CPU = torch.device("cpu")
BF16_ERROR = 8e-3  # the interpreter truncates where a GPU rounds, which doubles the error
EXACT_ERROR = 1e-5
PACKING_ERROR = 4.5e-3  # scales round to bf16, and so does every weight
# (outputs, inputs): a last tile that is not full; inputs that no step divides; inputs shared by several programs
SHAPES = {"Q8_0": (72, 512), "Q4_0": (72, 672), "Q4_1": (72, 160), "Q4_K": (72, 1024), "Q5_K": (72, 256),
          "Q6_K": (72, 512)}  # fmt: skip


class Stored:
    """Imitates a tensor of a file."""

    def __init__(self, values: Tensor, type_name: str) -> None:
        self.shape: tuple[int, ...] = tuple(values.shape)
        self.type_name = type_name
        self._raw = encode_rows(values.numpy(), type_name)
        self._raw.flags.writeable = False  # as the bytes of a mapped file are

    def dense(self) -> Tensor:
        return torch.from_numpy(decode_rows(self._raw, self.type_name))

    def raw(self) -> NDArray[np.uint8]:
        return self._raw


def stored(type_name: str, outputs: int, inputs: int, seed: int, size: float = 0.02) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(outputs, 1, generator=generator) + 0.5
    return Stored(torch.randn(outputs, inputs, generator=generator) * spread * size, type_name)


def some_rows(count: int, inputs: int, seed: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def error(result: Tensor, expected: Tensor) -> float:
    """The largest error of a row by the row's norm, per output."""
    worst = (result.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    return float(worst.max())


def quantised(source: Stored, dtype: torch.dtype = torch.float32) -> GpuQuantised:
    matrix = make_gpu_matrix([source], Scratch(CPU), result_dtype=dtype)
    assert isinstance(matrix, GpuQuantised)
    return matrix


@pytest.mark.parametrize("type_name", KINDS)
def test_packed_planes_hold_the_weights(type_name: str) -> None:
    source = stored(type_name, *SHAPES[type_name], seed=1)
    matrix = quantised(source)
    expected = source.dense()
    assert error(matrix.dense(), expected) < PACKING_ERROR


@pytest.mark.parametrize("type_name", KINDS)
def test_packing_takes_little_more_than_the_file(type_name: str) -> None:
    source = stored(type_name, 64, 1024, seed=1)
    assert source.raw().nbytes <= quantised(source).nbytes < 1.28 * source.raw().nbytes


@pytest.mark.parametrize("type_name", KINDS)
def test_product_of_blocks(type_name: str) -> None:
    source = stored(type_name, *SHAPES[type_name], seed=2)
    matrix = quantised(source)
    rows = some_rows(16, source.shape[1], seed=3)
    exact = rows.double() @ source.dense().double().t()
    out = poisoned(16, source.shape[0])
    assert error(matrix(rows, out), exact) < BF16_ERROR


@pytest.mark.parametrize("size", (1e-9, 1.0, 3e4))
def test_scales_far_from_one(size: float) -> None:
    source = stored("Q6_K", 64, 256, seed=4, size=size * 32)
    values = torch.from_numpy(decode_rows(source.raw(), "Q6_K"))
    assert error(quantised(source).dense(), values) < PACKING_ERROR


def test_tiles_and_row_counts_do_not_change_a_row() -> None:
    source = stored("Q4_K", 128, 1024, seed=5)
    matrix = quantised(source)
    assert matrix.plan.split > 1
    rows = some_rows(64, 1024, seed=6)
    alone = poisoned(16, 128)
    matrix.multiply_blocks(rows[:16], alone, Launch(64, 4, 2))
    for count, launch in ((32, Launch(128, 8, 2)), (64, Launch(64, 4, 2))):
        others = rows[:count].clone()
        others[16:] *= 100
        out = poisoned(count, 128)
        matrix.multiply_blocks(others, out, launch)
        assert torch.equal(out[:16], alone)


def test_parts_add_up_to_the_product() -> None:
    matrix = quantised(stored("Q4_K", 72, 1024, seed=5))
    rows = some_rows(64, 1024, seed=6)
    parts = matrix.in_parts(rows)
    assert parts.shape == (matrix.plan.split, 64, 72) and matrix.plan.split > 1
    assert torch.equal(reduce(torch.add, parts), matrix(rows))
    assert torch.equal(matrix.in_parts(rows[:16]), matrix(rows[:16]))


@pytest.mark.parametrize("shape", ((72, 1024), (576, 576), (40, 200)))
def test_dense_product_in_order(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 0.02).to(torch.bfloat16)
    matrix = GpuDense(weight, Scratch(CPU), torch.float32, fixed_order=True)
    rows = some_rows(32, inputs, seed=8)
    out = poisoned(32, outputs)
    assert matrix(rows, out) is out
    assert error(out, rows.double() @ weight.double().t()) < EXACT_ERROR
    assert torch.equal(matrix(rows[:16], poisoned(16, outputs)), out[:16])
    # tickets continue from where the last product left them
    assert torch.equal(matrix(rows, poisoned(32, outputs)), out)


@pytest.mark.parametrize("type_name", ("Q8_0", "Q5_K", "BF16"))
def test_rows_of_a_table(type_name: str) -> None:
    source = stored(type_name, 96, 256, seed=9)
    matrix = make_gpu_matrix([source], Scratch(CPU), result_dtype=torch.float32)
    ids = torch.tensor([95, 0, 64, 63, 0], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        out = poisoned(5, 256, dtype=dtype)
        matrix.embed_rows(ids, out)
        assert error(out, source.dense()[ids]) < BF16_ERROR


def test_types_are_stacked_behind_each_other() -> None:
    sources = [
        stored(name, outputs, 256, seed=outputs)
        for name, outputs in (("Q4_K", 64), ("Q4_K", 32), ("Q4_K", 64), ("Q6_K", 64), ("F16", 16), ("F32", 24))
    ]
    matrix = make_gpu_matrix(sources, Scratch(CPU))
    assert isinstance(matrix, GpuStacked)
    assert [part.out_features for part in matrix.parts] == [96, 64, 64, 40]
    kinds = [part.planes.kind if isinstance(part, GpuQuantised) else None for part in matrix.parts]
    assert kinds == [KINDS["Q4_K"], KINDS["Q4_K"], KINDS["Q6_K"], None]
    assert (matrix.out_features, matrix.in_features) == (264, 256)
    rows = some_rows(16, 256, seed=10)
    weight = torch.cat([source.dense() for source in sources])
    out = poisoned(16, 264, dtype=torch.bfloat16)
    assert error(matrix(rows, out), rows.double() @ weight.double().t()) < BF16_ERROR
    assert error(matmul_reference(matrix, rows), out) < BF16_ERROR


@pytest.mark.parametrize("type_name", ("Q4_1", "Q6_K"))
def test_a_prefill_goes_through_bf16_weights(type_name: str) -> None:
    source = stored(type_name, 72, 256, seed=11)
    scratch = Scratch(CPU, expanded_weights=50 * 256)  # two pieces
    matrix = make_gpu_matrix([source], scratch)
    assert scratch.dense.numel() == 50 * 256
    scratch.dense.fill_(torch.nan)
    rows = some_rows(70, 256, seed=12)
    out = matrix(rows, poisoned(70, 72, dtype=torch.bfloat16))
    assert error(out, rows.double() @ source.dense().double().t()) < BF16_ERROR
    assert error(scratch.dense[: 22 * 256].view(22, 256), matrix.dense()[50:]) < BF16_ERROR


def test_many_decoding_rows_are_multiplied_in_pieces() -> None:
    matrix = quantised(stored("Q4_0", 64, 128, seed=18))
    rows = some_rows(112, 128, seed=19)
    out = matrix(rows, poisoned(112, 64))
    for start in range(0, 112, 16):
        assert torch.equal(matrix(rows[start : start + 16], poisoned(16, 64)), out[start : start + 16])


def test_everything_can_be_dense() -> None:
    sources = [stored(name, 32, 256, seed=13) for name in ("Q8_0", "Q5_K", "F16", "Q5_0")]
    matrix = make_gpu_matrix(sources, Scratch(CPU), "bf16")
    assert isinstance(matrix, GpuDense)
    weight = torch.cat([source.dense() for source in sources])
    assert torch.equal(matrix.weight, weight.to(torch.bfloat16))


def test_what_is_refused() -> None:
    scratch = Scratch(CPU)
    source = stored("Q8_0", 64, 1024, seed=14)
    with pytest.raises(ConfigError):
        make_gpu_matrix([source], scratch, "int4")
    matrix = make_gpu_matrix([source], scratch)
    with pytest.raises(IntegrityError):
        matrix(some_rows(17, 1024, seed=15))
    scratch.seal()
    make_gpu_matrix([source], scratch)
    with pytest.raises(IntegrityError):
        make_gpu_matrix([stored("Q8_0", 128, 1024, seed=16)], scratch)


def test_a_library_that_sums_alike_is_used_for_large_weights() -> None:
    large = FEW_OUTPUTS + 1, FEW_INPUTS + 1
    weight = torch.zeros(large, dtype=torch.bfloat16)
    for shape in ((FEW_OUTPUTS, FEW_INPUTS + 1), (FEW_OUTPUTS + 1, FEW_INPUTS)):
        scratch = Scratch(CPU)
        scratch.agreements[*shape, torch.float32] = True
        assert GpuDense(weight[: shape[0], : shape[1]].contiguous(), scratch, torch.float32).fixed_order
    for agrees in (True, False):
        scratch = Scratch(CPU)
        scratch.agreements[*large, torch.float32] = agrees
        assert GpuDense(weight, scratch, torch.float32).fixed_order is not agrees


def test_whether_the_library_sums_alike_is_tried_once_for_each_shape() -> None:
    weight, scratch = some_rows(FEW_OUTPUTS + 1, FEW_INPUTS + 1, seed=17), Scratch(CPU)
    agrees = rows_agree(weight, torch.float32)
    assert GpuDense(weight, scratch, torch.float32).fixed_order is not agrees
    assert scratch.agreements == {(*weight.shape, torch.float32): agrees}


def test_type_numbers_are_ggmls() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert theirs == GGML_TYPES


def test_blocks_are_packed_without_the_gguf_package(monkeypatch: pytest.MonkeyPatch) -> None:
    source = stored("Q4_K", 64, 256, seed=20)
    expected = source.dense()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert error(quantised(source).dense(), expected) < PACKING_ERROR
    with pytest.raises(FormatError, match="gguf package"):
        source.dense()


class Registers:
    """Simulates the few PTX instructions that unpack weights, because the interpreter does not run them."""

    def __init__(self, inputs: dict[str, int]) -> None:
        self.values = dict(inputs)

    def run(self, assembly: str) -> int:
        for line in assembly.strip("{} \n").split(";"):
            operation, _, operands = line.strip().partition(" ")
            if operation and operation != ".reg":
                target, *sources = (name.strip() for name in operands.split(","))
                self.values[target] = getattr(self, operation.split(".")[0] + "_")(*map(self._value, sources))
        return self.values["$0"]

    def _value(self, name: str) -> int:
        return int(name, 0) if name[0].isdigit() else self.values[name]

    def shr_(self, value: int, by: int) -> int:
        return value >> by

    def shl_(self, value: int, by: int) -> int:
        return (value << by) & 0xFFFFFFFF

    def and_(self, a: int, b: int) -> int:
        return a & b

    def lop3_(self, a: int, b: int, c: int, table: int) -> int:
        bits = ((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))
        return sum(bits)

    def prmt_(self, a: int, b: int, selector: int) -> int:
        pair = (b << 32 | a).to_bytes(8, "little")
        return int.from_bytes(bytes(pair[selector >> 4 * i & 7] for i in range(4)), "little")

    def mul_(self, a: int, b: int) -> int:
        return register(brain_floats(a) * brain_floats(b))

    def sub_(self, a: int, b: int) -> int:
        return register(brain_floats(a) - brain_floats(b))

    def fma_(self, a: int, b: int, c: int) -> int:
        return register(brain_floats(a) * brain_floats(b) + brain_floats(c))


def brain_floats(register: int) -> Tensor:
    return torch.frombuffer(bytearray(register.to_bytes(4, "little")), dtype=torch.bfloat16).double()


def same_numbers(found: int, expected: Tensor) -> bool:
    return torch.equal(brain_floats(found), expected.to(torch.bfloat16).double())


def register(numbers: Tensor) -> int:
    numbers = numbers.to(torch.bfloat16) if numbers.is_floating_point() else numbers
    return int.from_bytes(numbers.view(torch.uint8).numpy().tobytes(), "little")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plane", range(4))
def test_assembly_makes_weights_of_codes(plane: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    words, high = torch.randint(-(2**15), 2**15, (2, 2), dtype=torch.int16, generator=generator)
    scales, offsets = torch.randn(2, 4, generator=generator).to(torch.bfloat16)
    scale, offset = scales[plane].double(), offsets[plane].double()
    selector = 0x1010 if plane % 2 == 0 else 0x3232
    stored_scales = register(scales[plane // 2 * 2 :][:2] * 2.0**120)
    lift = 16 if plane % 2 else 1
    pair = Registers({"$1": stored_scales, "$2": selector, "$3": quant_kernels.SIXTEENTH.value})
    lifted = pair.run(quant_kernels.PAIR_TIMES.value if plane % 2 else quant_kernels.PAIR.value)
    plain = pair.run(quant_kernels.PAIR.value)
    offset_pair = register(offsets[plane].repeat(2))

    nibbles = (words.int() >> 4 * plane & 15).double()
    given = {"$1": register(words), "$2": plane // 2 * 8, "$4": 15 * lift * 0x10001, "$6": lifted, "$8": offset_pair}
    found = Registers(given | {"$10": 8 * lift * 0x10001}).run(quant_kernels.CODES_WITH_OFFSETS.value)
    assert same_numbers(found, (nibbles - 8) * scale * 2.0**-13 + offset)

    six_bits = nibbles + 16 * (high.int() >> 2 * (4 + plane) & 3).double()
    minus = (quant_kernels.MINUS.value + 32 * 0x10001) & 0xFFFFFFFF
    less = Registers({"$1": stored_scales, "$2": selector, "$3": minus}).run(quant_kernels.PAIR_TIMES.value)
    given = {"$1": register(words), "$2": 4 * plane, "$4": 15 * 0x10001, "$6": plain, "$8": less}
    given |= {"$12": register(high), "$13": 0, "$15": 2 * (4 + plane) - 4}
    assert same_numbers(Registers(given).run(quant_kernels.HIGH_CODES.value), (six_bits - 32) * scale * 2.0**-13)
    low_crumb = plane % 2
    given |= {"$13": 4 - 2 * low_crumb, "$15": 0}
    six_bits = nibbles + 16 * (high.int() >> 2 * low_crumb & 3).double()
    assert same_numbers(Registers(given).run(quant_kernels.HIGH_CODES.value), (six_bits - 32) * scale * 2.0**-13)

    if plane < 2:
        signed = words.view(torch.int8)[plane::2].double()
        minus = (quant_kernels.MINUS.value + 128 * 0x10001) & 0xFFFFFFFF
        less = Registers({"$1": stored_scales, "$2": selector, "$3": minus}).run(quant_kernels.PAIR_TIMES.value)
        given = {"$1": register(words) ^ 0x80808080, "$2": 8 * plane, "$4": 255 * 0x10001, "$6": plain, "$8": less}
        assert same_numbers(Registers(given).run(quant_kernels.CODES.value), signed * scale * 2.0**-13)
