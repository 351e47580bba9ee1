"""Checks and times mixtures of experts on a GPU at real shapes.

python scripts/gpu/checks_experts.py                    checks, then times of every launch and of whole blocks
python scripts/gpu/checks_experts.py --variants         also other launches than the ones in plans.py
python scripts/gpu/checks_experts.py --tiny             the same code at tiny sizes under Triton's interpreter
"""

# mypy: disable-error-code="func-returns-value, arg-type, unused-ignore"

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from checks_matmul import milliseconds
from shapes import LAGUNA_XS_2, QWEN3_6_35B_A3B, RandomMatrices, RandomWeights
from torch import Tensor

from slipstream.kernels.gpu import expert_mixture as launchers
from slipstream.kernels.gpu.device_rows import LEAST_ROWS, DeviceRows
from slipstream.kernels.gpu.expert_mixture import ExpertStack, Gate, Mixture, Routing, RoutingRule
from slipstream.kernels.gpu.kernel_set import gpu_kernels
from slipstream.kernels.gpu.matmul_plans import Launch
from slipstream.kernels.gpu.matrices import GpuMatrix, Scratch, joined_in_order
from slipstream.kernels.gpu.packing import KINDS
from slipstream.models.gpu.device_experts import DeviceExpertBlock, DeviceExperts
from slipstream.models.moe import MoeShape, load_expert_block, load_experts

SCRATCH_PLACE = 10_000
PRODUCT_ERROR = 3e-2 if "--tiny" in sys.argv else 1e-2  # the interpreter truncates where a GPU rounds
ROW_COUNTS = (1, 16, 64)
PREFILL = 512
assert QWEN3_6_35B_A3B.moe is not None
SHAPES = {
    "Qwen3.6-35B-A3B": QWEN3_6_35B_A3B.moe,
    "Qwen3-30B-A3B": MoeShape(2048, 128, 8, 768),
    "Laguna-XS.2": LAGUNA_XS_2.moe,
    "Gemma4-26B-A4B": MoeShape(2816, 128, 8, 704),
}
TINY_SHAPES = {
    "gated": MoeShape(64, 6, 2, 64, shared_size=64, shared_gate=True),
    "plain": MoeShape(256, 5, 3, 64, "sigmoid"),
}
VARIANTS = (
    Launch(64, 4, 2),
    Launch(64, 4, 3),
    Launch(64, 4, 4),
    Launch(64, 4, 6),
    Launch(64, 8, 4),
    Launch(128, 4, 3),
    Launch(128, 8, 3),
    Launch(128, 8, 4),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One shape in one format, with random weights."""

    label: str
    shape: MoeShape
    rule: RoutingRule
    gate: Gate
    gate_up: ExpertStack
    down: ExpertStack

    @property
    def touched_bytes(self) -> int:
        """The bytes of one expert."""
        return (self.gate_up.nbytes + self.down.nbytes) // self.gate_up.experts


def make_case(name: str, shape: MoeShape, kind: str, scratch: Scratch) -> Case:
    joined = shape.shared_size == shape.intermediate_size
    count, inner, hidden = shape.experts + joined, shape.intermediate_size, shape.hidden_size
    rule = RoutingRule(
        shape.experts,
        shape.active,
        shape.scores == "sigmoid",
        shape.renormalise,
        shape.scale,
        shape.router_softcap,
        joined,
        joined and shape.shared_gate,
        joined,
    )
    matrices = RandomMatrices(scratch, kind)
    return Case(
        f"{name} {kind}",
        shape,
        rule,
        "gelu" if name.startswith("Gemma") else "silu",
        matrices.experts([[(inner, hidden)] * 2] * count),
        matrices.experts([[(hidden, inner)]] * count),
    )


def fits(shape: MoeShape, kind: str) -> bool:
    """Whether a file can store these experts as such blocks."""
    block = KINDS[kind].block if kind in KINDS else 1
    return shape.hidden_size % block == 0 and shape.intermediate_size % block == 0


def some_places(rows: int, device: torch.device, unused: Sequence[int] = ()) -> Tensor:
    places = torch.arange(max(rows, LEAST_ROWS), dtype=torch.int32)
    places[rows:] = SCRATCH_PLACE
    places[list(unused)] = SCRATCH_PLACE
    return places.to(device)


def routed(case: Case, logits: Tensor, places: Tensor, rows: int, reference: bool = False) -> Routing:
    """A routing whose memory was poisoned before."""
    out = Routing.empty(case.rule, rows, case.rule.new_counts(logits.device))
    for tensor in (out.shares, out.experts, out.lists, out.tiles):
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
    launch = launchers.route_reference if reference else launchers.route
    launch(logits[None], None, None, places, SCRATCH_PLACE, out)
    return out


def touched_by(routing: Routing) -> int:
    """How many experts at least one row chose."""
    return len(set(routing.experts.flatten().tolist()) - {-1})


def lists_of(routing: Routing) -> tuple[list[int], list[Tensor]]:
    """The tiles and the row-expert pairs of every expert, each in order."""
    counts, total = routing.counts[:-1].tolist(), int(routing.counts[-1])
    pairs = [own[:count].sort().values for own, count in zip(routing.lists, counts, strict=True)]
    return sorted(routing.tiles[:total].tolist()), pairs


def mixed(case: Case, x: Tensor, logits: Tensor, places: Tensor, rows: int, reference: bool = False) -> Tensor:
    """Runs the whole mixture, with outputs poisoned before each launch."""
    routing = routed(case, logits, places, rows, reference)
    pairs, nan = routing.most_pairs, torch.nan
    inner = torch.full((pairs, case.down.inputs), nan, dtype=torch.bfloat16, device=x.device)
    answers = torch.full((pairs, case.down.outputs), nan, device=x.device)
    out = torch.full((x.shape[0], case.down.outputs), nan, dtype=torch.bfloat16, device=x.device)
    if reference:
        launchers.expert_gate_up_reference(case.gate_up, x, routing, case.gate, inner)
        launchers.expert_down_reference(case.down, inner, routing, answers)
        launchers.combine_reference(Mixture(answers, routing, None, places, SCRATCH_PLACE), out)
    else:
        launchers.expert_gate_up(case.gate_up, x, routing, case.gate, inner)
        launchers.expert_down(case.down, inner, routing, answers)
        launchers.combine(Mixture(answers, routing, None, places, SCRATCH_PLACE), out)
    assert not routing.counts.any(), "the sum leaves counts at zero"
    return out


def check(case: Case, device: torch.device, most: int) -> Iterator[str]:
    """Yields the faults of one case: routing, values, rows that depend on others, rows with NaN."""
    width = case.rule.experts + case.rule.gated
    x = torch.randn(most, case.shape.hidden_size, device=device).to(torch.bfloat16)
    logits = torch.randn(most, width, device=device)
    logits[5] = logits[5].round()  # makes many scores equal
    for rows in sorted({1, 16, most}):
        places = some_places(rows, device, (3,) if rows > 3 else ())
        ours, twin = (routed(case, logits, places, rows, reference) for reference in (False, True))
        if not torch.equal(ours.experts, twin.experts):
            yield f"{case.label}: {rows} rows are routed otherwise than by the twin"
            continue
        if rows > 1:
            (tiles, lists), (true_tiles, true_lists) = lists_of(ours), lists_of(twin)
            if tiles != true_tiles or not all(map(torch.equal, lists, true_lists)):
                yield f"{case.label}: {rows} rows are grouped otherwise than by the twin"
        padded = max(rows, LEAST_ROWS)
        found, truth = (mixed(case, x[:padded], logits, places, rows, which) for which in (False, True))
        counting = (torch.arange(padded, device=device) < rows) & (places < SCRATCH_PLACE)
        error = (found.double() - truth.double())[counting].norm(dim=1) / truth.double()[counting].norm(dim=1)
        print(f"  {case.label}: error {float(error.max()):.1e} at {rows} rows")
        if not float(error.max()) < PRODUCT_ERROR:
            yield f"{case.label}: error {float(error.max()):.1e} at {rows} rows"
        if found[~counting].any():
            yield f"{case.label}: rows that do not count are not zero"
    alone = mixed(case, x[:16], logits[:16], some_places(16, device), 16)
    for row in range(3):
        only = mixed(case, x[row : row + 16], logits[row : row + 16], some_places(1, device), 1)
        if not torch.equal(only[0], alone[row]):
            yield f"{case.label}: row {row} is another one alone than among 16"
    for rows in (32, 64) if most >= 64 else (32,):
        strange, other = x[:rows].clone(), logits[:rows].clone()
        strange[16:] *= 1000
        strange[20], other[20] = torch.nan, torch.nan
        for turn in range(2):
            strange, other = strange.roll(8 * turn, 0), other.roll(8 * turn, 0)
            found = mixed(case, strange, other, some_places(rows, device, (rows - 1,)), rows)
            if not torch.equal(found[8 * turn : 8 * turn + 16], alone):
                yield f"{case.label}: rows change among {rows}, {8 * turn} rows further on"
            if not found[20 + 8 * turn].isnan().all():
                yield f"{case.label}: a row that is no number gives numbers"


def router_of(case: Case, device: torch.device) -> GpuMatrix:
    size = case.rule.experts + case.rule.gated, case.shape.hidden_size
    return joined_in_order([RandomMatrices(Scratch(device), "bf16").matrix([size])])


def check_scores(case: Case, device: torch.device) -> Iterator[str]:
    """Yields the faults of a router's product: values, and rows that depend on the number of rows."""
    router, x = router_of(case, device), torch.randn(64, case.shape.hidden_size, device=device).to(torch.bfloat16)
    found = {}
    for rows in (16, 32, 64):
        found[rows], truth = (launchers.new_scores(router, rows, device).fill_(torch.nan) for _ in range(2))
        launchers.score(router, x[:rows], found[rows])
        launchers.score_reference(router, x[:rows], truth)
        error = (found[rows].sum(dim=0) - truth.sum(dim=0)).norm() / truth.sum(dim=0).norm()
        if not float(error) < PRODUCT_ERROR:
            yield f"{case.label}: scores of {rows} rows are off by {float(error):.1e}"
        if not torch.equal(found[rows][:, :16], found[16]):
            yield f"{case.label}: scores change among {rows} rows"


def launches(case: Case, rows: int, device: torch.device) -> tuple[dict[str, Callable[[int], object]], int]:
    """The launches of a step of `rows` rows, and how many experts it touches."""
    padded = max(rows, LEAST_ROWS)
    x = torch.randn(padded, case.shape.hidden_size, device=device).to(torch.bfloat16)
    # Every call gets other rows, because experts that stay in the L2 cache would cost nothing.
    logits = [torch.randn(padded, case.rule.experts + case.rule.gated, device=device) for _ in range(16)]
    places = some_places(rows, device)
    routings = [routed(case, each, places, rows) for each in logits]
    touched = sum(map(touched_by, routings)) // len(routings)
    pairs = routings[0].most_pairs
    inner = torch.randn(pairs, case.down.inputs, device=device).to(torch.bfloat16)
    answers = torch.randn(pairs, case.down.outputs, device=device)
    out = torch.empty(padded, case.down.outputs, dtype=torch.bfloat16, device=device)
    stream, norm = torch.zeros(padded, case.down.outputs, device=device), torch.ones(case.down.outputs, device=device)
    # These lists and counts are not read by any product; they are in parts, as a router's product leaves them.
    spare = Routing.empty(case.rule, rows, case.rule.new_counts(device))
    spare_mixture = Mixture(answers, spare, None, places, SCRATCH_PLACE)
    router = router_of(case, device)
    parts = launchers.new_scores(router, padded, device).zero_()
    return {
        "score": lambda i: launchers.score(router, x, parts),
        "route+sum": lambda i: (
            launchers.route(parts, None, None, places, SCRATCH_PLACE, spare),
            launchers.combine(spare_mixture, out),
        ),
        "gate_up": lambda i: launchers.expert_gate_up(case.gate_up, x, routings[i % 16], case.gate, inner),
        "down": lambda i: launchers.expert_down(case.down, inner, routings[i % 16], answers),
        "combine": lambda i: launchers.combine(spare_mixture, out),
        "sum+norm": lambda i: launchers.combine_norm(stream, spare_mixture, norm, 1e-6, out),
    }, touched


def time_case(case: Case, rows: int, device: torch.device, variants: Sequence[Launch]) -> Iterator[dict[str, object]]:
    calls, touched = launches(case, rows, device)
    for name, call in calls.items():
        stack = {"gate_up": case.gate_up, "down": case.down}.get(name)
        usual = stack.launches[rows == 1] if stack is not None else None
        for launch in [usual, *variants] if stack is not None else [None]:
            if stack is not None and launch is not None:
                stack.launches[rows == 1] = launch
            try:
                us = milliseconds(call, 16, device) * 1e3
            except Exception as problem:  # a launch may need more memory than a multiprocessor has
                print(f"  {case.label} {name} {rows} {launch}: {str(problem)[:90]}")
                continue
            moved = touched * stack.nbytes // stack.experts if stack is not None else 0
            shown = "" if launch is None else f"{launch.tile}/{launch.warps}w/{launch.stages}s"
            line = {
                "case": case.label,
                "rows": rows,
                "launch": name,
                "variant": shown + ("" if launch != usual else " *"),
                "us": round(us, 2),
                "touched": touched,
                "GB/s": round(moved / us / 1e3) if moved else "",
            }
            print(line, flush=True)
            yield line
        if stack is not None and usual is not None:
            stack.launches[rows == 1] = usual


def block_of(name: str, shape: MoeShape, kind: str, scratch: Scratch) -> Callable[[Tensor, DeviceRows], Tensor]:
    """A whole block as a layer calls it: router, experts, shared expert, and the norm that sums up their outputs."""
    weights, kernels = RandomWeights(scratch, kind), gpu_kernels("triton")
    norm = torch.ones(shape.hidden_size, device=scratch.device)

    def normed(x: Tensor, mixture: Mixture) -> Tensor:
        out = torch.empty_like(x)
        kernels.combine_norm(torch.empty(x.shape, device=x.device), mixture, norm, 1e-6, out)
        return out

    if name.startswith("Gemma"):
        experts = DeviceExperts(kernels, load_experts(weights, "r", "e.", shape, "gelu"))
        return lambda x, rows: normed(x, experts(x, x, rows, SCRATCH_PLACE))
    block = DeviceExpertBlock(kernels, load_expert_block(weights, "mlp.", shape))
    return lambda x, rows: normed(x, block(x, rows, SCRATCH_PLACE))


def time_blocks(
    name: str, shape: MoeShape, kind: str, scratch: Scratch, counts: Sequence[int]
) -> Iterator[dict[str, object]]:
    """Times whole blocks, several in a row with separate weights, beside the bytes of the experts they touch."""
    device = scratch.device
    case = make_case(name, shape, kind, scratch)
    blocks = [block_of(name, shape, kind, scratch) for _ in range(4 if device.type == "cuda" else 1)]
    for count in counts:
        rows = replace(DeviceRows.empty("tree", 1, count, 1, device, SCRATCH_PLACE), places=some_places(count, device))
        padded = max(count, LEAST_ROWS)
        xs = [torch.randn(padded, shape.hidden_size, device=device).to(torch.bfloat16) for _ in blocks]
        us = milliseconds(lambda i, rows=rows, xs=xs: blocks[i](xs[i], rows), len(blocks), device) * 1e3  # type: ignore
        logits = torch.randn(padded, case.rule.experts + case.rule.gated, device=device)
        touched = touched_by(routed(case, logits, rows.places, count))
        moved = touched * case.touched_bytes
        yield {
            "case": case.label,
            "rows": count,
            "launch": "whole block",
            "variant": "",
            "us": round(us, 2),
            "touched": touched,
            "GB/s": round(moved / us / 1e3),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=("checks", "times"))
    parser.add_argument("--out", type=Path, help="also write the times as JSON")
    parser.add_argument("--formats", default="bf16,Q4_K,Q8_0,Q6_K")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--rows", default=",".join(map(str, ROW_COUNTS)))
    parser.add_argument("--variants", action="store_true", help="time other launches too")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    shapes = TINY_SHAPES if options.tiny else SHAPES
    names = [name for name in shapes if not options.shapes or name in options.shapes.split(",")]
    counts = [int(count) for count in options.rows.split(",")]
    formats = options.formats.split(",")
    if options.tiny:
        counts, formats = counts[:1], ["bf16", "Q8_0"]
    began, faults, times = time.perf_counter(), list[str](), list[dict[str, object]]()
    for name in names:
        for kind in formats:
            if not fits(shapes[name], kind):
                continue
            scratch = Scratch(device)
            case = make_case(name, shapes[name], kind, scratch)
            if options.only != "times":
                faults += [*check_scores(case, device), *check(case, device, 32 if options.tiny else PREFILL)]
            if options.only != "checks":
                for count in counts:
                    times += time_case(case, count, device, VARIANTS if options.variants and count <= 64 else ())
                del case
                wanted = counts if options.tiny else [*counts, PREFILL]
                times += time_blocks(name, shapes[name], kind, scratch, wanted)
                print(times[-1], flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(json.dumps(times, indent=1))
    print(f"\n{'case':32} {'rows':>4} {'launch':12} {'variant':12} {'us':>9} {'experts':>8} {'GB/s':>6}")
    for line in times:
        print(
            f"{line['case']!s:32} {line['rows']!s:>4} {line['launch']!s:12} {line['variant']!s:12} "
            f"{line['us']!s:>9} {line['touched']!s:>8} {line['GB/s']!s:>6}"
        )
    print(f"{time.perf_counter() - began:.0f} s in all; {len(faults)} faults {faults}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
