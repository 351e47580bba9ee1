"""Experts of the GPU package under Triton's interpreter: routing, grouped products of every weight type, their sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import Kernels
from slipstream.formats.weight_files import WeightFile, open_weights
from slipstream.kernels.gpu import expert_mixture as experts
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.elementwise import add_norm
from slipstream.kernels.gpu.expert_mixture import (
    ExpertStack,
    Mixture,
    Routing,
    RoutingRule,
    make_expert_stack,
    stack_kind,
)
from slipstream.kernels.gpu.kernel_set import gpu_kernels
from slipstream.kernels.gpu.matrices import GpuDense, Scratch, joined_in_order
from slipstream.kernels.gpu.packing import KINDS
from slipstream.models.cpu.part_runs import ask_experts, choose_experts, run_expert_block
from slipstream.models.gpu.device_experts import DeviceExpertBlock, DeviceExperts
from slipstream.models.gpu.device_weights import GpuWeights
from slipstream.models.moe import MoeShape, load_expert_block, load_experts
from slipstream.models.weights import Weights
from tests.kernels.test_matmul import poisoned, some_rows, stored

CPU = torch.device("cpu")
SCRATCH = 1000
BF16_ERROR = 1.5e-2  # the interpreter truncates where a GPU rounds
RULES = {
    "softmax": RoutingRule(7, 3, False, True, 1.0, 0.0),
    "raw-shares": RoutingRule(5, 5, False, False, 1.0, 0.0),
    "sigmoid": RoutingRule(16, 2, True, True, 2.5, 3.0, shared=True),
    "gated": RoutingRule(9, 4, False, True, 1.0, 0.0, shared=True, gated=True, joined=True),
}


def places(rows: int, unused: tuple[int, ...] = ()) -> Tensor:
    found = torch.arange(max(rows, 16), dtype=torch.int32)
    found[rows:] = SCRATCH
    for row in unused:
        found[row] = SCRATCH + 3
    return found


def some_logits(rule: RoutingRule, rows: int, seed: int) -> Tensor:
    return torch.randn(max(rows, 16), rule.experts + rule.gated, generator=torch.Generator().manual_seed(seed)) * 2


def route(
    rule: RoutingRule,
    logits: Tensor,
    rows: int,
    own_places: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    reference: bool = False,
) -> Routing:
    out = Routing.empty(rule, rows, rule.new_counts(CPU))
    for tensor in (out.shares, out.experts, out.lists, out.tiles):
        tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
    launch = experts.route_reference if reference else experts.route
    launch(logits if logits.dim() == 3 else logits[None], bias, scale, own_places, SCRATCH, out)
    return out


def pairs_of(routing: Routing) -> dict[int, list[int]]:
    """Returns pairs by expert as products read them, and checks that every sixteen of a list are exactly one tile."""
    if routing.alone:
        assert not routing.counts.any(), "nobody counts a row that is alone"
        return {expert: [rank] for rank, expert in enumerate(routing.experts[0].tolist()) if expert >= 0}
    counts, total = routing.counts[:-1].tolist(), int(routing.counts[-1])
    wanted = [expert + 2**16 * tile for expert, count in enumerate(counts) for tile in range(-(-count // 16))]
    assert sorted(routing.tiles[:total].tolist()) == sorted(wanted)
    return {expert: sorted(routing.lists[expert, :count].tolist()) for expert, count in enumerate(counts) if count}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rows", (1, 40))
def test_kernel_and_twin_choose_alike(name: str, rows: int) -> None:
    rule = RULES[name]
    logits, own_places = some_logits(rule, rows, rows), places(rows, (3, 17)[: max(0, rows // 16)])
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(rule.experts, generator=generator) if rule.sigmoid else None
    scale = torch.rand(rule.experts, generator=generator) if name == "softmax" else None
    ours = route(rule, logits, rows, own_places, bias, scale)
    twin = route(rule, logits, rows, own_places, bias, scale, reference=True)
    assert torch.equal(ours.experts, twin.experts)
    by_expert: dict[int, list[int]] = {}
    for pair, expert in enumerate(ours.experts.flatten().tolist()):
        by_expert.setdefault(expert, []).append(pair)
    by_expert.pop(-1, None)
    assert pairs_of(ours) == by_expert and (rows == 1 or pairs_of(twin) == by_expert)
    used = own_places[:rows] < SCRATCH
    torch.testing.assert_close(ours.shares[used], twin.shares[used], rtol=1e-5, atol=1e-6)
    assert (ours.experts[~used] == -1).all() and (ours.experts[used] >= 0).all()


def test_a_step_without_sequences_reads_no_expert() -> None:
    rule = RULES["gated"]
    nobody = torch.full((16,), SCRATCH, dtype=torch.int32)
    routing = route(rule, some_logits(rule, 16, 1), 16, nobody)
    assert (routing.experts == -1).all() and not routing.counts.any()
    assert products(dense_stack(10, 64, 64, 1), some_rows(16, 64, 2), routing, "silu").isnan().all()
    out = poisoned(16, 40, dtype=torch.bfloat16)
    experts.combine(Mixture(poisoned(routing.most_pairs, 40), routing, None, nobody, SCRATCH), out)
    assert not out.any()
    alone = route(rule, some_logits(rule, 1, 1), 1, nobody)
    assert products(dense_stack(10, 64, 64, 1), some_rows(16, 64, 2), alone, "silu").isnan().all()


def test_equal_scores_go_to_the_lower_expert() -> None:
    rule = RoutingRule(7, 3, False, True, 1.0, 0.0)
    logits = torch.zeros(16, 7)
    logits[0, 4] = 1.0
    logits[1] = torch.tensor([0.0, -0.0, 2.0, 0.0, 2.0, -1.0, 0.0])
    found = route(rule, logits, 2, places(2))
    assert found.experts.tolist() == [[4, 0, 1], [2, 4, 0]]


def test_rows_that_are_not_numbers_choose_experts_that_exist() -> None:
    rule = RULES["gated"]
    logits = some_logits(rule, 16, 2)
    logits[5] = torch.nan
    found = route(rule, logits, 16, places(16))
    assert found.experts[5].tolist() == [0, 1, 2, 3, 9]
    assert found.shares[5].isnan().all()
    clean = some_logits(rule, 16, 2)
    others = torch.arange(16) != 5
    assert torch.equal(found.shares[others], route(rule, clean, 16, places(16)).shares[others])


def test_more_pairs_of_one_expert_than_a_tile_holds() -> None:
    rule = RoutingRule(6, 2, False, True, 1.0, 0.0)
    logits = torch.randn(64, 6)
    logits[:, 3] = 50.0
    routing = route(rule, logits, 64, places(64))
    assert pairs_of(routing)[3] == [row * 2 for row in range(64)]
    stack, x = dense_stack(6, 96, 64, 1), some_rows(64, 64, 2)
    ours, twin = (products(stack, x, routing, "silu", reference) for reference in (False, True))
    assert float(((ours - twin).norm(dim=1) / twin.norm(dim=1)).max()) < BF16_ERROR


def dense_stack(count: int, outputs: int, inputs: int, seed: int) -> ExpertStack:
    weight = torch.randn(count * outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.1
    return ExpertStack(weight.to(torch.bfloat16), count)


def packed_stack(kind: str, count: int, tensors: int, outputs: int, inputs: int, seed: int) -> ExpertStack:
    sources = [[stored(kind, outputs, inputs, seed + 10 * e + t) for t in range(tensors)] for e in range(count)]
    stack = make_expert_stack(sources, CPU)
    assert not isinstance(stack.weights, Tensor) and stack.outputs == tensors * outputs
    return stack


def products(stack: ExpertStack, x: Tensor, routing: Routing, gate: str | None, reference: bool = False) -> Tensor:
    """Computes one grouped product: gate and up of rows, or down of pairs."""
    pairs = routing.most_pairs
    if gate is None:
        out = poisoned(pairs, stack.outputs)
        (experts.expert_down_reference if reference else experts.expert_down)(stack, x, routing, out)
        return out
    out = poisoned(pairs, stack.outputs // 2, dtype=torch.bfloat16)
    launch = experts.expert_gate_up_reference if reference else experts.expert_gate_up
    launch(stack, x, routing, gate, out)  # type: ignore[arg-type]
    return out.float()


def assert_products_agree(stack: ExpertStack, rule: RoutingRule, gate: str | None, rows: int) -> None:
    routing = route(rule, some_logits(rule, rows, 3), rows, places(rows, (2,)))
    x = some_rows(max(rows, 16) if gate is not None else rows * rule.ranks, stack.inputs, 4)
    ours, twin = products(stack, x, routing, gate), products(stack, x, routing, gate, reference=True)
    used = torch.zeros(len(ours), dtype=torch.bool)
    used[[pair for pairs in pairs_of(routing).values() for pair in pairs]] = True
    assert used.sum() == (rows - 1) * rule.ranks
    assert ours[~used].isnan().all(), "pairs that nobody chose are not computed"
    assert float(((ours - twin)[used].norm(dim=1) / twin[used].norm(dim=1)).max()) < BF16_ERROR


@pytest.mark.parametrize("gate", ("silu", "gelu", None))
@pytest.mark.parametrize("shape", ((80, 64), (96, 200)))
def test_dense_products(gate: str | None, shape: tuple[int, int]) -> None:
    assert_products_agree(dense_stack(10, *shape, seed=1), RULES["gated"], gate, 5)


@pytest.mark.parametrize("gate", ("silu", None))
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_blocks(kind: str, gate: str | None) -> None:
    rule = RoutingRule(3, 2, False, True, 1.0, 0.0)
    inputs = 256 if KINDS[kind].block == 256 else 96
    assert_products_agree(packed_stack(kind, 3, 1 if gate is None else 2, 64, inputs, 1), rule, gate, 3)


@pytest.mark.parametrize("kind", ("dense", "Q4_0"))
def test_a_pair_does_not_depend_on_its_company(kind: str) -> None:
    rule = RoutingRule(3, 1, False, True, 1.0, 0.0)
    stack = dense_stack(3, 64, 192, 1) if kind == "dense" else packed_stack(kind, 3, 2, 64, 128, 1)
    x, logits = some_rows(64, stack.inputs, 7), some_logits(rule, 64, 8)
    alone = products(stack, x[:16], route(rule, logits[:16], 16, places(16)), "silu")
    for rows, move in ((32, 0), (64, 24)):
        others = x.roll(move, 0)
        strangers = (torch.arange(64) < move) | (torch.arange(64) >= move + 16)
        others[strangers] *= 100
        others[30 + move] = torch.nan
        routing = route(rule, logits.roll(move, 0), rows, places(rows, (20 + move,)))
        assert torch.equal(products(stack, others[:rows], routing, "silu")[move : move + 16], alone)


@pytest.mark.parametrize("name", RULES)
def test_shares_are_added_in_the_order_of_the_ranking(name: str) -> None:
    rule, rows = RULES[name], 5
    own_places = places(rows, (1,))
    routing = route(rule, some_logits(rule, rows, 1), rows, own_places)
    answered = torch.randn(rows * rule.ranks, 600)
    extra = some_rows(16, 600, 3) if rule.shared and not rule.joined else None
    ours, twin = poisoned(16, 600, dtype=torch.bfloat16), poisoned(16, 600, dtype=torch.bfloat16)
    mixture = Mixture(answered, routing, extra, own_places, SCRATCH)
    assert routing.counts.any()
    experts.combine(mixture, ours)
    assert not routing.counts.any(), "the next choice counts from zero"
    experts.combine_reference(mixture, twin)
    torch.testing.assert_close(ours, twin, rtol=1e-2, atol=1e-2)
    assert not ours[[1, *range(rows, 16)]].any() and ours[[0, 2, 3, 4]].any(dim=1).all()


@pytest.mark.parametrize("tapped", (False, True))
def test_a_mixture_enters_the_stream_as_its_sum_would(tapped: bool) -> None:
    rule, rows, width = RULES["sigmoid"], 5, 600
    own_places, extra = places(rows, (1,)), some_rows(16, width, 3)
    routing = route(rule, some_logits(rule, rows, 1), rows, own_places)
    generator = torch.Generator().manual_seed(9)
    answers = torch.randn(rows * rule.ranks, width, generator=generator)
    mixture = Mixture(answers, routing, extra, own_places, SCRATCH)
    stream, weight = torch.randn(16, width, generator=generator), torch.rand(width, generator=generator)
    mixed = poisoned(16, width, dtype=torch.bfloat16)
    streams, normed, taps = [stream.clone() for _ in range(3)], list[Tensor](), list[Tensor]()
    for _ in streams:
        normed.append(poisoned(16, width, dtype=torch.bfloat16))
        taps.append(poisoned(16, 2 * width, dtype=torch.bfloat16)[:, 100 : 100 + width])
    tap = taps if tapped else [None] * 3
    experts.combine_norm(streams[0], mixture, weight, 1e-5, normed[0], tap[0])
    assert not routing.counts.any(), "the next choice counts from zero"
    experts.combine_norm_reference(streams[1], mixture, weight, 1e-5, normed[1], tap[1])
    experts.combine(mixture, mixed)
    add_norm(streams[2], mixed, weight, 1e-5, normed[2], tap[2])
    assert torch.equal(streams[0], streams[2]) and torch.equal(normed[0], normed[2])
    torch.testing.assert_close(streams[0], streams[1], rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(normed[0], normed[1], rtol=2e-2, atol=5e-2)
    if tapped:
        assert torch.equal(taps[0], taps[2])


@pytest.mark.parametrize("size", ((10, 512), (70, 300), (5, 64)))
def test_a_router_s_parts_add_up_to_its_product(size: tuple[int, int]) -> None:
    weight = (torch.randn(size, generator=torch.Generator().manual_seed(size[0])) * 0.1).to(torch.bfloat16)
    matrix = joined_in_order([GpuDense(weight, Scratch(CPU), torch.float32)])
    x = some_rows(32, size[1], 4)
    found, twin = (experts.new_scores(matrix, 32, CPU).fill_(torch.nan) for _ in range(2))
    experts.score(matrix, x, found)
    experts.score_reference(matrix, x, twin)
    assert len(found) == -(-size[1] // 256)
    torch.testing.assert_close(found.sum(dim=0), twin.sum(dim=0), rtol=1e-3, atol=1e-3)
    assert torch.equal(experts_of(found[:, :16]), experts_of(found)[:16])


def experts_of(logits: Tensor) -> Tensor:
    rule, rows = RoutingRule(5, 3, False, True, 1.0, 0.0), logits.shape[1]
    found, twin = (route(rule, logits, rows, places(rows), reference=reference) for reference in (False, True))
    assert torch.equal(found.experts, twin.experts)
    return found.experts


def test_stacks_keep_blocks_only_where_every_expert_has_whole_tiles_of_one_type() -> None:
    blocks = [stored("Q8_0", 64, 64, seed) for seed in (1, 2)]
    other, short = stored("Q4_0", 64, 64, 3), stored("Q8_0", 32, 64, 4)
    assert stack_kind(blocks, "auto") == "Q8_0"
    for sources, weight_format in ((blocks, "bf16"), ([*blocks, other], "auto"), ([*blocks, short], "auto")):
        assert stack_kind(sources, weight_format) is None  # type: ignore[arg-type]
    stack = make_expert_stack([[blocks[0]], [other]], CPU)
    assert isinstance(stack.weights, Tensor)
    for expert, source in enumerate((blocks[0], other)):
        assert torch.equal(stack.dense(expert), source.dense().to(torch.bfloat16).float())
    packed = packed_stack("Q5_K", 3, 2, 64, 256, 9)
    together = torch.cat([packed.dense(expert) for expert in range(3)])
    sources = [stored("Q5_K", 64, 256, 9 + 10 * e + t) for e in range(3) for t in range(2)]
    assert float((together - torch.cat([source.dense() for source in sources])).abs().max()) < 1e-3


def test_a_step_has_room_for_every_tile_it_can_have() -> None:
    rule = RoutingRule(300, 8, False, True, 1.0, 0.0, shared=True, joined=True)
    for rows in (1, 16, 64, 512):
        most = Routing.empty(rule, rows, rule.new_counts(CPU)).tiles.shape[0]
        spread = [0] * 300  # as many experts as possible, and so as many tiles that are not full
        for pair in range(rows * 8):
            spread[pair % 300] += 1
        assert most >= sum(-(-count // 16) for count in spread) + -(-rows // 16)


SHAPES = {
    "softmax": MoeShape(64, 6, 3, 32),
    "raw shares, one expert": MoeShape(64, 5, 1, 32, renormalise=False),
    "sigmoid": MoeShape(64, 6, 3, 32, "sigmoid", scale=2.5, router_softcap=4.0, selection_bias=True, shared_size=32),
    "shared apart": MoeShape(64, 6, 3, 32, "sigmoid", scale=2.5, selection_bias=True, shared_size=48),
    "gated": MoeShape(64, 4, 2, 32, shared_size=32, shared_gate=True),
    "gated apart": MoeShape(64, 4, 2, 32, shared_size=40, shared_gate=True),
}


def write_moe(folder: Path, shape: MoeShape) -> WeightFile:
    """A file with the tensors of one block, in bf16."""
    hidden, inner, shared, count = shape.hidden_size, shape.intermediate_size, shape.shared_size, shape.experts
    sizes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (count, hidden),
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.down_proj": (count, hidden, inner),
        "mlp.experts.e_score_correction_bias": (count,),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
        "router.scale": (count,),
    }
    generator = torch.Generator().manual_seed(11)
    tensors = {
        name: (torch.randn(size, generator=generator) / max(1, size[-1]) ** 0.5).to(torch.bfloat16)
        for name, size in sizes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return open_weights(folder)


def device_rows(rows: int, unused: tuple[int, ...]) -> DeviceRows:
    return replace(DeviceRows.empty("tree", 1, rows, 1, CPU, SCRATCH), places=places(rows, unused))


def mixed_rows(mixture: Mixture, kernels: Kernels) -> Tensor:
    out = poisoned(16, mixture.answers.shape[1], dtype=torch.bfloat16)
    gpu_kernels(kernels).combine(mixture, out)
    return out


def assert_near(ours: Tensor, truth: Tensor, rows: int, unused: tuple[int, ...]) -> None:
    counting = [row for row in range(rows) if row not in unused]
    error = (ours[counting].float() - truth[counting]).norm(dim=1) / truth[counting].norm(dim=1)
    assert float(error.max()) < 2 * BF16_ERROR
    assert not ours[[*unused, *range(rows, len(ours))]].any()


@pytest.mark.parametrize("kernels", ("reference", "triton"))
@pytest.mark.parametrize("name", SHAPES)
def test_a_block_computes_what_it_does_on_a_processor(name: str, kernels: Kernels, tmp_path: Path) -> None:
    shape, rows, unused = SHAPES[name], 5, (3,)
    file = write_moe(tmp_path, shape)
    own, there = Weights(file, "fp32"), GpuWeights(Scratch(CPU), file, "auto")
    block = DeviceExpertBlock(gpu_kernels(kernels), load_expert_block(there, "mlp.", shape))
    x = some_rows(16, 64, 6)
    truth = run_expert_block(load_expert_block(own, "mlp.", shape), x.float())
    for _ in range(2):  # a layer's counts are at zero again
        assert_near(mixed_rows(block(x, device_rows(rows, unused), SCRATCH), kernels), truth, rows, unused)
    alone = mixed_rows(block(x, device_rows(1, ()), SCRATCH), kernels)
    assert_near(alone, truth, 1, ())
    # a step reads as much of the experts here as there, but for the type they are kept in
    assert there.row_products == own.row_products
    assert abs(there.step_bytes - own.step_bytes // 2) <= 8


@pytest.mark.parametrize("kernels", ("reference", "triton"))
def test_a_router_may_read_other_rows_and_weigh_experts(kernels: Kernels, tmp_path: Path) -> None:
    shape, rows = SHAPES["softmax"], 4
    file = write_moe(tmp_path, shape)
    own, there = Weights(file, "fp32"), GpuWeights(Scratch(CPU), file, "bf16")
    scale = own.vector("router.scale", shape.experts)
    router_rows, expert_rows = some_rows(16, 64, 1), some_rows(16, 64, 2)
    routed, there_routed = (load_experts(one, "mlp.gate.weight", "mlp.experts.", shape, "gelu") for one in (own, there))
    chosen, shares = choose_experts(routed, router_rows.float())
    truth = ask_experts(routed, expert_rows.float(), chosen, shares * scale[chosen])
    block = DeviceExperts(gpu_kernels(kernels), there_routed)
    found = block(router_rows, expert_rows, device_rows(rows, ()), SCRATCH, scale)
    assert_near(mixed_rows(found, kernels), truth, rows, ())


def test_a_step_that_was_broken_off_leaves_no_counts_behind(tmp_path: Path) -> None:
    shape, rows = SHAPES["softmax"], 5

    file, x = write_moe(tmp_path, shape), some_rows(16, 64, 6)
    kernels = gpu_kernels("triton")
    down, failures = kernels.expert_down, [MemoryError()]

    def short_of_memory_once(*given: Any) -> None:
        if failures:
            raise failures.pop()
        down(*given)

    loaded = load_expert_block(GpuWeights(Scratch(CPU), file, "auto"), "mlp.", shape)
    block = DeviceExpertBlock(replace(kernels, expert_down=short_of_memory_once), loaded)
    with pytest.raises(MemoryError):
        block(x, device_rows(rows, ()), SCRATCH)
    truth = run_expert_block(load_expert_block(Weights(file, "fp32"), "mlp.", shape), x.float())
    assert_near(mixed_rows(block(x, device_rows(rows, ()), SCRATCH), "triton"), truth, rows, ())
