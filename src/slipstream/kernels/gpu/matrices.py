"""Matrices on the GPU, dense or as a file's blocks: bf16 rows in, bf16 rows out (fp32 for an output head).

With 16, 32 or 64 rows a row's sum has one order, so the text of a step does not depend on the number of its rows. The
more numerous rows of a prefill go through cuBLAS, for which blocks are expanded to bf16.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from slipstream.config import WeightFormat
from slipstream.errors import ConfigError, IntegrityError
from slipstream.kernels.cpu.native_matrix import StoredTensor
from slipstream.kernels.gpu import matmul_plans as plans
from slipstream.kernels.gpu.dense_kernels import dense_matmul_kernel, gather_kernel
from slipstream.kernels.gpu.matmul_plans import ROW_COUNTS, Launch, ShapePlan
from slipstream.kernels.gpu.packing import KINDS, TILE_ROWS, QuantPlanes, dequantised, pack, pieces, unpacked_planes
from slipstream.kernels.gpu.quant_kernels import expand_kernel, quant_matmul_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EARLY = not INTERPRETED  # whether programs start while the kernel before them ends, and then wait for it
# With at most this many outputs or inputs, the kernel of this package is faster than cuBLAS, because it can begin while
# the kernel before it still runs.
FEW_OUTPUTS, FEW_INPUTS = 6144, 2048
_MOST_ROWS = ROW_COUNTS[-1]
_GATHER_WIDTH = 1024  # numbers of a row that a program copies
_EXPAND_ROWS = 16  # rows of blocks that a program expands
EXPANDED_WEIGHTS = 2**27  # weights expanded at a time: enough for every matrix of a layer, but not for an output head
_BLOCK_ROWS = 256  # up to this many rows, reading blocks again for every 64 rows costs less than expanding them to bf16
_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PROBES = 4  # random inputs on which cuBLAS must agree with itself


class Scratch:
    """Memory that all matrices of a model share, because they run one after another.

    Captured graphs contain its addresses, so it does not grow any more after `seal`. Blocks are expanded at most
    `expanded_weights` at a time, which bounds the memory for them.
    """

    def __init__(self, device: torch.device, expanded_weights: int = EXPANDED_WEIGHTS) -> None:
        self.device = device
        self.expanded_weights = expanded_weights
        self.partials = torch.empty(1, dtype=torch.float32, device=device)
        self.dense = torch.empty(1, dtype=torch.bfloat16, device=device)
        self.agreements: dict[tuple[int, int, torch.dtype], bool] = {}
        self._sealed = False

    def reserve(self, partials: int = 0, dense: int = 0) -> None:
        """Makes room for this many partial sums and expanded weights."""
        if self._sealed and (partials > self.partials.numel() or dense > self.dense.numel()):
            raise IntegrityError("a matrix needs more scratch memory than the captured graphs have")
        if partials > self.partials.numel():
            self.partials = torch.empty(partials, dtype=torch.float32, device=self.device)
        if dense > self.dense.numel():
            self.dense = torch.empty(dense, dtype=torch.bfloat16, device=self.device)

    def seal(self) -> None:
        self._sealed = True


class GpuMatrix(ABC):
    """A weight [out, in] on the device that is ready to multiply rows."""

    out_features: int
    in_features: int
    nbytes: int
    result_dtype: torch.dtype

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns rows @ weight^T for bf16 rows [n, in]; n is 16, 32, 64 or more."""
        count = rows.shape[0]
        if count not in ROW_COUNTS and count < _MOST_ROWS:
            raise IntegrityError(f"a product with {count} rows was requested; they must be padded to 16, 32 or 64")
        if out is None:
            out = torch.empty(count, self.out_features, dtype=self.result_dtype, device=rows.device)
        self.multiply(rows, out)
        return out

    def in_parts(self, rows: Tensor) -> Tensor:
        """Returns the product, or its fp32 parts [parts, n, out] if the kernel that reads them adds them up faster."""
        return self(rows)

    @abstractmethod
    def multiply(self, rows: Tensor, out: Tensor) -> None:
        """Writes rows @ weight^T into `out`, whose rows need not be contiguous."""

    @abstractmethod
    def embed_rows(self, ids: Tensor, out: Tensor) -> None:
        """Writes the weight's rows `ids` [n] into `out` [n, in], fp32 or bf16."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Returns the weights [out, in] that are multiplied, in fp32."""


class GpuDense(GpuMatrix):
    """bf16 weights. cuBLAS multiplies large ones if it sums 16, 32 and 64 rows alike; otherwise this package's kernel
    does.
    """

    def __init__(
        self, weight: Tensor, scratch: Scratch, result_dtype: torch.dtype = torch.bfloat16,
        fixed_order: bool | None = None,
    ) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        self.result_dtype = result_dtype
        self.plan = plans.dense_plan(self.out_features, self.in_features)
        self.scratch = scratch
        self._tickets = torch.zeros(-(-self.out_features // TILE_ROWS), dtype=torch.int32, device=weight.device)
        if fixed_order is None:
            small = self.out_features <= FEW_OUTPUTS or self.in_features <= FEW_INPUTS
            fixed_order = small or self._library_differs()
        self.fixed_order = fixed_order
        if fixed_order:
            scratch.reserve(partials=_partials(self._tickets.numel(), self.plan))

    def _library_differs(self) -> bool:
        """Whether cuBLAS sums a row of this shape in an order that depends on the other rows."""
        key = (self.out_features, self.in_features, self.result_dtype)
        if key not in self.scratch.agreements:
            self.scratch.agreements[key] = rows_agree(self.weight, self.result_dtype)
        return not self.scratch.agreements[key]

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        if self.fixed_order and rows.shape[0] <= _MOST_ROWS:
            launch = plans.dense_launch(self.out_features, self.plan.split, rows.shape[0])
            self.multiply_in_order(rows, out, launch)
        else:
            library_product(rows, self.weight, out)

    def multiply_in_order(self, rows: Tensor, out: Tensor, launch: Launch) -> None:
        """Runs the kernel that sums every row in the same order; the launch affects its speed only."""
        split, depth = self.plan.split, self.plan.depth
        dense_matmul_kernel[(triton.cdiv(self.out_features, launch.tile), split)](
            self.weight, rows, out, self.scratch.partials, self._tickets, rows.stride(0), out.stride(0),
            self.out_features, self.in_features, ROWS=rows.shape[0], TILE=launch.tile, DEPTH=depth, SPLIT=split,
            EVEN=self.in_features % depth == 0, STAGES=launch.stages, EARLY=EARLY, INTERPRETED=INTERPRETED,
            num_warps=launch.warps, maxnreg=launch.registers,
            launch_pdl=EARLY,
        )  # fmt: skip

    def embed_rows(self, ids: Tensor, out: Tensor) -> None:
        gather_kernel[(ids.shape[0], triton.cdiv(self.in_features, _GATHER_WIDTH))](
            self.weight, ids, out, out.stride(0), self.in_features, WIDTH=_GATHER_WIDTH
        )

    def dense(self) -> Tensor:
        return self.weight.float()


class GpuQuantised(GpuMatrix):
    """Blocks of one type, which are multiplied as they are; for a prefill they are expanded to bf16 in scratch memory.
    """

    def __init__(self, planes: QuantPlanes, scratch: Scratch, result_dtype: torch.dtype = torch.bfloat16) -> None:
        self.planes = planes
        self.out_features, self.in_features, self.nbytes = planes.outputs, planes.inputs, planes.nbytes
        self.result_dtype = result_dtype
        self.plan = plans.quant_plan(planes.kind, planes.tiles, planes.steps)
        self._scratch = scratch
        self._tickets = torch.zeros(planes.tiles, dtype=torch.int32, device=planes.words.device)
        kind = planes.kind
        self._constants = {
            "BITS": kind.bits, "HIGH": kind.high, "GROUP": kind.group, "ZERO": kind.zero, "OFFSETS": kind.minima,
        }
        # kernels need an address even for planes that a type does not have; they do not read it
        self._stored = tuple(
            planes.words if plane is None else plane
            for plane in (planes.words, planes.high, planes.scales, planes.offsets)
        )
        self._expanded_rows = min(self.out_features, max(1, scratch.expanded_weights // self.in_features))
        scratch.reserve(_partials(planes.tiles, self.plan), self._expanded_rows * self.in_features)

    def in_parts(self, rows: Tensor) -> Tensor:
        # With 64 rows the last program of a tile takes longer to add up the parts than the 64 readers do. With 16 rows
        # there are too few readers, and they are slower.
        planes, split = self.planes, self.plan.split
        if rows.shape[0] != _MOST_ROWS or split == 1:
            return self(rows)
        parts = torch.empty(split, _MOST_ROWS, self.out_features, dtype=torch.float32, device=rows.device)
        self.multiply_blocks(rows, parts, plans.quant_launch(planes.kind, planes.tiles, split, _MOST_ROWS))
        return parts

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        count, start = rows.shape[0], 0
        if count > _BLOCK_ROWS or count % ROW_COUNTS[0]:
            self._multiply_expanded(rows, out)
            return
        while start < count:
            size = max(size for size in ROW_COUNTS if size <= count - start)
            launch = plans.quant_launch(self.planes.kind, self.planes.tiles, self.plan.split, size)
            self.multiply_blocks(rows[start : start + size], out[start : start + size], launch)
            start += size

    def multiply_blocks(self, rows: Tensor, out: Tensor, launch: Launch) -> None:
        """Multiplies into `out` [n, out] or, in parts, [parts, n, out]; the launch affects the speed only."""
        planes, plan = self.planes, self.plan
        quant_matmul_kernel[(triton.cdiv(planes.outputs, launch.tile), plan.split)](
            *self._stored, rows, out, self._scratch.partials, self._tickets, rows.stride(0), out.stride(-2),
            planes.outputs, planes.inputs, planes.steps, planes.unit, **self._constants, ROWS=rows.shape[0],
            TILE=launch.tile, SPLIT=plan.split, UNROLL=plan.depth,
            EVEN=planes.inputs == planes.steps * planes.kind.step, STAGES=launch.stages,
            IN_PARTS=out.dim() == 3, EARLY=EARLY, INTERPRETED=INTERPRETED, num_warps=launch.warps,
            maxnreg=launch.registers, launch_pdl=EARLY,
        )  # fmt: skip

    def embed_rows(self, ids: Tensor, out: Tensor) -> None:
        self._expand(ids, 0, ids.shape[0], out, 1)

    def dense(self) -> Tensor:
        return unpacked_planes(self.planes)

    def _multiply_expanded(self, rows: Tensor, out: Tensor) -> None:
        for start in range(0, self.out_features, self._expanded_rows):
            count = min(self._expanded_rows, self.out_features - start)
            weight = self._scratch.dense[: count * self.in_features].view(count, self.in_features)
            self._expand(None, start, count, weight, _EXPAND_ROWS)
            library_product(rows, weight, out[:, start : start + count])

    def _expand(self, ids: Tensor | None, start: int, count: int, out: Tensor, each: int) -> None:
        expand_kernel[(triton.cdiv(count, each), triton.cdiv(self.planes.steps, 2))](
            *self._stored, self._tickets if ids is None else ids, out, out.stride(0), start, count, self.in_features,
            self.planes.steps, self.planes.unit, **self._constants, TILE=each, CHOSEN=ids is not None,
        )  # fmt: skip


class GpuStacked(GpuMatrix):
    """Parts of different types that read the same rows, with their outputs one after the other; each part is a launch.
    """

    def __init__(self, parts: Sequence[GpuMatrix]) -> None:
        self.parts = parts
        self.in_features, self.result_dtype = parts[0].in_features, parts[0].result_dtype
        self.out_features = sum(part.out_features for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        start = 0
        for part in self.parts:
            part.multiply(rows, out[:, start : start + part.out_features])
            start += part.out_features

    def embed_rows(self, ids: Tensor, out: Tensor) -> None:
        raise IntegrityError("token embeddings cannot be a stack of several tensors")

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])


def joined_in_order(parts: Sequence[GpuMatrix]) -> GpuMatrix:
    """Joins small matrices that read the same rows into one, with sums in fp32; if all are dense, it is one launch.

    The kernel of this package multiplies up to 64 rows, because cuBLAS has no equally fast one for an odd number of
    outputs.
    """
    dense = [part for part in parts if isinstance(part, GpuDense)]
    if len(dense) < len(parts):
        return parts[0] if len(parts) == 1 else GpuStacked(parts)
    weight = torch.cat([part.weight for part in dense]) if len(dense) > 1 else dense[0].weight
    return GpuDense(weight, dense[0].scratch, torch.float32, fixed_order=True)


def library_product(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiplies with cuBLAS, which is fastest and chooses its own order of sums."""
    if not rows.is_cuda:  # there is no cuBLAS under Triton's interpreter
        out.copy_(rows.float() @ weight.float().t())
    elif out.dtype == weight.dtype:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)


def rows_agree(weight: Tensor, result_dtype: torch.dtype) -> bool:
    """Whether cuBLAS gives 16 rows the same bits alone, as the last of 32 and as the last of 64."""
    outputs, inputs = weight.shape
    generator = torch.Generator(weight.device).manual_seed(outputs * 31 + inputs)
    for _ in range(_PROBES):
        rows = torch.randn(_MOST_ROWS, inputs, generator=generator, device=weight.device).to(weight.dtype)
        results = [torch.empty(count, outputs, dtype=result_dtype, device=weight.device) for count in ROW_COUNTS]
        for count, result in zip(ROW_COUNTS, results, strict=True):
            library_product(rows[-count:], weight, result)
        alone = results[0]
        if not all(torch.equal(alone, result[-len(alone) :]) for result in results[1:]):
            return False
    return True


def matmul_reference(matrix: GpuMatrix, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Computes what a matrix does, in plain torch and fp32."""
    result = rows.float() @ matrix.dense().t()
    return result.to(matrix.result_dtype) if out is None else out.copy_(result)


def make_gpu_matrix(
    sources: Sequence[StoredTensor], scratch: Scratch, weight_format: WeightFormat = "auto",
    result_dtype: torch.dtype = torch.bfloat16,
) -> GpuMatrix:
    """Builds one matrix from tensors stacked along the outputs, either as their file has them or all in bf16."""
    if weight_format not in ("auto", "native", "bf16"):
        raise ConfigError(f"weights cannot be {weight_format} on a GPU", "use --dtype auto or bf16")
    runs: list[list[StoredTensor]] = []
    kinds: list[str | None] = []
    for source in sources:
        kind = source.type_name if source.type_name in KINDS and weight_format != "bf16" else None
        # tiles of packed weights have 64 outputs, so a tensor can only be joined to one that fills its last tile
        if runs and kinds[-1] == kind and (kind is None or runs[-1][-1].shape[0] % TILE_ROWS == 0):
            runs[-1].append(source)
        else:
            runs.append([source])
            kinds.append(kind)
    parts: list[GpuMatrix] = []
    for kind, run in zip(kinds, runs, strict=True):
        if kind is None:
            parts.append(GpuDense(brain_floats(run, scratch.device), scratch, result_dtype))
        else:
            planes = pack([source.raw() for source in run], KINDS[kind], run[0].shape[1], scratch.device)
            parts.append(GpuQuantised(planes, scratch, result_dtype))
    return parts[0] if len(parts) == 1 else GpuStacked(parts)


def brain_floats(sources: Sequence[StoredTensor], device: torch.device) -> Tensor:
    """Returns the tensors in bf16 on the device, where they are converted piece by piece."""
    inputs = sources[0].shape[1]
    weight = torch.empty(sum(source.shape[0] for source in sources), inputs, dtype=torch.bfloat16, device=device)
    start = 0
    for source in sources:
        name = source.type_name
        if name not in _PLAIN_TYPES and name not in KINDS:
            weight[start : start + source.shape[0]] = source.dense().to(torch.bfloat16)
            start += source.shape[0]
            continue
        for raw in pieces([source.raw()], inputs, device):
            numbers = dequantised(raw, KINDS[name]) if name in KINDS else raw.view(_PLAIN_TYPES[name])
            weight[start : start + len(numbers)] = numbers
            start += len(numbers)
    return weight


def _partials(tiles: int, plan: ShapePlan) -> int:
    """Returns how many partial sums the programs of one product exchange; tiles of 128 outputs may need 64 more."""
    return 0 if plan.split == 1 else plan.split * (tiles + 1) * TILE_ROWS * _MOST_ROWS
