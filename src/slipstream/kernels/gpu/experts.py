"""Mixtures of experts on the GPU: a row's experts and shares, products with the experts that were chosen, their sum.

Every launcher has a torch twin of the same signature (`..._reference`). A row has a pair for each expert it chose and,
where the expert that every row passes stands among the others, one more for that. Sums and products are not fused
where a kernel is compiled anew for other row counts: the compiler must not choose what rounds.
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
from slipstream.kernels.gpu import expert_kernels as kernels
from slipstream.kernels.gpu.matmul import EARLY, INTERPRETED, brain_floats
from slipstream.kernels.gpu.packing import KINDS, TILE_ROWS, QuantPlanes, pack, unpacked_planes
from slipstream.kernels.gpu.plans import expert_depth, expert_launch
from slipstream.kernels.native.matrix import StoredTensor
from slipstream.kernels.reference import softcapped

Gate = Literal["silu", "gelu"]
TILE_PAIRS: int = kernels.PAIRS.value
_GATES = {None: 0, "silu": kernels.GATED_BY_SILU.value, "gelu": kernels.GATED_BY_GELU.value}
_GROUPED_ROWS = 16  # at a time
_COMBINED = 512  # numbers of a row in one program


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How logits become experts and shares."""

    experts: int
    active: int
    sigmoid: bool
    renormalise: bool
    scale: float
    softcap: float
    shared: bool = False  # every row passes one expert more
    gated: bool = False  # which a sigmoid weighs: of the logit behind the experts'
    joined: bool = False  # and which stands behind the others in their stacks

    @property
    def ranks(self) -> int:
        """Pairs of a row."""
        return self.active + self.joined

    @property
    def width(self) -> int:
        """Experts in a stack, as a power of two."""
        return triton.next_power_of_2(self.experts + self.joined)


@dataclass(frozen=True, slots=True)
class Routing:
    """What a step's rows chose, by row and in tiles. Only the entries of pairs that exist are filled."""

    rule: RoutingRule
    shares: Tensor  # fp32 [rows, active, and one for the shared expert]
    marks: Tensor  # int8 [rows, width]: the rank of a row's expert plus one, 0 for the others
    tiles: Tensor  # int32 [most tiles, 2]: expert (-1: no such tile), and how many pairs
    pairs: Tensor  # int32 [most tiles, 16]: row * ranks + rank

    @classmethod
    def empty(cls, rule: RoutingRule, rows: int, device: torch.device) -> Routing:
        pairs = rows * rule.ranks
        touched = min(rule.experts + rule.joined, pairs)
        most = (pairs + touched * (TILE_PAIRS - 1)) // TILE_PAIRS
        return cls(
            rule, torch.empty(rows, rule.active + rule.shared, device=device),
            torch.empty(rows, rule.width, dtype=torch.int8, device=device),
            torch.empty(most, 2, dtype=torch.int32, device=device),
            torch.empty(most, TILE_PAIRS, dtype=torch.int32, device=device),
        )

    @property
    def rows(self) -> int:
        return self.shares.shape[0]

    @property
    def most_pairs(self) -> int:
        return self.rows * self.rule.ranks


class ExpertStack:
    """One projection of all experts [experts, outputs, inputs]: bf16, or blocks of one type."""

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
        self.launch = expert_launch(kind)

    def dense(self, expert: int) -> Tensor:
        """An expert's weights in fp32."""
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
    """The block type that all tensors of a stack have and keep; None: they become bf16."""
    names = {source.type_name for source in sources}
    packed = weight_format != "bf16" and len(names) == 1 and names <= KINDS.keys()
    # blocks lie in tiles of 64 outputs, and an expert begins with a tile of its own
    return names.pop() if packed and all(source.shape[0] % TILE_ROWS == 0 for source in sources) else None


def make_expert_stack(
    sources: Sequence[Sequence[StoredTensor]], device: torch.device, weight_format: WeightFormat = "auto"
) -> ExpertStack:
    """A stack of experts, each of the tensors it consists of."""
    each = [source for expert in sources for source in expert]
    kind = stack_kind(each, weight_format)
    if kind is None:
        return ExpertStack(brain_floats(each, device), len(sources))
    planes = pack([source.raw() for source in each], KINDS[kind], each[0].shape[1], device)
    return ExpertStack(planes, len(sources))


def route(
    logits: Tensor, bias: Tensor | None, expert_scale: Tensor | None, places: Tensor, scratch_place: int,
    ticket: Tensor, out: Routing,
) -> None:
    """Chooses and groups: logits fp32 [rows or more, experts, and perhaps the shared expert's gate].

    `bias` counts in the choice only, `expert_scale` in the shares only. Rows whose place is not before `scratch_place`
    choose nothing. `ticket` int32 [1] is zero before and after.
    """
    rule, rows, most = out.rule, out.rows, out.tiles.shape[0]
    kernels.route_kernel[(rows,)](
        logits, _or(bias, logits), _or(expert_scale, logits), places, out.shares, out.marks, out.pairs, out.tiles,
        ticket, logits.stride(0), scratch_place, rows, most, rule.softcap, rule.scale, EXPERTS=rule.experts,
        WIDTH=rule.width, ACTIVE=rule.active, SIGMOID=rule.sigmoid, RENORMALISE=rule.renormalise,
        SOFTCAP=rule.softcap > 0, HAS_BIAS=bias is not None, HAS_SCALE=expert_scale is not None,
        SHARED=int(rule.shared), GATED=rule.gated, JOINED=int(rule.joined),
        CHUNK=min(_GROUPED_ROWS, triton.next_power_of_2(rows)), MOST=triton.next_power_of_2(most), EARLY=EARLY,
        num_warps=8, launch_pdl=EARLY, enable_fp_fusion=False,
    )  # fmt: skip


def route_reference(
    logits: Tensor, bias: Tensor | None, expert_scale: Tensor | None, places: Tensor, scratch_place: int,
    ticket: Tensor, out: Routing,
) -> None:
    rule, rows = out.rule, out.rows
    own = softcapped(logits[:rows, : rule.experts].float(), rule.softcap)
    scores = torch.sigmoid(own) if rule.sigmoid else torch.softmax(own, dim=-1)
    wanted = torch.nan_to_num(scores if bias is None else scores + bias, nan=-torch.inf, neginf=-torch.inf)
    chosen = torch.sort(wanted, dim=-1, descending=True, stable=True).indices[:, : rule.active]
    shares = scores.gather(-1, chosen)
    if rule.renormalise:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    shares = shares * rule.scale
    out.shares[:, : rule.active] = shares if expert_scale is None else shares * expert_scale[chosen]
    if rule.shared:
        out.shares[:, rule.active] = torch.sigmoid(logits[:rows, rule.experts].float()) if rule.gated else 1.0
    ranks = torch.arange(1, rule.active + 1, dtype=torch.int8, device=chosen.device)
    out.marks.zero_().scatter_(1, chosen, ranks.expand_as(chosen))
    if rule.joined:
        out.marks[:, rule.experts] = rule.ranks
    out.marks[places[:rows] >= scratch_place] = 0
    out.tiles[:, 0] = -1
    tile = 0
    for expert in range(rule.experts + rule.joined):
        own_rows = torch.nonzero(out.marks[:, expert]).flatten()
        for some in own_rows.split(TILE_PAIRS) if len(own_rows) else ():
            out.tiles[tile] = torch.tensor([expert, len(some)])
            out.pairs[tile, : len(some)] = (some * rule.ranks + out.marks[some, expert] - 1).to(torch.int32)
            tile += 1


def expert_gate_up(stack: ExpertStack, rows: Tensor, routing: Routing, gate: Gate, out: Tensor) -> None:
    """out[pair] = gate(first half) * second half of the pair's expert's answer to its row.

    rows bf16 [rows, inputs], out bf16 [pairs, outputs / 2].
    """
    _multiply(stack, rows, routing, routing.rule.ranks, gate, out)


def expert_gate_up_reference(stack: ExpertStack, rows: Tensor, routing: Routing, gate: Gate, out: Tensor) -> None:
    for expert, pairs in _by_expert(routing):
        first, second = (rows[pairs // routing.rule.ranks].float() @ stack.dense(expert).t()).chunk(2, dim=-1)
        out[pairs] = ((F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * second).to(out.dtype)


def expert_down(stack: ExpertStack, inner: Tensor, routing: Routing, out: Tensor) -> None:
    """out[pair] = the pair's expert's answer to inner[pair]: bf16 [pairs, inputs] to fp32 [pairs, outputs]."""
    _multiply(stack, inner, routing, 1, None, out)


def expert_down_reference(stack: ExpertStack, inner: Tensor, routing: Routing, out: Tensor) -> None:
    for expert, pairs in _by_expert(routing):
        out[pairs] = inner[pairs].float() @ stack.dense(expert).t()


def combine(
    answers: Tensor, routing: Routing, extra: Tensor | None, places: Tensor, scratch_place: int, out: Tensor
) -> None:
    """A row's answers by their shares, in bf16; zeros for rows that do not count.

    answers fp32 [pairs, width]; `extra` bf16 [rows, width] is the shared expert's where it stands apart.
    """
    rule, width = routing.rule, answers.shape[1]
    kernels.combine_kernel[(triton.cdiv(width, _COMBINED), out.shape[0])](
        answers, routing.shares, _or(extra, answers), places, out, routing.rows, width, scratch_place,
        RANKS=rule.ranks, SHARES=routing.shares.shape[1], BLOCK=_COMBINED, EARLY=EARLY, num_warps=4, launch_pdl=EARLY,
        enable_fp_fusion=False,
    )  # fmt: skip


def combine_reference(
    answers: Tensor, routing: Routing, extra: Tensor | None, places: Tensor, scratch_place: int, out: Tensor
) -> None:
    rows, ranks = routing.rows, routing.rule.ranks
    by_rank = answers.view(rows, ranks, -1)
    mixed = routing.shares[:, :1] * by_rank[:, 0]
    for rank in range(1, ranks):
        mixed = mixed + routing.shares[:, rank : rank + 1] * by_rank[:, rank]
    if extra is not None:
        mixed = mixed + routing.shares[:, ranks:] * extra[:rows].float()
    used = (places[:rows] < scratch_place)[:, None]
    out.zero_()[:rows] = torch.where(used, mixed, 0.0).to(out.dtype)


def _multiply(
    stack: ExpertStack, rows: Tensor, routing: Routing, sharing: int, gate: Gate | None, out: Tensor
) -> None:
    """`sharing` pairs in a row read the same one of `rows`."""
    launch, weights = stack.launch, stack.weights
    each = launch.tile if gate is None else launch.tile // 2
    grid = routing.tiles.shape[0], triton.cdiv(out.shape[1], each)
    common: dict[str, Any] = {
        "SHARING": sharing, "GATE": _GATES[gate], "TILE": launch.tile, "STAGES": launch.stages, "EARLY": EARLY,
        "INTERPRETED": INTERPRETED, "num_warps": launch.warps, "maxnreg": launch.registers, "launch_pdl": EARLY,
    }
    if isinstance(weights, Tensor):
        kernels.dense_experts_kernel[grid](
            weights, rows, out, routing.pairs, routing.tiles, rows.stride(0), stack.outputs, stack.inputs,
            DEPTH=stack.depth, EVEN=stack.inputs % stack.depth == 0, **common,
        )
        return
    kind = weights.kind
    kernels.quant_experts_kernel[grid](
        weights.words, _or(weights.high, weights.words), weights.scales, _or(weights.offsets, weights.scales), rows,
        out, routing.pairs, routing.tiles, rows.stride(0), stack.outputs, stack.inputs, weights.steps, weights.unit,
        BITS=kind.bits, HIGH=kind.high, GROUP=kind.group, ZERO=kind.zero, OFFSETS=kind.minima, UNROLL=stack.depth,
        EVEN=stack.inputs == weights.steps * kind.step, **common,
    )


def _by_expert(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """The pairs of each tile and their expert."""
    for (expert, count), pairs in zip(routing.tiles.tolist(), routing.pairs.long(), strict=True):
        if expert < 0:
            return
        yield expert, pairs[:count]


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel argument that is never read still needs an address."""
    return stand_in if tensor is None else tensor
