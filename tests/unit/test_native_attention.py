"""The compiled attention against torch's and against fp64, and what it promises to the last bit."""

# mypy: disable-error-code="arg-type, call-arg, unused-ignore"

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.native_attention import attention, batch_struct, group_struct, native_attention, serves
from slipstream.kernels.cpu.torch_kernels import row_attention
from slipstream.kernels.rows import AttentionPattern, RowBatch, RowGroup, make_group, make_tree_group
from tests.native import compiled

CAUSAL = AttentionPattern()
SHAPES = [(9, 3, 64), (4, 4, 16), (8, 1, 32), (14, 2, 64), (5, 1, 48), (6, 2, 80), (32, 8, 128), (2, 1, 256)]
Attend = Callable[..., Tensor]


@pytest.fixture(params=["avx2", "avx512"])
def attend(request: pytest.FixtureRequest) -> Attend:
    kernels = compiled(request.param)

    def run(
        queries: Tensor, pools: Sequence[Tensor], groups: Sequence[RowGroup], scale: float = 0.2, threads: int = 1
    ) -> Tensor:
        return native_attention(kernels, queries, *pools, groups, scale, threads)

    return run


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_pools(pages: int, kv_heads: int, page: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return randn(pages, kv_heads, page, dim, seed=seed), randn(pages, kv_heads, page, dim, seed=seed + 1)


def random_tree(rows: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [-1, *[rng.randrange(row) for row in range(1, rows)]]


def exact(queries: Tensor, pools: Sequence[Tensor], groups: Sequence[RowGroup], scale: float) -> Tensor:
    """torch's kernel in fp64, to which both are compared."""
    return row_attention(queries.double(), pools[0].double(), pools[1].double(), groups, scale)


PATTERNS = [
    (AttentionPattern(), 0),
    (AttentionPattern(causal=False), 0),
    (AttentionPattern(window=9), 0),
    (AttentionPattern(window=9, causal=False), 0),
    (AttentionPattern(causal=False), 21),
    (AttentionPattern(window=30), 21),
    (AttentionPattern(window=1), 0),
    (AttentionPattern(window=200), 3),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("pattern", "earliest"), PATTERNS, ids=str)
def test_chains_and_blocks_match_torch(
    attend: Attend, heads: int, kv_heads: int, dim: int, pattern: AttentionPattern, earliest: int
) -> None:
    for page, base, rows in [(64, 130, 1), (64, 21, 4), (8, 37, 9), (5, 29, 33), (16, 48, 16), (1, 22, 2)]:
        count = -(-(base + rows) // page)
        pages = random.Random(base).sample(range(count + 3), count)
        pools, queries = random_pools(count + 3, kv_heads, page, dim), randn(rows, heads, dim, seed=9)
        group = [make_group(0, range(base, base + rows), pages, page, pattern, earliest)]
        expected = exact(queries, pools, group, 0.2)
        assert torch.allclose(attend(queries, pools, group).double(), expected, atol=3e-6), (page, base, rows)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [0, 1, 2, 7, 40])
def test_trees_match_torch(attend: Attend, heads: int, kv_heads: int, dim: int, window: int) -> None:
    for page, base, rows in [(64, 130, 24), (64, 0, 5), (8, 37, 19), (5, 33, 40), (16, 48, 16), (64, 63, 2)]:
        count = -(-(base + rows) // page)
        pages = random.Random(base).sample(range(count + 3), count)
        pools, queries = random_pools(count + 3, kv_heads, page, dim), randn(rows, heads, dim, seed=9)
        group = [make_tree_group(0, base, random_tree(rows, base), pages, page, AttentionPattern(window))]
        expected = exact(queries, pools, group, 0.2)
        assert torch.allclose(attend(queries, pools, group).double(), expected, atol=3e-6), (page, base, rows)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (12, 2, 96)])
def test_long_contexts_and_prefill_match_torch(attend: Attend, heads: int, kv_heads: int, dim: int) -> None:
    pools = random_pools(70, kv_heads, 64, dim)
    for span in (range(4210, 4211), range(4000, 4021), range(700, 956), range(256)):
        queries = randn(len(span), heads, dim, seed=4)
        group = [make_group(0, span, range(70), 64, CAUSAL)]
        seen = attend(queries, pools, group, dim**-0.5).double()
        assert torch.allclose(seen, exact(queries, pools, group, dim**-0.5), atol=3e-6), span


def mixed_batch(heads: int, dim: int) -> tuple[Tensor, list[RowGroup]]:
    """A tree, a chunk, single rows and a draft block of several sequences over shared pages."""
    parents = random_tree(33, 1)
    groups = [
        make_group(0, range(90, 130), [3, 9, 4], 64, CAUSAL),
        make_tree_group(40, 117, parents, [1, 0, 7], 64, CAUSAL),
        make_group(73, range(140, 141), [5, 2, 8], 64, AttentionPattern(window=50)),
        make_group(74, range(100, 116), [6, 10], 64, AttentionPattern(causal=False), earliest=36),
        make_tree_group(90, 12, [-1, 0, 0], [11], 64, AttentionPattern(window=3)),
    ]
    return randn(93, heads, dim, seed=3), groups


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 128)])
def test_a_mixed_batch_matches_torch_and_each_sequence_alone(
    attend: Attend, heads: int, kv_heads: int, dim: int
) -> None:
    pools = random_pools(12, kv_heads, 64, dim)
    queries, groups = mixed_batch(heads, dim)
    together = attend(queries, pools, groups)
    assert torch.allclose(together.double(), exact(queries, pools, groups, 0.2), atol=3e-6)
    for group in groups:
        alone = RowGroup(0, group.rows, group.base, group.page_ids, 64, group.pattern, group.earliest, group.parents)
        seen = attend(queries[group.start : group.stop], pools, [alone])
        assert torch.equal(seen, together[group.start : group.stop])


@pytest.mark.parametrize("heads_dim", [(9, 3, 64), (10, 2, 32), (4, 4, 144)], ids=str)
def test_bits_depend_neither_on_threads_nor_on_the_instruction_set(heads_dim: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = heads_dim
    pools = random_pools(12, kv_heads, 64, dim)
    queries, groups = mixed_batch(heads, dim)
    results = [
        native_attention(compiled(isa), queries, *pools, groups, 0.2, threads)
        for isa in ("avx2", "avx512")
        for threads in (1, 2, 3, 5, 16)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 32), (6, 2, 80)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 16, 17])
def test_few_rows_are_shared_by_any_number_of_threads(
    attend: Attend, heads: int, kv_heads: int, dim: int, rows: int
) -> None:
    pools, queries = random_pools(4, kv_heads, 64, dim), randn(rows, heads, dim, seed=6)
    group = [make_group(0, range(180, 180 + rows), range(4), 64, CAUSAL)]
    # all results are kept until the end, so that a row that was not computed cannot show an earlier result's memory
    results = [attend(queries, pools, group, threads=threads) for threads in (1, 2, 3, 4, 7, 16)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 32), (3, 1, 80)])
@pytest.mark.parametrize("pattern", [CAUSAL, AttentionPattern(window=21)], ids=str)
def test_a_row_is_the_same_to_the_bit_in_any_number_of_rows(
    attend: Attend, heads: int, kv_heads: int, dim: int, pattern: AttentionPattern
) -> None:
    """Computes a row alone, in a chunk of any length, and as the last row of a tree's branch."""
    pools = random_pools(5, kv_heads, 64, dim)
    queries = randn(300, heads, dim, seed=2)
    for position in (0, 15, 16, 63, 64, 100, 191):
        group = [make_group(0, range(position, position + 1), range(5), 64, pattern)]
        alone = attend(queries[position : position + 1], pools, group)[0]
        for rows in (2, 3, 5, 8, 17, 40):
            for index in {0, rows // 2, rows - 1}:
                start = position - index
                if start < 0:
                    continue
                group = [make_group(0, range(start, start + rows), range(5), 64, pattern)]
                assert torch.equal(attend(queries[start : start + rows], pools, group)[index], alone), (rows, index)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 32), (32, 8, 128)])
@pytest.mark.parametrize("window", [0, 3, 70])
@pytest.mark.parametrize(("base", "rows"), [(1, 5), (40, 64), (63, 9), (64, 2), (117, 24), (300, 33)])
def test_a_row_of_a_tree_is_to_the_bit_the_row_plain_decoding_computes(
    attend: Attend, heads: int, kv_heads: int, dim: int, window: int, base: int, rows: int
) -> None:
    pattern, parents = AttentionPattern(window), random_tree(rows, base)
    count = -(-(base + rows) // 64)
    pools, queries = random_pools(count, kv_heads, 64, dim), randn(rows, heads, dim, seed=5)
    together = attend(queries, pools, [make_tree_group(0, base, parents, range(count), 64, pattern)])
    for row in range(rows):
        way = [row]
        while parents[way[0]] >= 0:
            way.insert(0, parents[way[0]])
        own = [pool.transpose(1, 2).reshape(count * 64, kv_heads, dim).clone() for pool in pools]
        for flat in own:  # the ancestors move to consecutive slots, as committing them would
            flat[base : base + len(way)] = flat[[base + node for node in way]].clone()
        moved = [flat.view(count, 64, kv_heads, dim).transpose(1, 2).contiguous() for flat in own]
        last = base + len(way) - 1
        plain = attend(queries[row : row + 1], moved, [make_group(0, range(last, last + 1), range(count), 64, pattern)])
        assert torch.equal(together[row], plain[0]), row


def test_hidden_keys_are_not_even_read(attend: Attend) -> None:
    """Slots after a row, before a window, in other branches and in other sequences' pages hold NaN."""
    heads, kv_heads, dim = 6, 2, 32
    queries = randn(12, heads, dim, seed=8)
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    cases: list[tuple[RowGroup, list[int]]] = [  # the slots that at least one row sees
        (make_group(0, range(60, 72), [2, 0], 64, CAUSAL), [*range(72)]),
        (make_group(0, range(60, 72), [2, 0], 64, AttentionPattern(window=10)), [*range(51, 72)]),
        (make_group(0, range(60, 72), [2, 0], 64, AttentionPattern(causal=False), earliest=33), [*range(33, 72)]),
        (make_tree_group(0, 60, parents, [2, 0], 64, AttentionPattern(window=20)), [*range(41, 72)]),
    ]
    for group, seen in cases:
        healthy = random_pools(3, kv_heads, 64, dim)
        pools = [torch.full_like(pool, float("nan")) for pool in healthy]
        for slot in seen:
            page, offset = group.page_ids[slot // 64], slot % 64
            for pool, source in zip(pools, healthy, strict=True):
                pool[page, :, offset] = source[page, :, offset]
        assert torch.equal(attend(queries, pools, [group]), attend(queries, healthy, [group]))


def test_what_is_not_a_number_stays_with_the_rows_that_see_it(attend: Attend) -> None:
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    queries, pools = randn(12, 4, 16, seed=8), random_pools(2, 2, 64, 16)
    tree = [make_tree_group(0, 60, parents, [1, 0], 64, CAUSAL)]
    healthy = attend(queries, pools, tree)
    for pool in pools:
        pool[1, :, 62] = float("nan")  # the slot of row 2, whose branch holds the even rows
    seen = attend(queries, pools, tree)
    for row in range(12):
        spoiled = row > 0 and row % 2 == 0
        assert bool(seen[row].isnan().all()) if spoiled else torch.equal(seen[row], healthy[row]), row
    chain = [make_group(0, range(56, 68), [1, 0], 64, CAUSAL)]
    assert attend(queries, pools, chain).isnan().all(dim=1).tolist() == [position >= 62 for position in range(56, 68)]


def test_extreme_scores_give_what_softmax_gives(attend: Attend) -> None:
    queries, pools = randn(5, 4, 16, seed=1), random_pools(2, 2, 64, 16)
    pools[0][0, :, 30] = 1e4 * queries[2, 0]  # one key takes all weight of some rows and none of others
    group = [make_group(0, range(70, 75), [0, 1], 64, CAUSAL)]
    assert torch.allclose(attend(queries, pools, group).double(), exact(queries, pools, group, 0.2), atol=3e-6)
    pools[0][0, :, 9] = 3e38 * (torch.arange(16) == 0)  # overflows to either infinity
    seen, expected = attend(queries, pools, group, 10.0), row_attention(queries, *pools, group, 10.0)
    assert 0 < int(expected.isnan().sum()) < expected.numel()
    assert torch.equal(seen.isnan(), expected.isnan()) and torch.allclose(seen, expected, atol=1e-3, equal_nan=True)


def test_rows_that_see_nothing_are_no_numbers_as_with_torch(attend: Attend) -> None:
    queries, pools = randn(6, 4, 16, seed=1), random_pools(2, 2, 64, 16)
    group = [make_group(0, range(60, 66), [0, 1], 64, CAUSAL, earliest=63)]
    seen = attend(queries, pools, group)
    assert seen.isnan().all(dim=1).tolist() == [True, True, True, False, False, False]
    assert torch.allclose(seen[3:].double(), exact(queries, pools, group, 0.2)[3:], atol=3e-6)


def test_queries_may_stand_between_other_heads(attend: Attend) -> None:
    pools, wide = random_pools(2, 2, 64, 32), randn(7, 9, 32)
    group = [make_group(0, range(70, 77), [0, 1], 64, CAUSAL)]
    expected = attend(wide[:, :6].contiguous(), pools, group)
    assert torch.equal(attend(wide[:, :6], pools, group), expected)
    swapped = wide[:, :6].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(swapped, pools, group), expected)


def test_only_what_the_kernel_can_do_is_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, queries = random_pools(2, 2, 64, 32), randn(3, 4, 32)
    assert serves(queries, *pools)
    assert not serves(queries.double(), *pools) and not serves(queries, pools[0].double(), pools[1])
    assert not serves(queries, pools[0].transpose(2, 3), pools[1])
    for dim in (24, 8, 272):
        assert not serves(randn(3, 4, dim), *random_pools(2, 2, 64, dim)), dim
    odd = random_pools(2, 2, 64, 24)
    group = [make_group(0, range(70, 73), [0, 1], 64, CAUSAL)]
    rows = randn(3, 4, 24)
    assert torch.equal(attention(rows, *odd, group, 0.2), row_attention(rows, *odd, group, 0.2)), "torch serves"
    monkeypatch.setattr("slipstream.kernels.cpu.native_attention.library", lambda: None)
    assert torch.equal(attention(queries, *pools, group, 0.2), row_attention(queries, *pools, group, 0.2))


def test_the_compiled_kernel_serves_where_it_can() -> None:
    kernels = compiled("avx2")
    pools, queries = random_pools(2, 2, 64, 32), randn(3, 4, 32)
    group = [make_group(0, range(70, 73), [0, 1], 64, CAUSAL)]
    expected = native_attention(kernels, queries, *pools, group, 0.2, 1)
    assert torch.equal(attention(queries, *pools, group, 0.2), expected)
    assert not torch.equal(expected, row_attention(queries, *pools, group, 0.2)), "the two sum differently"


def numbers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def test_a_batch_becomes_one_struct_per_pattern() -> None:
    wide, narrow = AttentionPattern(), AttentionPattern(window=8)
    groups = {
        pattern: [
            make_group(0, range(62, 65), [7, 5, 9], 64, pattern, earliest=4),
            make_tree_group(3, 10, (-1, 0, 0), [2], 64, pattern),
        ]
        for pattern in (wide, narrow)
    }
    places = ([7, 7, 5, 2, 2, 2], [62, 63, 0, 10, 11, 12])
    batch = RowBatch([4, 5, 6, 1, 2, 3], [62, 63, 64, 10, 11, 11], *places, 65, groups)
    struct = batch_struct(batch, narrow)
    assert batch_struct(batch, narrow) is struct and batch_struct(batch, wide) is not struct
    assert (struct.rows, struct.groups, struct.page_tokens) == (6, 2, 64)
    assert numbers(struct.group, 16) == [0, 3, 62, 4, 8, 1, 0, -1, 3, 6, 10, 0, 8, 1, 2, 0]
    assert numbers(batch_struct(batch, wide).group + 16, 1) == [0]
    assert numbers(struct.page_ids, 3) == [7, 5, 2], "pages behind the last row are left out"
    assert numbers(struct.parents, 3) == [-1, 0, 0]
    assert numbers(struct.positions, 6) == batch.positions.tolist()
    assert (numbers(struct.pages, 6), numbers(struct.offsets, 6)) == places
    assert (batch.pages.tolist(), batch.offsets.tolist()) == places and batch.token_ids.tolist() == [4, 5, 6, 1, 2, 3]


def test_groups_are_described_once_for_the_company_they_keep() -> None:
    first, second = (make_group(start, range(5, 6), [1], 64, CAUSAL) for start in (0, 1))
    alone, both = group_struct([first]), group_struct([first, second])
    assert (alone.groups, both.groups) == (1, 2)
    assert group_struct([first, second]) is both


def test_groups_outside_their_pages_are_refused() -> None:
    with pytest.raises(IntegrityError, match="outside its pages"):
        group_struct([make_group(0, range(62, 65), [7], 64, CAUSAL)])
    with pytest.raises(IntegrityError, match="before its parent"):
        group_struct([make_tree_group(0, 5, [-1, 0, 2], [7], 64, CAUSAL)])
