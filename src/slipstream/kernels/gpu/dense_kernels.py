"""Triton kernels for bf16 weights: products whose order of sums depends on the weight's shape only, and row lookups."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def combined(partial_ptr, ticket_ptr, out_ptr, out_stride, acc, unit, tile, split, outputs,  # type: ignore[no-untyped-def]
             ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, IN_PARTS: tl.constexpr):  # fmt: skip
    """Stores a tile's sums. If several programs share a tile, the last one to finish adds all parts in their order.

    With IN_PARTS each program stores its own part, [parts, rows, outputs], and the reader adds them.
    """
    local = tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    output = tile * TILE + local
    out = out_ptr + row[None, :] * out_stride + output[:, None]
    inside = (output < outputs)[:, None]
    if IN_PARTS:
        tl.store(out + split * ROWS * out_stride, acc * unit, mask=inside)
    elif SPLIT == 1:
        tl.store(out, (acc * unit).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        place = partial_ptr + (tile * SPLIT) * TILE * ROWS + local[:, None] * ROWS + row[None, :]
        tl.store(place + split * TILE * ROWS, acc, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have written their part before the ticket is taken
        # Tickets are never reset: SPLIT is a power of two, so the counter may wrap.
        ticket = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel")
        if (ticket & (SPLIT - 1)) == SPLIT - 1:
            total = tl.load(place, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                total += tl.load(place + other * TILE * ROWS, cache_modifier=".cg")
            tl.store(out, (total * unit).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dense_sums(weight_rows, x_rows, x_known, inputs, first, last, DEPTH: tl.constexpr, EVEN: tl.constexpr,  # type: ignore[no-untyped-def]
               SOME: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Sums [outputs, rows] over the steps from `first` to `last`, with the weights as the M side of every dot.

    Outputs and rows are given by their start addresses. With SOME, rows outside `x_known` count as zeros and are not
    read.
    """
    within = tl.arange(0, DEPTH)
    weight_at = weight_rows[:, None] + within[None, :]
    x_at = x_rows[None, :] + within[:, None]
    if EARLY:
        gdc_wait()  # nothing above reads or overwrites what the kernel before writes
    acc = tl.zeros((weight_rows.shape[0], x_rows.shape[0]), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * DEPTH
        if EVEN:
            weight = tl.load(weight_at + k, eviction_policy="evict_first")
            if SOME:
                x = tl.load(x_at + k, mask=x_known[None, :], other=0.0, eviction_policy="evict_last")
            else:
                x = tl.load(x_at + k, eviction_policy="evict_last")
        else:
            known = within < inputs - k
            read = known[:, None]
            if SOME:
                read = read & x_known[None, :]
            weight = tl.load(weight_at + k, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at + k, mask=read, other=0.0, eviction_policy="evict_last")
        if INTERPRETED:
            acc = tl.dot(weight.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(weight, x, acc)
    return acc


@triton.jit
def dense_matmul_kernel(weight_ptr, x_ptr, out_ptr, partial_ptr, ticket_ptr, x_stride, out_stride, outputs, inputs,  # type: ignore[no-untyped-def]
                        ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
                        EVEN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
                        INTERPRETED: tl.constexpr):  # fmt: skip
    """Computes out[row, output] = sum of x[row, k] * weight[output, k]."""
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * TILE + tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    # a last tile that is not full reads the last output again; that result is not stored
    weight_rows = weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64) * inputs
    steps = tl.cdiv(inputs, DEPTH)
    each = tl.cdiv(steps, SPLIT)
    first = split * each
    acc = dense_sums(weight_rows, x_ptr + row * x_stride, row, inputs, first, tl.minimum(first + each, steps), DEPTH,
                     EVEN, False, STAGES, EARLY, INTERPRETED)  # fmt: skip
    if EARLY:
        gdc_launch_dependents()  # any sooner, waiting programs of the next kernel would take the places of this one's
    combined(partial_ptr, ticket_ptr, out_ptr, out_stride, acc, 1.0, tile, split, outputs, ROWS, TILE, SPLIT, False)


@triton.jit
def gather_kernel(weight_ptr, ids_ptr, out_ptr, out_stride, inputs, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies one row of a table per program, in the type of `out`."""
    row = tl.program_id(0)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(ids_ptr + row).to(tl.int64)
    numbers = tl.load(weight_ptr + token * inputs + k, mask=k < inputs)
    tl.store(out_ptr + row * out_stride + k, numbers.to(out_ptr.dtype.element_ty), mask=k < inputs)
