"""Attention over pages equals dense fp64 attention, and a row has the same bits whatever rows are beside it."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.torch_kernels import group_layout, page_runs, row_attention, write_rows
from slipstream.kernels.rows import AttentionPattern, make_group, make_tree_group

PAGE = 64
CAUSAL = AttentionPattern()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Sequence:
    """Keys, values and queries of one sequence by position."""

    def __init__(self, length: int, heads: int, kv_heads: int, dim: int, seed: int = 0) -> None:
        source = generator(seed)
        self.length = length
        self.keys = torch.randn(length, kv_heads, dim, generator=source)
        self.values = torch.randn(length, kv_heads, dim, generator=source)
        self.queries = torch.randn(length, heads, dim, generator=source)
        self.scale = dim**-0.5

    def store(self, pools: tuple[Tensor, Tensor], pages: list[int], page: int = PAGE) -> None:
        positions = torch.arange(self.length)
        where = torch.tensor(pages)[positions // page]
        write_rows(pools[0], where, positions % page, self.keys)
        write_rows(pools[1], where, positions % page, self.values)


def empty_pools(pages: int, kv_heads: int, dim: int, page: int = PAGE, filler: float = 0.0) -> tuple[Tensor, Tensor]:
    return torch.full((pages, kv_heads, page, dim), filler), torch.full((pages, kv_heads, page, dim), filler)


def attend(
    sequence: Sequence,
    positions: range,
    pages: list[int],
    pools: tuple[Tensor, Tensor],
    pattern: AttentionPattern = CAUSAL,
    earliest: int = 0,
    page: int = PAGE,
) -> Tensor:
    group = make_group(0, positions, pages, page, pattern, earliest)
    queries = sequence.queries[positions.start : positions.stop]
    return row_attention(queries, *pools, [group], sequence.scale)


def dense(sequence: Sequence, positions: range, pattern: AttentionPattern, earliest: int) -> Tensor:
    """Computes one row, one head at a time in fp64; what the row sees is given by positions."""
    heads, kv_heads = sequence.queries.shape[1], sequence.keys.shape[1]
    rows = []
    for q in positions:
        seen = [
            k
            for k in range(earliest, positions.stop)
            if (not pattern.causal or k <= q) and (not pattern.window or abs(q - k) < pattern.window)
        ]
        keys, values = sequence.keys[seen].double(), sequence.values[seen].double()
        for head in range(heads):
            shared = head // (heads // kv_heads)
            weights = (keys[:, shared] @ sequence.queries[q, head].double() * sequence.scale).softmax(dim=0)
            rows.append(weights @ values[:, shared])
    return torch.cat(rows).view(len(positions), -1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("pattern", "earliest"),
    [
        (AttentionPattern(), 0),
        (AttentionPattern(causal=False), 0),
        (AttentionPattern(window=9), 0),
        (AttentionPattern(window=9, causal=False), 0),
        (AttentionPattern(causal=False), 21),
        (AttentionPattern(window=30), 21),
        (AttentionPattern(window=1), 0),
    ],
    ids=str,
)
def test_scattered_pages_match_dense_attention(
    heads: int, kv_heads: int, pattern: AttentionPattern, earliest: int
) -> None:
    page, pages = 8, [5, 6, 2, 9, 0, 1]
    sequence = Sequence(45, heads, kv_heads, 16)
    pools = empty_pools(10, kv_heads, 16, page, filler=1e4)  # the contents of other sequences' slots must not matter
    sequence.store(pools, pages, page)
    for positions in (range(44, 45), range(37, 45), range(32, 45), range(40, 45)):
        expected = dense(sequence, positions, pattern, earliest)
        seen = attend(sequence, positions, pages, pools, pattern, earliest, page)
        assert torch.allclose(seen.double(), expected, atol=2e-6), positions
    if earliest == 0:
        first = range(45)
        seen = attend(sequence, first, pages, pools, pattern, 0, page)
        assert torch.allclose(seen.double(), dense(sequence, first, pattern, 0), atol=2e-6)


def test_a_batch_of_sequences_is_each_sequence_on_its_own() -> None:
    pools = empty_pools(12, 2, 16)
    sequences = [Sequence(length, 4, 2, 16, seed) for seed, length in enumerate((70, 5, 200, 64))]
    pages = [[3, 1], [0], [7, 8, 2, 11], [5]]
    spans = [range(60, 70), range(4, 5), range(183, 200), range(64)]
    groups, queries, start = [], [], 0
    for sequence, own, span in zip(sequences, pages, spans, strict=True):
        sequence.store(pools, own)
        groups.append(make_group(start, span, own, PAGE, CAUSAL))
        queries.append(sequence.queries[span.start : span.stop])
        start += len(span)
    together = row_attention(torch.cat(queries), *pools, groups, sequences[0].scale)
    for sequence, own, span, group in zip(sequences, pages, spans, groups, strict=True):
        part = together[group.start : group.stop]
        assert torch.equal(part, attend(sequence, span, own, pools)), "to the last bit"
        assert torch.allclose(part.double(), dense(sequence, span, CAUSAL, 0), atol=2e-6)


SHAPES = [(9, 3, 64), (4, 4, 16), (8, 2, 64), (32, 8, 128)]
ENDS = [1, 17, 60, 64, 65, 130, 1100]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("length", ENDS)
def test_a_row_is_the_same_to_the_bit_in_any_number_of_rows(heads: int, kv_heads: int, dim: int, length: int) -> None:
    """Computes row `length` alone (plain decoding), and as first, middle or last of 2 to 17 rows (verify)."""
    total = length + 17
    sequence = Sequence(total, heads, kv_heads, dim)
    pages = list(range(math.ceil(total / PAGE)))
    pools = empty_pools(len(pages), kv_heads, dim)
    sequence.store(pools, pages)
    alone = attend(sequence, range(length, length + 1), pages, pools)[0]
    for rows in range(2, 18):
        for index in {0, rows // 2, rows - 1}:
            start = length - index
            if start < 0:
                continue
            several = attend(sequence, range(start, start + rows), pages, pools)
            assert torch.equal(several[index], alone), (rows, index)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES[:3])
def test_a_prefill_chunk_sums_like_single_rows(heads: int, kv_heads: int, dim: int) -> None:
    sequence = Sequence(300, heads, kv_heads, dim)
    pages = list(range(5))
    pools = empty_pools(5, kv_heads, dim)
    sequence.store(pools, pages)
    chunk = attend(sequence, range(44, 300), pages, pools)
    for position in range(44, 300, 17):
        assert torch.equal(chunk[position - 44], attend(sequence, range(position, position + 1), pages, pools)[0])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_a_row_is_the_same_to_the_bit_wherever_its_pages_lie(heads: int, kv_heads: int, dim: int) -> None:
    sequence = Sequence(330, heads, kv_heads, dim)
    results = []
    for pages in ([0, 1, 2, 3, 4, 5], [9, 7, 5, 3, 1, 0], [4, 5, 6, 0, 1, 9], [3, 8, 4, 9, 5, 0]):
        pools = empty_pools(10, kv_heads, dim, filler=7.0)
        sequence.store(pools, pages)
        results.append([attend(sequence, span, pages, pools) for span in (range(329, 330), range(313, 330))])
    for single, several in results[1:]:
        assert torch.equal(single, results[0][0]) and torch.equal(several, results[0][1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_rejected_rows_behind_it(threads: int) -> None:
    """Slots after the row hold the keys of an earlier proposal; they are masked and must not change the result."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        sequence = Sequence(100, 9, 3, 64)
        results = []
        for filler in (0.0, -3.0, 1e6):
            pools = empty_pools(2, 3, 64, filler=filler)
            sequence.store(pools, [0, 1])
            results.append(attend(sequence, range(90, 100), [0, 1], pools))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    finally:
        torch.set_num_threads(before)


TREE_SHAPES = [(9, 3, 64), (4, 4, 16), (8, 1, 32), (32, 8, 128)]


class Tree:
    """A random tree after `start` positions; the keys of row i are in slot start + i, whatever its position is."""

    def __init__(self, start: int, rows: int, heads: int, kv_heads: int, dim: int, page: int = PAGE) -> None:
        rng = random.Random(start * 1000 + rows)
        self.start, self.page, self.kv_heads = start, page, kv_heads
        self.parents = [-1, *[rng.randrange(row) for row in range(1, rows)]]
        self.sequence = Sequence(start + rows, heads, kv_heads, dim)
        count = -(-(start + rows) // page)
        self.pages = rng.sample(range(count + 5), count)
        self.pools = empty_pools(count + 5, kv_heads, dim, page, filler=1e4)
        self.sequence.store(self.pools, self.pages, page)

    def way(self, row: int) -> list[int]:
        """Returns the rows from the root to this row."""
        return [*self.way(self.parents[row]), row] if row else [0]

    def attend(self, pattern: AttentionPattern = CAUSAL) -> Tensor:
        group = make_tree_group(0, self.start, self.parents, self.pages, self.page, pattern)
        return row_attention(self.sequence.queries[self.start :], *self.pools, [group], self.sequence.scale)

    def plain(self, row: int, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Decodes the row on its own, with its ancestors' keys at the positions before it."""
        way = self.way(row)
        own = Sequence.__new__(Sequence)
        own.length, own.scale = self.start + len(way), self.sequence.scale
        slots = [*range(self.start), *[self.start + other for other in way]]
        own.keys, own.values = self.sequence.keys[slots], self.sequence.values[slots]
        own.queries = self.sequence.queries[slots]
        pools = empty_pools(self.pools[0].shape[0], self.kv_heads, own.keys.shape[-1], self.page, filler=-7.0)
        own.store(pools, self.pages, self.page)
        position = own.length - 1
        return attend(own, range(position, position + 1), self.pages, pools, pattern, page=self.page)[0]

    def dense(self, row: int, window: int = 0) -> Tensor:
        """Computes in fp64 over the committed positions and the ancestors, limited to the last `window` by depth."""
        slots = [*range(self.start), *[self.start + other for other in self.way(row)]][-window:]
        keys, values = self.sequence.keys[slots].double(), self.sequence.values[slots].double()
        query = self.sequence.queries[self.start + row].double()
        share = query.shape[0] // self.kv_heads
        return torch.cat(
            [
                (keys[:, head // share] @ query[head] * self.sequence.scale).softmax(dim=0) @ values[:, head // share]
                for head in range(query.shape[0])
            ]
        )


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), TREE_SHAPES)
@pytest.mark.parametrize(("start", "rows"), [(1, 5), (40, 64), (63, 9), (64, 2), (117, 24), (700, 33)])
def test_a_row_of_a_tree_is_to_the_bit_the_row_plain_decoding_computes(
    heads: int, kv_heads: int, dim: int, start: int, rows: int
) -> None:
    tree = Tree(start, rows, heads, kv_heads, dim)
    together = tree.attend()
    for row in range(rows):
        assert torch.equal(together[row], tree.plain(row)), row
        assert torch.allclose(together[row].double(), tree.dense(row), atol=4e-6), row


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), TREE_SHAPES[:3])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 20, 40])
def test_a_window_counts_depth_and_not_rows(heads: int, kv_heads: int, dim: int, window: int) -> None:
    for start in (3, 8, 21, 30):
        tree = Tree(start, 19, heads, kv_heads, dim, page=8)
        assert max(len(tree.way(row)) for row in range(19)) > 3
        pattern = AttentionPattern(window=window)
        together = tree.attend(pattern)
        for row in range(19):
            assert torch.allclose(together[row].double(), tree.dense(row, window), atol=4e-6), (start, row)


@pytest.mark.parametrize("window", [1, 3, 6, 70])
@pytest.mark.parametrize("start", [117, 126])
def test_rows_of_a_windowed_tree_equal_plain_rows_to_the_bit(start: int, window: int) -> None:
    """From position 126 on the tree reads a page for its root that a deeper row alone would not read."""
    tree, pattern = Tree(start, 24, 9, 3, 64), AttentionPattern(window=window)
    together = tree.attend(pattern)
    for row in range(24):
        assert torch.equal(together[row], tree.plain(row, pattern)), row


def test_a_tree_that_is_a_chain_equals_the_chain() -> None:
    tree = Tree(117, 16, 9, 3, 64)
    tree.parents = list(range(-1, 15))
    chain = attend(tree.sequence, range(117, 133), tree.pages, tree.pools)
    assert torch.equal(tree.attend(), chain)


def test_trees_share_a_batch_with_chains_and_single_rows() -> None:
    tree, chain = Tree(50, 20, 6, 2, 32), Sequence(90, 6, 2, 32, seed=5)
    pages = [page for page in range(tree.pools[0].shape[0]) if page not in tree.pages][:2]
    chain.store(tree.pools, pages)
    groups = [
        make_group(0, range(80, 90), pages, PAGE, CAUSAL),
        make_tree_group(10, 50, tree.parents, tree.pages, PAGE, CAUSAL),
        make_group(30, range(89, 90), pages, PAGE, CAUSAL),
    ]
    queries = torch.cat((chain.queries[80:], tree.sequence.queries[50:], chain.queries[89:]))
    together = row_attention(queries, *tree.pools, groups, chain.scale)
    assert torch.equal(together[10:30], tree.attend())
    assert torch.equal(together[:10], attend(chain, range(80, 90), pages, tree.pools))
    assert torch.equal(together[30], together[9])


def test_a_row_of_a_tree_reads_nothing_of_other_branches() -> None:
    """A sibling with NaN keys is not even multiplied by zero, and so does not spoil other rows."""
    tree = Tree(60, 12, 4, 2, 16)
    tree.parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    healthy = tree.attend()
    spoiled = [row for row in range(12) if 2 in tree.way(row)]
    tree.pools[0][tree.pages[62 // PAGE], :, 62 % PAGE] = float("nan")
    tree.pools[1][tree.pages[62 // PAGE], :, 62 % PAGE] = float("nan")
    seen = tree.attend()
    for row in range(12):
        assert bool(seen[row].isnan().any()) if row in spoiled else torch.equal(seen[row], healthy[row]), row


def test_pages_out_of_sight_are_not_read() -> None:
    windowed = make_group(0, range(500, 504), list(range(20, 28)), PAGE, AttentionPattern(window=70))
    layout = group_layout(windowed, 2)
    assert layout.runs == ((26, 28),) and layout.mask.shape == (4, 128), "positions 431 to 503 lie on pages 6 and 7"
    behind = make_group(0, range(500, 504), list(range(20, 30)), PAGE, CAUSAL)
    assert group_layout(behind, 2).runs == ((20, 28),), "nor those ahead"
    hidden = make_group(3, range(500, 504), list(range(20, 28)), PAGE, CAUSAL, earliest=128)
    assert group_layout(hidden, 2).runs == ((22, 28),)


def test_a_layout_is_worked_out_once_per_number_of_key_heads() -> None:
    tree = make_tree_group(0, 5, [-1, 0, 0], [3], PAGE, CAUSAL)
    first, second = group_layout(tree, 1), group_layout(tree, 2)
    assert group_layout(tree, 1) is first and group_layout(tree, 2) is second
    assert first.tail is not None and second.tail is not None
    assert (first.tail.shape[1], second.tail.shape[1]) == (1, 2)


def test_trees_are_causal() -> None:
    with pytest.raises(IntegrityError, match="see ahead"):
        make_tree_group(0, 5, [-1, 0, 0], [3], PAGE, AttentionPattern(causal=False))


def test_page_runs_join_neighbours_in_order() -> None:
    assert page_runs([4, 5, 6, 2, 3, 9, 8]) == ((4, 7), (2, 4), (9, 10), (8, 9))
    assert page_runs([]) == ()
    for pages in itertools.permutations(range(5)):
        assert [p for first, last in page_runs(pages) for p in range(first, last)] == list(pages)


def test_written_rows_land_in_their_slots_only() -> None:
    pool = torch.zeros(3, 2, 4, 5)
    values = torch.randn(3, 2, 5, generator=generator(1))
    write_rows(pool, torch.tensor([2, 0, 2]), torch.tensor([3, 1, 0]), values)
    for row, (page, offset) in enumerate([(2, 3), (0, 1), (2, 0)]):
        assert torch.equal(pool[page, :, offset], values[row])
        pool[page, :, offset] = 0.0
    assert pool.count_nonzero() == 0
