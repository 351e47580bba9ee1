"""Checks paged attention on a GPU against torch in fp64, checks that rows do not depend on others, and times it.

python scripts/gpu/checks_attention.py [--tune]   # on the GPU; --tune also tries other splits
python scripts/gpu/checks_attention.py --tiny     # on a CPU under Triton's interpreter: finds typos, times nothing
"""

# mypy: disable-error-code="call-overload, unused-ignore"

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from checks_elementwise import COPY_GB_S, SHAPES, Shape, median_us
from torch import Tensor

from slipstream.kernels.gpu import paged_attention as attention
from slipstream.kernels.gpu.device_rows import DeviceRows, Kind
from slipstream.kernels.gpu.paged_attention import AttentionScratch, paged_attention, paged_attention_reference

# Head shapes of other families: a number per key head that is no power of two, and heads twice and four times as wide.
WIDE = (
    Shape("qwen3.6-27b", 0, 24, 4, 256, 0, 0),
    Shape("qwen3.6-35b", 0, 16, 2, 256, 0, 0),
    Shape("laguna", 0, 48, 8, 128, 0, 0),
    Shape("gemma4-31b", 0, 32, 4, 512, 0, 0),
)
TINY = (Shape("tiny", 0, 2, 1, 16, 0, 0), Shape("tiny-wide", 0, 3, 1, 256, 0, 0))
L2_BYTES = 100e6  # bytes that must lie between two uses of the same memory; more than an H200's L2 cache holds


@dataclass
class World:
    """The pools of one layer, or of several layers that are timed in turn, and the rows that read them."""

    rows: DeviceRows
    queries: Tensor
    keys: Tensor  # [layers, pages, kv heads, page tokens, dim]
    values: Tensor

    def scratch(self) -> AttentionScratch:
        count, heads, dim = self.queries.shape
        scratch = AttentionScratch.empty(count, heads, self.keys.shape[2], dim, self.keys.device)
        scratch.sums.fill_(float("nan"))
        scratch.stats.fill_(float("nan"))
        return scratch

    def attend(self, window: int = 0) -> tuple[Tensor, Tensor]:
        """The result, and the bits of the partial sums, because rounding to bf16 would hide most differences."""
        count, heads, dim = self.queries.shape
        out = torch.full((count, heads * dim), float("nan"), dtype=torch.bfloat16, device=self.keys.device)
        scratch = self.scratch()
        paged_attention(self.queries, self.keys[0], self.values[0], self.rows, dim**-0.5, window, out, scratch)
        kv_heads = self.keys.shape[2]
        return out, scratch.by_row(self.rows.sequences, kv_heads, heads // kv_heads, dim).view(torch.int32)


def make_world(
    shape: Shape,
    kind: Kind,
    bases: Sequence[int],
    each: int,
    page: int,
    device: torch.device,
    layers: int = 1,
    branching: int = 4,
    unused: int = 0,
) -> World:
    """Random keys in shuffled pages; a tree's row is a child of one of the `branching` rows before it."""
    held = [-(-(base + each) // page) for base in bases]
    rows = DeviceRows.empty(kind, len(bases), each, max(held), device)
    order = torch.randperm(sum(held), device=device).int() + 1  # page 0 belongs to no sequence
    for sequence, pages in enumerate(order.split(held)):
        rows.pages[sequence, : len(pages)] = pages
    paths: list[list[int]] = [[0]]
    for row in range(1, each):
        parent = row - 1 if kind != "tree" else random.randrange(max(0, row - branching), row)
        if kind == "tree" and len(paths[parent]) > attention.DEEPEST_ROW:
            parent = 0  # no drafter proposes more tokens at a time
        paths.append([0] if row >= each - unused else [*paths[parent], row])
    depth = torch.tensor([len(path) - 1 for path in paths], device=device)
    padded = torch.tensor([path + [0] * (rows.paths.shape[1] - len(path)) for path in paths if len(path) <= 64])
    rows.base.copy_(torch.tensor(bases))
    rows.positions[: rows.rows] = (rows.base[:, None] + depth).flatten()
    if len(padded) == each:
        rows.paths.copy_(padded.repeat(len(bases), 1))
    pool = layers, sum(held) + 1, shape.kv_heads, page, shape.dim
    make = {"device": device, "dtype": torch.bfloat16}
    return World(
        rows,
        torch.randn(rows.rows, shape.heads, shape.dim, **make),
        torch.randn(pool, **make),  # type: ignore[call-overload]
        torch.randn(pool, **make),  # type: ignore[call-overload]
    )


def plain_twins(world: World, page: int) -> World:
    """Every row of one sequence as a sequence of its own, with the keys that it sees copied into its own pages."""
    rows, device = world.rows, world.keys.device
    base, count = int(rows.base[0]), rows.rows
    positions = rows.positions[:count]
    pages = int(positions.max()) // page + 1
    position = torch.arange(pages * page, device=device)
    depth = (position - base).clamp(0, rows.paths.shape[1] - 1).expand(count, -1)
    slots = torch.where(position < base, position, base + rows.paths.long().gather(1, depth))
    slots = torch.where(position <= positions[:, None], slots, torch.zeros_like(slots))
    twin = DeviceRows.empty("chain", count, 1, pages, device)
    twin.base.copy_(positions)
    twin.positions[:count] = positions
    twin.pages.copy_(torch.randperm(count * pages, device=device).view(count, pages))
    pools = []
    for pool in (world.keys[0], world.values[0]):
        seen = pool[rows.pages[0].long()[slots // page], :, slots % page]  # [rows, keys, kv heads, dim]
        seen = seen.view(count * pages, page, *seen.shape[2:]).transpose(1, 2)
        copied = torch.empty(1, *seen.shape, dtype=seen.dtype, device=device)
        copied[0, twin.pages.flatten().long()] = seen
        pools.append(copied)
    return World(twin, world.queries, pools[0], pools[1])


def check_values(device: torch.device, shape: Shape, page: int, contexts: Sequence[int]) -> list[str]:
    wrong = []
    for context, window in itertools.product(contexts, (0, page + 7)):
        for kind, each in (("tree", page), ("chain", 4), ("chain", 4 * page), ("block", 16)):
            bases = [context] if each > page else [context, 3]
            world = make_world(shape, kind, bases, each, page, device)  # type: ignore[arg-type]
            found = world.attend(window)[0].double()
            expected = torch.full_like(found, float("nan"))
            paged_attention_reference(
                world.queries,
                world.keys[0],
                world.values[0],
                world.rows,
                shape.dim**-0.5,
                window,
                expected,
                None,
                torch.float64,
            )
            error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max()
            if not error < 8e-3:
                wrong.append(f"{shape.name} {kind} of {each} at {context}, window {window}: off by {error:.5f}")
    return wrong


def check_bits(device: torch.device, shape: Shape, page: int, sizes: Sequence[int]) -> list[str]:
    """Compares rows of trees and chains with the same rows decoded plainly, also where the split of pages changes."""
    wrong = []
    split_changes = ((attention.SLOTS - 2) * attention.LEAST_PAGES + 2) * page
    bases = (0, 5 * page - 3, 9 * page, split_changes - sizes[0] // 2)
    for base, each, window in itertools.product(bases, sizes, (0, 3 * page + 5)):
        if (each != sizes[0] and (window or shape != SHAPES[0])) or (shape in WIDE[1:] and window):
            continue  # every variant is compiled separately, which takes longer than running it
        for kind, unused in (("tree", 0), ("tree", each - 1), ("chain", 0), ("chain", each - 1)):
            world = make_world(shape, kind, [base], each, page, device, branching=2, unused=unused)  # type: ignore[arg-type]
            alone = plain_twins(world, page).attend(window)
            among = world.attend(window)
            alike = (among[0] == alone[0]).all(1) & (among[1] == alone[1]).flatten(1).all(1)
            if not alike.all():
                rows = (~alike).nonzero().flatten().tolist()
                wrong.append(f"{shape.name} {kind} of {each} at {base}, window {window}: other bits in rows {rows[:8]}")
    return wrong


def check_shape(shape: Shape, page: int = 64, contexts: Sequence[int] = (100, 1000, 4097),
                sizes: Sequence[int] = (16, 32, 64)) -> list[str]:  # fmt: skip
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device("cpu" if shape in TINY else "cuda")
    return check_values(device, shape, page, contexts) + check_bits(device, shape, page, sizes)


def time_case(
    shape: Shape, kind: Kind, sequences: int, each: int, context: int, page: int, device: torch.device
) -> tuple[float, float]:
    """Microseconds per layer, and the microseconds of reading the keys and values once."""
    layer_bytes = sequences * context * shape.kv_heads * shape.dim * 4
    layers = 2 if device.type == "cpu" else max(2, min(256, int(2 * L2_BYTES / layer_bytes)))
    world = make_world(shape, kind, [context] * sequences, each, page, device, layers)
    scratch, scale = world.scratch(), shape.dim**-0.5
    out = torch.empty(world.rows.rows, shape.heads * shape.dim, dtype=torch.bfloat16, device=device)
    launches = [
        lambda k=k, v=v: paged_attention(world.queries, k, v, world.rows, scale, 0, out, scratch)
        for k, v in zip(world.keys, world.values, strict=True)
    ]
    return median_us(launches), layer_bytes / COPY_GB_S / 1e3


CASES: tuple[tuple[Kind, int, int, int], ...] = (
    ("chain", 1, 1, 1024),
    ("chain", 1, 16, 1024),
    ("tree", 1, 16, 1024),
    ("tree", 1, 32, 1024),
    ("tree", 1, 64, 1024),
    ("block", 1, 16, 1024),
    ("tree", 1, 16, 8192),
    ("chain", 1, 1, 32000),
    ("tree", 1, 16, 32000),
    ("tree", 1, 64, 32000),
    ("chain", 16, 1, 1024),
    ("chain", 64, 1, 1024),
    ("tree", 16, 16, 1024),
    ("chain", 1, 512, 512),
    ("chain", 1, 512, 8192),
)
TINY_CASES: tuple[tuple[Kind, int, int, int], ...] = (("tree", 1, 4, 40), ("chain", 2, 1, 40), ("chain", 1, 40, 20))


def time_table(device: torch.device, shapes: Sequence[Shape], page: int, tiny: bool) -> Iterator[str]:
    yield f"{'shape':<11} {'kind':<6} {'seqs':>4} {'each':>4} {'context':>7} {'us':>8} {'floor us':>9}"
    for shape, (kind, sequences, each, context) in itertools.product(shapes, TINY_CASES if tiny else CASES):
        if shape in WIDE and (sequences > 1 or each in (32, 512) or context > 8192):
            continue  # the other shapes cover what all of them have in common
        us, floor = time_case(shape, kind, sequences, each, context, page, device)
        yield f"{shape.name:<11} {kind:<6} {sequences:>4} {each:>4} {context:>7} {us:>8.2f} {floor:>9.2f}"


def tune(device: torch.device, shape: Shape, page: int, tiny: bool) -> list[str]:
    """Times the most important cases under other splits of the pages."""
    chosen = TINY_CASES[:2] if tiny else tuple(CASES[i] for i in (0, 2, 4, 7, 8, 11))
    names = "  ".join(f"{kind} {sequences}x{each}@{context}" for kind, sequences, each, context in chosen)
    lines = [f"slots least stages | us: {names}"]
    size = min(most for most in attention.TILINGS if most >= shape.dim)
    usual = attention.TILINGS[size]
    for slots, least, stages in ((16, 1, 3), (16, 2, 3), (32, 1, 3), (32, 2, 3), (32, 4, 3), (32, 2, 2), (16, 2, 4)):
        attention.SLOTS, attention.LEAST_PAGES = slots, least
        attention.TILINGS[size] = replace(usual, stages=stages)
        times = [time_case(shape, *case, page, device)[0] for case in chosen]
        lines.append(f"{slots:>5} {least:>5} {stages:>6} | " + "  ".join(f"{us:.2f}" for us in times))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU under Triton's interpreter")
    parser.add_argument("--only", choices=("checks", "times"))
    parser.add_argument("--tune", action="store_true", help="also time other splits of the pages")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    shapes, page = (TINY, 16) if args.tiny else ((*SHAPES, *WIDE), 64)
    wrong: list[str] = []
    if args.tiny:
        attention.SLOTS, attention.LEAST_PAGES = 4, 1
        wrong = [line for shape in shapes for line in check_shape(shape, page, (40,), (4,))]
    elif args.only != "times":
        with get_context("spawn").Pool(len(shapes)) as pool:  # in parallel, because compiling takes longest
            wrong = [line for lines in pool.map(check_shape, shapes, chunksize=1) for line in lines]
    if args.only != "times":
        print("\n".join(wrong) or "attention: all right, and every row has the bits it has alone", flush=True)
    if args.only != "checks":
        for line in time_table(device, shapes, page, args.tiny):
            print(line, flush=True)
    if args.tune:
        print("\n".join(tune(device, shapes[0], page, args.tiny)))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
