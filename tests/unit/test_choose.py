"""The choice of nodes and of drafts against brute force, and what a batch owes to each of its sequences."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from slipstream.speculative.choose import (
    LEAST_SHARE,
    DraftChoice,
    Offer,
    Prospect,
    StepTimes,
    best_draft,
    best_nodes,
    slot_options,
)
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.policy import Policy
from slipstream.types import Gate, Mode

STEPS = {1: 14.5, 2: 16.8, 4: 18.7, 8: 25.7, 16: 39.7, 32: 76.0, 64: 160.0}
DRAFTS = {3: 8.9, 7: 9.7, 15: 13.5}
FREE_STEPS = {1: 4.25, 64: 4.36, 1024: 6.0}


def table(steps: dict[int, float] = STEPS, branching: float = 1.0) -> CostTable:
    """Costs of a machine on which a step that branches takes `branching` times as long."""
    costs = CostTable(steps, DRAFTS)
    for _ in range(400 if branching != 1.0 else 0):
        for rows in (2, 4, 8, 16):
            costs.observe_step(StepShape(1, rows, 100, False, True), branching * steps[rows])
            costs.observe_step(StepShape(1, rows, 100, False, False), steps[rows])
    return costs


def times(costs: CostTable, batch: int, nodes: int) -> StepTimes:
    return StepTimes(costs, StepShape(batch, batch, 100, False, False), nodes)


def offer(survivals: list[float], straight: int | None = None) -> Offer:
    own = Policy(CostTable(STEPS, DRAFTS)).sequence(Mode.parse("auto"), Gate("auto"), 15)
    return Offer(own, 100, False, survivals, len(survivals) if straight is None else straight)


def random_offer(rng: random.Random, nodes: int, straight: bool) -> Offer:
    skill = rng.choice((0.05, 0.3, 1.0))
    survivals = sorted((rng.random() ** skill for _ in range(rng.randint(0, nodes))), reverse=True)
    return offer(survivals, len(survivals) if straight else rng.randint(0, len(survivals)))


def value(step: StepTimes, offers: list[Offer], counts: tuple[int, ...] | list[int], price: float) -> float:
    branching = any(count > each.straight for each, count in zip(offers, counts, strict=True))
    ms = (step.branched if branching else step.straight)[sum(counts)]
    return sum(sum(each.survivals[:count]) for each, count in zip(offers, counts, strict=True)) - price * ms


def is_fair(step: StepTimes, offers: list[Offer], counts: tuple[int, ...] | list[int], spent_ms: float) -> bool:
    """Whether each sequence gets its least share of the tokens per millisecond of plain steps."""
    branching = any(count > each.straight for each, count in zip(offers, counts, strict=True))
    ms = spent_ms + (step.branched if branching else step.straight)[sum(counts)]
    tokens = [1.0 + sum(each.survivals[:count]) for each, count in zip(offers, counts, strict=True)]
    tokens += [1.0] * (step.batch - len(offers))
    return step.batch == 1 or not sum(counts) or min(tokens) / ms >= LEAST_SHARE / step.plain_ms - 1e-12


def prefixes(offers: list[Offer]) -> list[list[int]]:
    """The counts of every prefix of all nodes, the likeliest first."""
    ranked = sorted(((-chance, index) for index, each in enumerate(offers) for chance in each.survivals))
    found = [[0] * len(offers)]
    for _, index in ranked:
        found.append([count + (place == index) for place, count in enumerate(found[-1])])
    return found


@pytest.mark.parametrize(("count", "others"), [(1, 0), (2, 0), (4, 0), (1, 3), (2, 1)])
@pytest.mark.parametrize("branching", [1.0, 1.6])
def test_the_chosen_nodes_are_the_best_fair_prefix(count: int, others: int, branching: float) -> None:
    rng, costs = random.Random(count), table(branching=branching)
    widths, refused = set(), 0
    for _ in range(300):
        offers = [random_offer(rng, 16 // count, straight=False) for _ in range(count)]
        step = times(costs, count + others, sum(len(each.survivals) for each in offers))
        price, spent_ms = step.plain_rate * rng.uniform(0.3, 3.0), rng.choice((0.0, 9.0, 25.0))
        chosen = best_nodes(step, offers, spent_ms, price)
        fair = [counts for counts in prefixes(offers) if is_fair(step, offers, counts, spent_ms)]
        assert chosen in fair
        best = max(value(step, offers, counts, price) for counts in fair)
        assert value(step, offers, chosen, price) == pytest.approx(best, abs=1e-9)
        widths.add(sum(chosen))
        refused += max(value(step, offers, counts, price) for counts in prefixes(offers)) > best + 1e-9
    assert len(widths) > 6 and (refused > 5) is (count + others > 1), "the cases ask for something"


@pytest.mark.parametrize("speed", [1.0, 1.8])
def test_no_combination_of_chains_is_worth_more(speed: float) -> None:
    rng, costs = random.Random(2), table()
    compared = 0
    for _ in range(60):
        offers = [random_offer(rng, 5, straight=True) for _ in range(3)]
        step = times(costs, 3, sum(len(each.survivals) for each in offers))
        price = speed * step.plain_rate
        everything = list(itertools.product(*(range(len(each.survivals) + 1) for each in offers)))
        best = max(everything, key=lambda counts: value(step, offers, counts, price))
        worth = value(step, offers, best_nodes(step, offers, 9.0, price), price)
        assert worth <= value(step, offers, best, price) + 1e-9
        if is_fair(step, offers, best, 9.0):
            compared += 1
            assert worth == pytest.approx(value(step, offers, best, price), abs=1e-9)
    assert compared > 20


def test_a_text_that_is_easy_to_draft_leaves_its_neighbours_half_of_their_speed() -> None:
    offers = [offer([0.99 ** (slot + 1) for slot in range(15)]), offer([]), offer([])]
    step = times(table(), 3, 15)
    (easy, *others) = best_nodes(step, offers, 9.0, 0.01 * step.plain_rate)
    assert 0 < easy < 15 and others == [0, 0]
    assert 9.0 + step.straight[easy] <= step.plain_ms / LEAST_SHARE < 9.0 + step.straight[easy + 1]
    assert best_nodes(times(table(), 1, 15), offers[:1], 9.0, 0.01 * step.plain_rate) == [15], "alone it may have all"


def test_nothing_is_chosen_where_nothing_is_offered_or_worth_a_row() -> None:
    step = times(table(), 2, 6)
    assert best_nodes(step, [], 0.0, step.plain_rate) == []
    assert best_nodes(step, [offer([])], 0.0, step.plain_rate) == [0]
    assert best_nodes(step, [offer([0.01, 0.01]), offer([0.0])], 0.0, step.plain_rate) == [0, 0]
    assert best_nodes(step, [offer([0.5] * 3), offer([0.4] * 3)], 0.0, math.inf) == [0, 0]


def test_likelier_and_cheaper_nodes_are_taken_in_larger_numbers() -> None:
    step = times(table(), 1, 15)
    chains = [[chance ** (slot + 1) for slot in range(15)] for chance in (0.3, 0.6, 0.8, 0.95)]
    (widths,) = zip(*(best_nodes(step, [offer(chain)], 0.0, 1.5 * step.plain_rate) for chain in chains), strict=True)
    assert list(widths) == sorted(widths) and len(set(widths)) == 4
    dearer = [best_nodes(step, [offer(chains[2])], 0.0, price * step.plain_rate)[0] for price in (1.0, 1.5, 2.5, 9.0)]
    assert dearer == sorted(dearer, reverse=True) and len(set(dearer)) == 4 and dearer[-1] == 0


def test_branching_is_priced_as_branching() -> None:
    tree = offer([0.8, 0.75, 0.6, 0.55, 0.4], straight=1)
    for branching, nodes in ((1.0, 5), (4.0, 1)):
        step = times(table(branching=branching), 1, 5)
        assert best_nodes(step, [tree], 0.0, step.plain_rate) == [nodes]


def test_rows_that_cost_nothing_are_filled() -> None:
    step = times(table(FREE_STEPS), 1, 63)
    assert best_nodes(step, [offer([0.5] + [0.15] * 62, straight=1)], 0.0, step.plain_rate) == [63]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafts", [DRAFTS, {3: 1.0, 15: 2.0}, {3: 14.0, 15: 40.0}], ids=["usual", "cheap", "dear"])
def test_the_best_draft_is_the_best_of_all_combinations(batch: int, drafts: dict[int, float]) -> None:
    rng, costs, options = random.Random(batch), CostTable(STEPS, drafts), (3, 7, 15)
    step, found = times(costs, batch, 15), set[DraftChoice]()
    for _ in range(200):
        prospects = []
        for _ in range(rng.randint(1, batch)):
            tokens, rows_ms = sorted(rng.uniform(0, 6) for _ in options), sorted(rng.uniform(0, 9) for _ in options)
            prospects.append([Prospect(*each) for each in zip(tokens, rows_ms, strict=True)])
        speeds = {DraftChoice(options[0], 0, 0.0): 0.0}
        for (place, slots), drafting in itertools.product(enumerate(options), range(1, len(prospects) + 1)):
            taken = [each[place] for each in prospects[:drafting]]
            ms = step.plain_ms + sum(each.rows_ms for each in taken) + costs.draft_ms(drafting, slots, 100)
            fewest = min(each.tokens for each in taken) if drafting == batch else 0.0
            if (1.0 + fewest) / ms >= LEAST_SHARE / step.plain_ms:
                speed = (batch + sum(each.tokens for each in taken)) / ms / (batch / step.plain_ms)
                speeds[DraftChoice(slots, drafting, speed)] = speed
        best = max(speeds, key=speeds.__getitem__)
        chosen = best_draft(costs, step, options, prospects)
        assert chosen[:2] == best[:2] and chosen.speed == pytest.approx(best.speed)
        found.add(chosen[:2])  # type: ignore[arg-type]
    assert len(found) > 2


def test_without_a_drafter_nothing_is_drafted() -> None:
    costs = CostTable(STEPS, {})
    assert best_draft(costs, times(costs, 1, 15), (3, 7), [[Prospect(3.0, 0.0)] * 2]) == DraftChoice(3, 0, 0.0)
    assert best_draft(costs, times(costs, 1, 15), (3, 7), []) == DraftChoice(3, 0, 0.0)


@pytest.mark.parametrize(
    ("deepest", "options"), [(0, ()), (1, (1,)), (3, (3,)), (7, (3, 5, 7)), (20, (3, 5, 7, 15, 20))]
)
def test_few_numbers_of_slots_are_compared(deepest: int, options: tuple[int, ...]) -> None:
    assert slot_options(deepest) == options
