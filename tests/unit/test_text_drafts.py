"""Nodes from the text beside those of a drafter: one tree of both, against a tree that is worked out path by path."""

from __future__ import annotations

import random

import pytest

from slipstream.speculative.estimate import DraftOutcome, Estimate, Record
from slipstream.speculative.suffix_index import text_index
from slipstream.speculative.text_drafts import MOST_TEXT_NODES, merged, ordered
from slipstream.speculative.tree import Growth
from slipstream.types import Source

Path = tuple[int, ...]


def some_estimate(chance: random.Random) -> Estimate:
    """An estimate that trusts the sources differently, as after some verified steps."""
    estimate = Estimate(Record())
    luck = [chance.random() for _ in Source]
    for _ in range(chance.choice([0, 40, 400])):
        source = chance.choice(list(Source))
        estimate.learn([DraftOutcome(chance.random(), chance.randint(1, 8), chance.random() < luck[source], source)])
    return estimate


def some_growth(chance: random.Random, nodes: int, source: Source, estimate: Estimate) -> Growth:
    """A random tree in best-first order, as drafters and texts offer them."""
    growth = Growth([7], sources=[] if source == Source.DRAFTER else [source])
    taken: set[tuple[int, int]] = set()
    for _ in range(nodes):
        parent, token = chance.randrange(len(growth.tokens)), chance.randrange(4)
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        claim = chance.choice([0.05, 0.3, 0.5, 0.9, 0.99])
        survival = growth.survivals[parent] * estimate.chance(claim, growth.depths[parent] + 1, source)
        growth.add(parent, token, claim, survival)
        if growth.sources:
            growth.sources.append(source)
    return sorted_growth(growth)


def sorted_growth(growth: Growth) -> Growth:
    """The same tree with its likeliest nodes first; it keeps the sources as they are, also if there are none."""
    if growth.sources:
        return ordered(growth)
    growth.sources = [Source.DRAFTER] * len(growth.tokens)
    growth = ordered(growth)
    growth.sources = []
    return growth


def paths_of(growth: Growth) -> list[Path]:
    paths: list[Path] = [()]
    for row in range(1, len(growth.tokens)):
        paths.append((*paths[growth.parents[row]], growth.tokens[row]))
    return paths


def check_tree(growth: Growth) -> None:
    """Checks that every prefix of the nodes is a tree in which no node stands twice, the likeliest nodes first."""
    assert growth.parents[0] == -1 and len(growth.sources) == len(growth.tokens)
    for row in range(1, len(growth.tokens)):
        assert 0 <= growth.parents[row] < row
        assert growth.depths[row] == growth.depths[growth.parents[row]] + 1
    paths = paths_of(growth)
    assert len(set(paths)) == len(paths)
    assert growth.survivals == sorted(growth.survivals, reverse=True)


def naive_union(drafter: Growth, text: Growth, estimate: Estimate) -> dict[Path, tuple[float, Source, float]]:
    """The claim, source and survival of every path that the drafter or the text has."""
    own = dict(zip(paths_of(drafter), drafter.claims, strict=True))
    its = dict(zip(paths_of(text), text.claims, strict=True))
    union: dict[Path, tuple[float, Source, float]] = {(): (1.0, Source.DRAFTER, 1.0)}
    for path in sorted({*own, *its} - {()}, key=len):
        if path in own:
            claim, source = own[path], Source.DRAFTER
        else:  # the drafter's own continuations at this place leave the rest of the probability to the text
            siblings = [chance for other, chance in own.items() if other and other[:-1] == path[:-1]]
            claim, source = its[path] * max(0.0, 1.0 - sum(siblings)), Source.TEXT
        union[path] = claim, source, union[path[:-1]][2] * estimate.chance(claim, len(path), source)
    return union


@pytest.mark.parametrize("seed", range(60))
def test_one_tree_of_both_holds_the_likeliest_nodes_of_both(seed: int) -> None:
    chance = random.Random(seed)
    estimate = some_estimate(chance)
    drafter = some_growth(chance, chance.choice([0, 1, 8, 40]), Source.DRAFTER, estimate)
    text = some_growth(chance, chance.choice([1, 8, 40]), Source.TEXT, estimate)
    nodes = chance.choice([1, 5, 63])
    growth, union = merged(drafter, text, estimate.chance, nodes), naive_union(drafter, text, estimate)
    check_tree(growth)
    assert growth.nodes == min(nodes, len(union) - 1)
    for row, path in enumerate(paths_of(growth)):
        claim, source, survival = union[path]
        assert (growth.claims[row], growth.survivals[row]) == pytest.approx((claim, survival))
        assert row == 0 or growth.sources[row] == source
    best = sorted((survival for path, (_, _, survival) in union.items() if path), reverse=True)
    assert growth.survivals[1:] == pytest.approx(best[: growth.nodes])


def test_a_text_that_offers_nothing_leaves_the_drafters_tree_alone() -> None:
    estimate = Estimate(Record())
    drafter = some_growth(random.Random(3), 9, Source.DRAFTER, estimate)
    assert merged(drafter, Growth([7], sources=[Source.TEXT]), estimate.chance, 63) is drafter


@pytest.mark.parametrize("seed", range(20))
def test_a_text_offers_its_likely_continuations_and_no_others(seed: int) -> None:
    chance = random.Random(seed)
    estimate, index = some_estimate(chance), text_index()
    index.extend([chance.randrange(3) for _ in range(200)])
    depth, floor = chance.choice([1, 6, 30]), chance.choice([0.0, 0.05, 0.5])
    growth = index.grow(MOST_TEXT_NODES, depth, estimate, floor)
    check_tree(growth)
    assert max(growth.depths) <= depth and growth.nodes <= MOST_TEXT_NODES
    assert min(growth.survivals) >= floor and set(growth.sources) == {Source.TEXT}
    everything = index.grow(10_000, depth)
    survivals: dict[Path, float] = {(): 1.0}
    for row, path in enumerate(paths_of(everything)[1:], start=1):
        survivals[path] = survivals[path[:-1]] * estimate.chance(everything.claims[row], len(path), Source.TEXT)
    likely = sorted((survival for survival in survivals.values() if survival >= floor), reverse=True)
    assert growth.survivals == pytest.approx(likely[: MOST_TEXT_NODES + 1])
    assert growth.survivals == pytest.approx([survivals[path] for path in paths_of(growth)])


@pytest.mark.parametrize("seed", range(20))
def test_a_text_without_a_likely_first_token_is_not_searched(seed: int) -> None:
    chance = random.Random(seed)
    estimate, index = some_estimate(chance), text_index()
    index.extend([chance.randrange(4) for _ in range(100)])
    everything = index.grow(MOST_TEXT_NODES, 8, estimate)
    likeliest = max(everything.survivals[1:])
    assert index.grow(MOST_TEXT_NODES, 8, estimate, first=likeliest) == everything
    assert index.grow(MOST_TEXT_NODES, 8, estimate, first=1.01).nodes == 0
