"""Draft trees against brute force: all prefixes are listed, and the most probable ones must be the tree."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from slipstream.speculative.tree import Branch, Drafts, Growth, grow_chain, grow_tree

ANCHOR = 100
Prefix = tuple[int, ...]


class TableDrafts:
    """The same candidates in a slot whatever came before."""

    def __init__(self, slots: int, candidates: int, rng: random.Random) -> None:
        self.slots = slots
        self.rows = [spread(candidates, rng) for _ in range(slots)]
        self.names = [rng.sample(range(50), candidates) for _ in range(slots)]

    def after(self, slot: int, previous: int, memory: object) -> Branch:
        return Branch(self.names[slot], self.rows[slot])


class ParentDrafts:
    """Candidates that depend on the token before and on everything before that, which only the memory tells."""

    def __init__(self, slots: int, candidates: int, seed: int) -> None:
        self.slots = slots
        self.candidates = candidates
        self.seed = seed
        self.asked: list[tuple[int, int, object]] = []

    def after(self, slot: int, previous: int, memory: object) -> Branch:
        self.asked.append((slot, previous, memory))
        past = (memory or ()) + (previous,)  # type: ignore[operator]
        assert len(past) == slot + 1, "the memory of another depth"
        rng = random.Random(f"{self.seed} {past}")
        count = rng.randrange(self.candidates + 1) if slot else self.candidates
        return Branch(rng.sample(range(50), count), spread(count, rng), past)


def spread(count: int, rng: random.Random) -> list[float]:
    """Falling probabilities that leave something for what is not among them."""
    weights = sorted((rng.random() ** 3 + 1e-3 for _ in range(count)), reverse=True)
    return [weight / (sum(weights) * 1.1) for weight in weights]


def all_prefixes(drafts: Drafts, depth: int) -> dict[Prefix, float]:
    """Every prefix and its probability, found by walking everywhere."""
    found: dict[Prefix, float] = {}

    def walk(prefix: Prefix, chance: float, memory: object) -> None:
        if len(prefix) < min(depth, drafts.slots):
            branch = drafts.after(len(prefix), prefix[-1] if prefix else ANCHOR, memory)
            for token, own in zip(branch.tokens, branch.claims, strict=True):
                found[*prefix, token] = chance * own
                walk((*prefix, token), chance * own, branch.memory)

    walk((), 1.0, None)
    return found


def prefixes(growth: Growth) -> list[Prefix]:
    """The token strings of all nodes; parents must come before their children."""
    ways: list[Prefix] = [()]
    for row in range(1, len(growth.tokens)):
        assert 0 <= growth.parents[row] < row
        ways.append((*ways[growth.parents[row]], growth.tokens[row]))
        assert growth.depths[row] == len(ways[row])
    assert len(set(ways)) == len(ways), "a prefix twice"
    return ways[1:]


def families() -> list[tuple[str, Callable[[int], Drafts]]]:
    return [
        ("4x3", lambda seed: TableDrafts(4, 3, random.Random(seed))),
        ("2x6", lambda seed: TableDrafts(2, 6, random.Random(seed))),
        ("6x2", lambda seed: TableDrafts(6, 2, random.Random(seed))),
        ("1x5", lambda seed: TableDrafts(1, 5, random.Random(seed))),
        ("by parent", lambda seed: ParentDrafts(4, 4, seed)),
    ]


@pytest.mark.parametrize(("_", "make"), families(), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_a_tree_is_the_most_probable_prefixes(_: str, make: Callable[[int], Drafts], depth: int) -> None:
    for seed, nodes in itertools.product(range(8), (1, 2, 5, 13, 40)):
        drafts = make(seed)
        everything = all_prefixes(drafts, depth)
        growth = grow_tree(drafts, ANCHOR, nodes, depth)
        mine = prefixes(growth)
        assert len(mine) == min(nodes, len(everything))
        best = sorted(everything.values(), reverse=True)[: len(mine)]
        assert [everything[prefix] for prefix in mine] == pytest.approx(best), "in order, equals in any order"
        assert growth.survivals[1:] == pytest.approx(best)
        assert max(growth.depths) <= depth


@pytest.mark.parametrize("candidates", [1, 3])
def test_ties_fill_the_tree_all_the_same(candidates: int) -> None:
    drafts = TableDrafts(3, candidates, random.Random(0))
    drafts.rows = [[0.25] * candidates for _ in range(3)]
    growth = grow_tree(drafts, ANCHOR, 7, 3)
    best = sorted(all_prefixes(drafts, 3).values(), reverse=True)[:7]
    assert growth.survivals[1:] == pytest.approx(best)
    prefixes(growth)


def test_every_cut_of_a_growth_is_a_tree_of_the_most_probable_prefixes() -> None:
    drafts = ParentDrafts(5, 3, seed=3)
    growth = grow_tree(drafts, ANCHOR, 30, 5)
    assert growth.nodes == 30
    for nodes in range(31):
        proposal = growth.proposal(nodes)
        assert proposal.nodes == nodes and proposal.tokens[0] == ANCHOR and proposal.parents[0] == -1
        assert all(parent < row for row, parent in enumerate(proposal.parents))
        assert proposal == grow_tree(drafts, ANCHOR, nodes, 5).proposal()
        assert proposal.depths == tuple(growth.depths[: nodes + 1])
    assert growth.proposal().nodes == 30


def test_a_chance_is_that_of_a_token_behind_its_parent() -> None:
    growth = grow_tree(ParentDrafts(4, 4, seed=5), ANCHOR, 25, 4)
    proposal = growth.proposal()
    assert proposal.claims[0] == 1.0
    for row in range(1, 26):
        parent = growth.parents[row]
        assert growth.survivals[row] == pytest.approx(growth.survivals[parent] * proposal.claims[row])


def jagged(claimed: float, depth: int) -> float:
    """Neither monotone in the claim nor in the depth."""
    return 0.05 + 0.9 * abs(math.sin(37 * claimed + depth))


@pytest.mark.parametrize("seeded", [False, True])
def test_survival_never_rises_even_under_a_calibration_that_is_not_monotone(seeded: bool) -> None:
    for seed in range(10):
        drafts = ParentDrafts(5, 4, seed)
        growth = grow_tree(drafts, ANCHOR, 40, 5, jagged, seeded=seeded)
        prefixes(growth)
        chain = grow_chain(drafts, ANCHOR, 5, jagged).nodes if seeded else 0
        for part in (growth.survivals[: chain + 1], growth.survivals[chain + 1 :]):
            assert part == sorted(part, reverse=True)
        for row in range(1, len(growth.tokens)):
            parent = growth.parents[row]
            claim = growth.survivals[parent] * jagged(growth.claims[row], growth.depths[row])
            assert growth.survivals[row] <= claim + 1e-12


def test_a_calibration_decides_what_is_worth_a_row() -> None:
    drafts = TableDrafts(4, 3, random.Random(1))
    wide = grow_tree(drafts, ANCHOR, 12, 4, lambda claimed, depth: claimed if depth == 1 else 0.01 * claimed)
    deep = grow_tree(drafts, ANCHOR, 12, 4, lambda claimed, depth: claimed**0.1)
    assert sum(depth == 1 for depth in wide.depths) == 3 and sum(wide.depths) < sum(deep.depths)


@pytest.mark.parametrize("length", range(8))
def test_a_chain_is_the_best_candidate_behind_the_best_candidate(length: int) -> None:
    drafts = TableDrafts(5, 3, random.Random(2))
    growth = grow_chain(drafts, ANCHOR, length)
    expected = [names[0] for names in drafts.names[:length]]
    assert growth.tokens == [ANCHOR, *expected]
    assert growth.parents == list(range(-1, len(expected)))
    best = [row[0] for row in drafts.rows[:length]]
    assert growth.survivals == pytest.approx([math.prod(best[:count]) for count in range(len(best) + 1)])
    assert growth.proposal().branching is False


def test_a_chain_ends_where_nothing_is_offered() -> None:
    for seed in range(30):
        drafts = ParentDrafts(6, 1, seed)
        growth = grow_chain(drafts, ANCHOR, 6)
        deepest = max(map(len, all_prefixes(drafts, 6)), default=0)
        assert growth.nodes == deepest


@pytest.mark.parametrize("nodes", range(1, 20))
def test_a_seeded_tree_holds_the_chain_first_and_is_cut_to_its_rows(nodes: int) -> None:
    for seed in range(6):
        drafts = ParentDrafts(6, 3, seed)
        chain = prefixes(grow_chain(drafts, ANCHOR, 6))
        growth = grow_tree(drafts, ANCHOR, nodes, 6, seeded=True)
        mine, everything = prefixes(growth), all_prefixes(drafts, 6)
        assert mine[: len(chain)] == chain[:nodes]
        assert len(mine) == min(nodes, len(everything))
        others = [chance for prefix, chance in everything.items() if prefix not in chain]
        rest = [everything[prefix] for prefix in mine[len(chain) :]]
        assert rest == pytest.approx(sorted(others, reverse=True)[: len(rest)]), "behind it the best of what is left"


def test_two_rows_are_the_anchor_and_the_best_guess_seeded_or_not() -> None:
    drafts = TableDrafts(4, 3, random.Random(3))
    for seeded in (False, True):
        proposal = grow_tree(drafts, ANCHOR, 1, 4, seeded=seeded).proposal()
        assert (proposal.tokens, proposal.parents) == ((ANCHOR, drafts.names[0][0]), (-1, 0))


@pytest.mark.parametrize("floor", [0.0, 0.01, 0.1, 0.3, 1.0])
def test_nothing_under_the_floor_takes_a_row(floor: float) -> None:
    drafts = TableDrafts(4, 3, random.Random(4))
    worth = [chance for chance in all_prefixes(drafts, 4).values() if chance >= floor]
    growth = grow_tree(drafts, ANCHOR, 1000, 4, floor=floor)
    assert sorted(growth.survivals[1:]) == pytest.approx(sorted(worth))
    exact = grow_tree(drafts, ANCHOR, 9, 4).survivals[9]
    assert grow_tree(drafts, ANCHOR, 1000, 4, floor=exact).nodes == 9, "the floor itself is enough"


def test_the_memory_of_a_node_is_that_of_its_own_way() -> None:
    """ParentDrafts checks the length of what it is handed; here the way itself is compared."""
    for seeded in (False, True):
        drafts = ParentDrafts(5, 3, seed=11)
        growth = grow_tree(drafts, ANCHOR, 40, 5, seeded=seeded)
        ways: dict[int, Sequence[int]] = {0: (ANCHOR,)}
        for row in range(1, len(growth.tokens)):
            ways[row] = (*ways[growth.parents[row]], growth.tokens[row])
        opened = {(*(memory or ()), previous) for _, previous, memory in drafts.asked}  # type: ignore[misc]
        inner = {tuple(way) for row, way in ways.items() if growth.depths[row] < 5}
        assert opened == inner, "every node was asked for its successors, on its own way and no other"


def test_no_slots_no_room_and_no_rows_leave_the_anchor_alone() -> None:
    empty, drafts = TableDrafts(0, 0, random.Random(0)), TableDrafts(4, 3, random.Random(0))
    for seeded in (False, True):
        for growth in (
            grow_tree(empty, ANCHOR, 8, 8, seeded=seeded),
            grow_tree(drafts, ANCHOR, 8, 0, seeded=seeded),
            grow_tree(drafts, ANCHOR, 0, 8, seeded=seeded),
        ):
            assert (growth.tokens, growth.parents, growth.nodes) == ([ANCHOR], [-1], 0)
