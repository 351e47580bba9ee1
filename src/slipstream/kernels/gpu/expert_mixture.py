"""Mixtures of experts on the GPU: each row's experts and shares, products with the chosen experts, and their sum.

Every launcher has a counterpart in torch with the same signature (`..._reference`). A row has a pair for each expert it
chose and, if the shared expert is stored with the others, one more for that. Sums and products are not fused in kernels
that are compiled separately for several row counts, because the compiler must not choose which operation rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from slipstream.config import WeightFormat
from slipstream.kernels.cpu.native_matrix import StoredTensor
from slipstream.kernels.cpu.torch_kernels import softcapped
from slipstream.kernels.gpu import expert_kernels as kernels
from slipstream.kernels.gpu.elementwise import add_norm_reference, or_any, warps_for
from slipstream.kernels.gpu.matmul_plans import ROW_COUNTS, expert_depth, expert_launch
from slipstream.kernels.gpu.matrices import EARLY, INTERPRETED, GpuDense, GpuMatrix, brain_floats, matmul_reference
from slipstream.kernels.gpu.packing import KINDS, TILE_ROWS, QuantPlanes, pack, unpacked_planes

Gate = Literal["silu", "gelu"]
TILE_PAIRS: int = kernels.PAIRS.value
_GATES = {None: 0, "silu": kernels.GATED_BY_SILU.value, "gelu": kernels.GATED_BY_GELU.value}
_COMBINED = 512  # numbers of a row that one program adds up
_LANES = 32  # lanes of the warp that chooses a row's experts
_SCORED = 64  # outputs of a router in one program
_SCORED_INPUTS = 256  # inputs of a router in one program
_APART = 16  # rows of scores begin at multiples of this, so that a load can take several numbers at once


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a router's logits become experts and shares."""

    experts: int
    active: int
    sigmoid: bool
    renormalise: bool
    scale: float
    softcap: float
    shared: bool = False  # whether every row also goes through one shared expert
    gated: bool = False  # whether a sigmoid weighs the shared expert, by the logit after those of the experts
    joined: bool = False  # whether the shared expert is stored after the others in their stacks

    @property
    def ranks(self) -> int:
        """How many pairs a row has."""
        return self.active + self.joined

    @property
    def stacked(self) -> int:
        """How many experts a stack holds."""
        return self.experts + self.joined

    def new_counts(self, device: torch.device) -> Tensor:
        """Allocates a layer's memory for the `counts` of its routings."""
        return torch.zeros(self.stacked + 1, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Routing:
    """What the rows of a step chose, by row and by expert. Only the entries of existing pairs are filled.

    The pairs of an expert are in any order, sixteen of them are a tile, and tiles are in any order too; neither order
    changes a pair's numbers. A single row needs no lists.
    """

    rule: RoutingRule
    shares: Tensor  # fp32 [rows, active + 1 for a shared expert]
    experts: Tensor  # int32 [rows, ranks]; -1 in padding rows
    lists: Tensor  # int32 [stacked, rows]: an expert's pairs, each row * ranks + rank
    tiles: Tensor  # int32 [most tiles]: the expert plus 2^16 times the index of the 16 pairs in its list
    counts: Tensor  # int32 [stacked + 1]: pairs of each expert, then tiles; zeros before the choice and after the sum

    @classmethod
    def empty(cls, rule: RoutingRule, rows: int, counts: Tensor) -> Routing:
        pairs, device = rows * rule.ranks, counts.device
        touched = min(rule.stacked, pairs)
        most = (pairs + touched * (TILE_PAIRS - 1)) // TILE_PAIRS
        return cls(
            rule, torch.empty(rows, rule.active + rule.shared, device=device),
            torch.empty(rows, rule.ranks, dtype=torch.int32, device=device),
            torch.empty(rule.stacked, rows, dtype=torch.int32, device=device),
            torch.empty(most, dtype=torch.int32, device=device), counts,
        )

    @property
    def rows(self) -> int:
        return self.shares.shape[0]

    @property
    def most_pairs(self) -> int:
        return self.rows * self.rule.ranks

    @property
    def alone(self) -> bool:
        return self.rows == 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """The answers of experts before they are added up; a row whose place is not before `scratch_place` has none."""

    answers: Tensor  # fp32 [pairs, width]
    routing: Routing
    extra: Tensor | None  # bf16 [rows, width]: the shared expert's answer if it is stored separately
    places: Tensor
    scratch_place: int


class ExpertStack:
    """One projection of all experts [experts, outputs, inputs], in bf16 or in blocks of one type."""

    def __init__(self, weights: Tensor | QuantPlanes, experts: int) -> None:
        self.weights = weights
        self.experts = experts
        if isinstance(weights, Tensor):
            (outputs, self.inputs), kind = weights.shape, None
        else:
            outputs, self.inputs, kind = weights.outputs, weights.inputs, weights.kind
        self.outputs = outputs // experts
        self.nbytes = weights.nbytes
        self.depth = expert_depth(kind, self.inputs)
        self.launches = {alone: expert_launch(kind, self.inputs, alone) for alone in (True, False)}

    def dense(self, expert: int) -> Tensor:
        """Returns an expert's weights in fp32."""
        if isinstance(self.weights, Tensor):
            return self.weights[expert * self.outputs : (expert + 1) * self.outputs].float()
        tiles = self.outputs // TILE_ROWS
        own = slice(expert * tiles, (expert + 1) * tiles)
        planes = self.weights
        return unpacked_planes(
            replace(
                planes, outputs=self.outputs, words=planes.words[own], scales=planes.scales[own],
                high=None if planes.high is None else planes.high[own],
                offsets=None if planes.offsets is None else planes.offsets[own],
            )
        )


def stack_kind(sources: Sequence[StoredTensor], weight_format: WeightFormat) -> str | None:
    """Returns the block type that all tensors of a stack share and keep, or None if they become bf16."""
    names = {source.type_name for source in sources}
    packed = weight_format != "bf16" and len(names) == 1 and names <= KINDS.keys()
    # blocks are packed in tiles of 64 outputs, and every expert must begin with a new tile
    return names.pop() if packed and all(source.shape[0] % TILE_ROWS == 0 for source in sources) else None


def make_expert_stack(
    sources: Sequence[Sequence[StoredTensor]], device: torch.device, weight_format: WeightFormat = "auto"
) -> ExpertStack:
    """Builds a stack of experts; each expert is given by the tensors that are joined along its outputs."""
    each = [source for expert in sources for source in expert]
    kind = stack_kind(each, weight_format)
    if kind is None:
        return ExpertStack(brain_floats(each, device), len(sources))
    planes = pack([source.raw() for source in each], KINDS[kind], each[0].shape[1], device)
    return ExpertStack(planes, len(sources))


def new_scores(matrix: GpuMatrix, rows: int, device: torch.device) -> Tensor:
    """Allocates a router's product with `rows` rows: fp32 [parts, rows, outputs], with aligned rows."""
    whole = not isinstance(matrix, GpuDense) or rows > ROW_COUNTS[-1]
    parts = 1 if whole else triton.cdiv(matrix.in_features, _SCORED_INPUTS)
    apart = -(-matrix.out_features // _APART) * _APART
    return torch.empty(parts, rows, apart, device=device)[..., : matrix.out_features]


def score(matrix: GpuMatrix, rows: Tensor, out: Tensor) -> None:
    """Computes a router's product of rows bf16 [rows, inputs] in fp32 parts [parts, rows, outputs], not yet added."""
    parts, count, outputs = out.shape
    if parts == 1:
        matrix(rows, out[0])
        return
    assert isinstance(matrix, GpuDense)
    kernels.score_kernel[(triton.cdiv(outputs, _SCORED), parts)](
        matrix.weight, rows, out, rows.stride(0), out.stride(1), outputs, matrix.in_features, ROWS=count,
        TILE=_SCORED, DEPTH=_SCORED_INPUTS, EVEN=matrix.in_features % _SCORED_INPUTS == 0, EARLY=EARLY,
        INTERPRETED=INTERPRETED, num_warps=4, launch_pdl=EARLY,
    )  # fmt: skip


def score_reference(matrix: GpuMatrix, rows: Tensor, out: Tensor) -> None:
    matmul_reference(matrix, rows, out.zero_()[0])


def route(
    logits: Tensor, bias: Tensor | None, expert_scale: Tensor | None, places: Tensor, scratch_place: int, out: Routing
) -> None:
    """Chooses each row's experts by their logits, and groups the pairs by expert.

    logits are fp32 [parts, rows or more, experts + 1 if the shared expert is gated].
    `bias` affects the choice only, `expert_scale` the shares only. A row whose place is not before `scratch_place`
    chooses nothing.
    """
    rule, rows = out.rule, out.rows
    kernels.route_kernel[(rows,)](
        logits, or_any(bias, logits), or_any(expert_scale, logits), places, out.shares, out.experts, out.lists,
        out.tiles, out.counts, logits.stride(0), logits.stride(1), scratch_place, rows, rule.softcap, rule.scale,
        PARTS=logits.shape[0], EXPERTS=rule.experts, WIDTH=max(_LANES, triton.next_power_of_2(rule.experts)),
        LANES=max(_LANES, triton.next_power_of_2(rule.ranks)), ACTIVE=rule.active, SIGMOID=rule.sigmoid,
        RENORMALISE=rule.renormalise, SOFTCAP=rule.softcap > 0, HAS_BIAS=bias is not None,
        HAS_SCALE=expert_scale is not None, SHARED=int(rule.shared), GATED=rule.gated, JOINED=int(rule.joined),
        ALONE=out.alone, EARLY=EARLY, num_warps=1, launch_pdl=EARLY, enable_fp_fusion=False,
    )  # fmt: skip


def route_reference(
    logits: Tensor, bias: Tensor | None, expert_scale: Tensor | None, places: Tensor, scratch_place: int, out: Routing
) -> None:
    rule, rows = out.rule, out.rows
    whole = logits[:, :rows].float().sum(dim=0)
    own = softcapped(whole[:, : rule.experts], rule.softcap)
    scores = torch.sigmoid(own) if rule.sigmoid else torch.softmax(own, dim=-1)
    wanted = torch.nan_to_num(scores if bias is None else scores + bias, nan=-torch.inf, neginf=-torch.inf)
    chosen = torch.sort(wanted, dim=-1, descending=True, stable=True).indices[:, : rule.active]
    shares = scores.gather(-1, chosen)
    if rule.renormalise:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    shares = shares * rule.scale
    out.shares[:, : rule.active] = shares if expert_scale is None else shares * expert_scale[chosen]
    if rule.shared:
        out.shares[:, rule.active] = torch.sigmoid(whole[:, rule.experts]) if rule.gated else 1.0
    out.experts[:, : rule.active] = chosen
    if rule.joined:
        out.experts[:, rule.active] = rule.experts
    out.experts[places[:rows] >= scratch_place] = -1
    tiles = []
    for expert, pairs in _by_expert(out):
        out.lists[expert, : len(pairs)] = pairs
        out.counts[expert] = len(pairs)
        tiles += [expert + 2**16 * sixteen for sixteen in range(-(-len(pairs) // TILE_PAIRS))]
    out.tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
    out.counts[-1] = len(tiles)


def expert_gate_up(stack: ExpertStack, rows: Tensor, routing: Routing, gate: Gate, out: Tensor) -> None:
    """Computes out[pair] = gate(first half) * second half of the answer of the pair's expert to its row.

    rows are bf16 [rows, inputs], out is bf16 [pairs, outputs / 2].
    """
    _multiply(stack, rows, routing, routing.rule.ranks, gate, out)


def expert_gate_up_reference(stack: ExpertStack, rows: Tensor, routing: Routing, gate: Gate, out: Tensor) -> None:
    for expert, pairs in _by_expert(routing):
        first, second = (rows[pairs // routing.rule.ranks].float() @ stack.dense(expert).t()).chunk(2, dim=-1)
        out[pairs] = ((F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * second).to(out.dtype)


def expert_down(stack: ExpertStack, inner: Tensor, routing: Routing, out: Tensor) -> None:
    """Computes out[pair], the answer of the pair's expert to inner[pair].

    inner is bf16 [pairs, inputs], out is fp32 [pairs, outputs].
    """
    _multiply(stack, inner, routing, 1, None, out)


def expert_down_reference(stack: ExpertStack, inner: Tensor, routing: Routing, out: Tensor) -> None:
    for expert, pairs in _by_expert(routing):
        out[pairs] = inner[pairs].float() @ stack.dense(expert).t()


def combine(mixture: Mixture, out: Tensor) -> None:
    """Adds up each row's answers by their shares, in bf16; padding rows get zeros."""
    answers, routing, places = mixture.answers, mixture.routing, mixture.places
    rule, width = routing.rule, answers.shape[1]
    kernels.combine_kernel[(triton.cdiv(width, _COMBINED), out.shape[0])](
        answers, routing.shares, or_any(mixture.extra, answers), places, out, routing.experts, routing.counts,
        routing.counts[-1:], routing.rows, width, mixture.scratch_place, RANKS=rule.ranks,
        SHARES=routing.shares.shape[1], LANES=triton.next_power_of_2(rule.ranks), BLOCK=_COMBINED, EARLY=EARLY,
        num_warps=4, launch_pdl=EARLY, enable_fp_fusion=False,
    )  # fmt: skip


def combine_reference(mixture: Mixture, out: Tensor) -> None:
    answers, routing = mixture.answers, mixture.routing
    rows, ranks = routing.rows, routing.rule.ranks
    by_rank = answers.view(rows, ranks, -1)
    mixed = routing.shares[:, :1] * by_rank[:, 0]
    for rank in range(1, ranks):
        mixed = mixed + routing.shares[:, rank : rank + 1] * by_rank[:, rank]
    if mixture.extra is not None:
        mixed = mixed + routing.shares[:, ranks:] * mixture.extra[:rows].float()
    used = (mixture.places[:rows] < mixture.scratch_place)[:, None]
    out.zero_()[:rows] = torch.where(used, mixed, 0.0).to(out.dtype)
    routing.counts.zero_()


def combine_norm(
    residual: Tensor, mixture: Mixture, weight: Tensor, eps: float, out: Tensor, tap: Tensor | None = None
) -> None:
    """Does what `combine` and then `add_norm` do, in one launch."""
    answers, routing, (rows, width) = mixture.answers, mixture.routing, residual.shape
    block = triton.next_power_of_2(width)
    kernels.combine_norm_kernel[(rows,)](
        answers, routing.shares, or_any(mixture.extra, answers), mixture.places, residual, weight, out,
        or_any(tap, out), routing.experts, routing.counts, routing.counts[-1:],
        0 if tap is None else tap.stride(0), routing.rows, eps,
        mixture.scratch_place, WIDTH=width, BLOCK=block, RANKS=routing.rule.ranks, SHARES=routing.shares.shape[1],
        LANES=triton.next_power_of_2(routing.rule.ranks), HAS_TAP=tap is not None, EARLY=EARLY,
        num_warps=warps_for(block), launch_pdl=EARLY, enable_fp_fusion=False,
    )  # fmt: skip


def combine_norm_reference(
    residual: Tensor, mixture: Mixture, weight: Tensor, eps: float, out: Tensor, tap: Tensor | None = None
) -> None:
    mixed = torch.empty_like(out)
    combine_reference(mixture, mixed)
    add_norm_reference(residual, mixed, weight, eps, out, tap)


def _multiply(
    stack: ExpertStack, rows: Tensor, routing: Routing, sharing: int, gate: Gate | None, out: Tensor
) -> None:
    """Multiplies pairs with their experts; `sharing` consecutive pairs read the same one of `rows`."""
    launch, weights = stack.launches[routing.alone], stack.weights
    parts = triton.cdiv(out.shape[1], launch.tile if gate is None else launch.tile // 2)
    grid = parts, routing.tiles.shape[0]
    chosen = (
        routing.experts, routing.lists, routing.tiles, routing.counts, routing.counts[-1:], routing.rows,
    )  # fmt: skip
    common: dict[str, Any] = {
        "SHARING": sharing, "GATE": _GATES[gate], "TILE": launch.tile, "STAGES": launch.stages,
        "ALONE": routing.alone, "EARLY": EARLY, "INTERPRETED": INTERPRETED, "num_warps": launch.warps,
        "maxnreg": launch.registers, "launch_pdl": EARLY, "enable_fp_fusion": False,
    }
    if isinstance(weights, Tensor):
        kernels.dense_experts_kernel[grid](
            weights, rows, out, *chosen, rows.stride(0), stack.outputs, stack.inputs,
            DEPTH=stack.depth, EVEN=stack.inputs % stack.depth == 0, **common,
        )
        return
    kind = weights.kind
    kernels.quant_experts_kernel[grid](
        weights.words, or_any(weights.high, weights.words), weights.scales, or_any(weights.offsets, weights.scales),
        rows, out, *chosen, rows.stride(0), stack.outputs, stack.inputs, weights.steps, weights.unit,
        BITS=kind.bits, HIGH=kind.high, GROUP=kind.group, ZERO=kind.zero, OFFSETS=kind.minima, UNROLL=stack.depth,
        EVEN=stack.inputs == weights.steps * kind.step, **common,
    )


def _by_expert(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """Yields the experts that at least one row chose, and their pairs."""
    chosen = routing.experts.flatten()
    for expert in chosen.unique().tolist():
        if expert >= 0:
            yield expert, torch.nonzero(chosen == expert).flatten()
