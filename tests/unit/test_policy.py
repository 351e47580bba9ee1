"""What the policy decides before and after drafting, what it learns from, and what its trials may cost."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest

from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.policy import Offer, Policy, RecentMeans, Rest, SequencePolicy, VerifyChoice, View
from slipstream.types import Gate, Mode, Proposal, Verdict

STEPS = {1: 14.5, 2: 16.8, 4: 18.7, 8: 25.7, 16: 39.7, 32: 76.0, 64: 160.0}
DRAFTS = {3: 8.9, 7: 9.7, 15: 13.5}
FREE_STEPS = {1: 4.25, 64: 4.36, 1024: 6.0}
FREE_DRAFTS = {3: 0.8, 7: 0.8, 15: 0.9}
DEAR_DRAFTS = {slots: 30 * ms for slots, ms in DRAFTS.items()}
AUTO = Gate("auto")


def policy(free: bool = False) -> Policy:
    return Policy(CostTable(FREE_STEPS, FREE_DRAFTS) if free else CostTable(STEPS, DRAFTS))


def sequence(owner: Policy, mode: str = "auto", gate: Gate = AUTO, sampled: bool = False) -> SequencePolicy:
    return owner.sequence(Mode.parse(mode), gate, 15, sampled)


def chain(chance: float, slots: int = 15) -> list[float]:
    return [chance ** (slot + 1) for slot in range(slots)]


def offer(own: SequencePolicy, survivals: list[float], straight: int | None = None, context: int = 100) -> Offer:
    return Offer(own, context, False, survivals, len(survivals) if straight is None else straight)


def view(own: SequencePolicy, room: int = 100, context: int = 100) -> View:
    return View(own, context, False, room)


def chain_proposal(nodes: int, claimed: float = 0.8) -> Proposal:
    chances = (1.0, *[claimed] * nodes)
    return Proposal(tuple(range(nodes + 1)), tuple(range(-1, nodes)), chances)


def accepted(nodes: int) -> Verdict:
    """The verdict on a chain of which so many tokens are right."""
    return Verdict(tuple(range(nodes + 1)), (*range(1, nodes + 1), 99))


def seen(own: SequencePolicy, right: int, nodes: int = 15, times: int = 40, rows_ms: float = 5.0) -> None:
    """Lets a sequence verify chains of which so many tokens are right."""
    own.slots = 15
    for _ in range(times):
        own.rows_ms = rows_ms
        own.learn(chain_proposal(nodes), accepted(right))


def spent(owner: Policy) -> None:
    """Uses the budget of trials up: a sequence whose drafts are useless drafts until there is none left."""
    own = sequence(owner)
    for _ in range(200):
        if not owner.plan_drafts([view(own)])[0]:
            return
        own.draft_was_useless()
    raise AssertionError("the budget has no end")


def made(owner: Policy, speed: float, steps: int = 200) -> None:
    """Lets the policy see steps that went so many times as fast as plain decoding."""
    owner.choose([Offer(sequence(owner), 100, False)])
    plain_ms = owner.costs.step_ms(StepShape(1, 1, 100, False, False))
    for _ in range(steps):
        owner.progress(4, 4 * plain_ms / speed)


# What drafts have brought.


def test_means_follow_the_newest_values_and_begin_with_an_assumption() -> None:
    means = RecentMeans([2.0, 8.0])
    assert means.values == [2.0, 8.0]
    means.add([4.0, 10.0])
    assert means.values == [4.0, 10.0], "the first draft replaces the assumption"
    means.add([0.0, 10.0])
    assert means.values == [2.0, 10.0]
    for _ in range(300):
        means.add([3.5, 4.0])
    assert means.values == [pytest.approx(3.5, abs=0.01), pytest.approx(4.0, abs=0.01)]


def test_a_requests_means_begin_with_those_of_its_kind_and_depart_from_them() -> None:
    kind = RecentMeans([2.0])
    for _ in range(6):
        kind.add([2.0])
    own = RecentMeans((), kind)
    assert own.values == kind.values
    own.add([0.0])
    assert own.values == [pytest.approx(2.0 * 6 / 7)], "the kind counts for its six drafts"
    for _ in range(20):
        own.add([0.0])
    assert own.values[0] < 0.4 and kind.values == [pytest.approx(2.0)]


def test_a_draft_teaches_what_fewer_slots_would_have_brought() -> None:
    own = sequence(policy())
    seen(own, right=9, nodes=10, rows_ms=10.0, times=200)
    assert own.prospect(3) == pytest.approx((3.0, 3.0), abs=0.01), "3 of 10 nodes are within 3 slots"
    assert own.prospect(7) == pytest.approx((7.0, 7.0), abs=0.01)
    assert own.prospect(15) == pytest.approx((9.0, 10.0), abs=0.01)
    assert own.prospect(20) == own.prospect(15) and own.prospect(6) == own.prospect(7)


def test_a_draft_brings_no_more_tokens_than_it_has_slots() -> None:
    """Deeper nodes of a verified tree come from the text, which needs no drafter."""
    own = sequence(policy())
    for _ in range(200):
        own.slots, own.rows_ms = 3, 10.0
        own.learn(chain_proposal(9), accepted(9))
    assert own.prospect(3).tokens == pytest.approx(3.0, abs=0.01)


def test_no_sequence_drafts_deeper_than_its_mode_beside_one_that_may() -> None:
    owner = Policy(CostTable(FREE_STEPS, {3: 0.8, 15: 0.9}))
    spent(owner)
    deep, flat = sequence(owner), sequence(owner, "chain:4")
    for own in (deep, flat):
        seen(own, right=own.deepest, nodes=own.deepest)
    assert owner.plan_drafts([view(deep), view(flat)]) == [15, 3]


def test_a_draft_that_was_right_to_its_end_promises_more_of_a_deeper_one() -> None:
    ended, cut = sequence(policy()), sequence(policy())
    for own, right in ((ended, 6), (cut, 7)):
        for _ in range(200):
            own.slots, own.rows_ms = 7, 10.0
            own.learn(chain_proposal(7), accepted(right))
    assert ended.prospect(15) == pytest.approx((6.0, 10.0), abs=0.01)
    further = sum(0.7**depth for depth in range(1, 9))
    assert cut.prospect(7).tokens == pytest.approx(7.0, abs=0.01)
    assert cut.prospect(15).tokens == pytest.approx(7.0 + further, abs=0.01)


def test_device_steps_learn_what_fewer_nodes_would_have_brought() -> None:
    own = sequence(policy())
    for _ in range(200):
        own.learn_widths(5, [0, 1, 2, 3, 4])
    assert [own.expected(nodes) for nodes in (0, 1, 2, 3)] == pytest.approx([0, 1, 2, 3], abs=0.01)
    before = own.expected(63) - own.expected(5)
    assert before > 0, "more nodes than were verified keep what was assumed of them"
    for _ in range(300):
        own.learn_widths(3, [0, 2, 3])
    assert own.expected(1) == pytest.approx(0.0, abs=0.01), "the first node alone was never right"
    assert own.expected(3) == pytest.approx(2.0, abs=0.01)
    for _ in range(300):
        own.learn_widths(0, [0])
    assert own.expected(63) == pytest.approx(0.0, abs=0.01), "without nodes there is nothing to expect"


def test_wider_trees_than_were_verified_look_better_after_drafts_of_varying_luck() -> None:
    """Otherwise a device step would keep the width that it began with, whatever wider trees bring."""
    own = sequence(policy())
    for _ in range(20):
        own.learn_widths(15, [0, 1, 2, 3, 4])
        own.learn_widths(15, [0])
    assert own.expected(31) > own.expected(15) + 0.1
    for _ in range(200):
        own.learn_widths(31, [0, 1, 2])
    assert own.expected(31) == pytest.approx(own.expected(15), abs=0.01), "trees of 31 nodes have brought no more"


def test_slots_beyond_the_drafters_block_promise_nothing() -> None:
    own = policy().sequence(Mode.parse("auto"), Gate("auto"), 10)
    own.slots = 10
    for _ in range(200):
        own.learn(chain_proposal(10), accepted(10))
    assert own.prospect(10).tokens == pytest.approx(10.0, abs=0.01)


def test_a_draft_without_nodes_brings_nothing() -> None:
    owner = policy()
    own = sequence(owner)
    seen(own, right=6)
    before = own.prospect(15).tokens
    for _ in range(60):
        own.draft_was_useless()
    tokens, rows_ms = own.prospect(15)
    assert tokens < 0.05 * before and 0.0 <= rows_ms < 0.3


def test_a_verdict_that_failed_teaches_nothing() -> None:
    owner = policy()
    own = sequence(owner)
    own.learn(chain_proposal(4), Verdict((0,), (), failed=True))
    assert not own.by_slots.drafts and not sequence(owner).by_slots.drafts
    assert own.estimate.chance(0.8, 1) == 0.8


def test_a_verified_tree_teaches_along_the_accepted_path_only() -> None:
    owner = policy()
    own = sequence(owner)
    # The anchor's children are rows 1 to 4; row 2, which is right, has the children 5 and 6; row 1 has the child 7.
    claims = (1.0, 0.55, 0.3, 0.15, 0.07, 0.7, 0.25, 0.95)
    proposal = Proposal((0, 10, 11, 12, 13, 20, 21, 30), (-1, 0, 0, 0, 0, 2, 2, 1), claims)
    own.learn(proposal, Verdict((0, 2), (11, 99)))
    fresh = policy().sequence(Mode.parse("auto"), AUTO, 15)
    rest = own.estimate.own_factor()
    told = {
        (claim, depth): own.estimate.chance(claim, depth) / rest - fresh.estimate.chance(claim, depth)
        for claim, depth in zip(claims[1:], (1, 1, 1, 1, 2, 2, 2), strict=True)
    }
    wrong = ((0.55, 1), (0.15, 1), (0.07, 1), (0.7, 2), (0.25, 2))
    assert all(told[other] < 0 for other in wrong), "they were wrong"
    assert told[0.3, 1] > 0, "it was right"
    assert told[0.95, 2] == pytest.approx(0), "its parent was wrong"


def test_a_fully_accepted_chain_teaches_nothing_about_the_bonus() -> None:
    own = sequence(policy())
    own.learn(chain_proposal(3), accepted(3))
    assert own.estimate.own_factor() > 1.0
    assert own.estimate.chance(0.8, 4) == pytest.approx(0.8 * own.estimate.own_factor()), "depth 4 was not verified"


def test_kinds_do_not_learn_from_each_other_and_can_be_forgotten() -> None:
    owner = policy()
    greedy, sampled = sequence(owner), sequence(owner, sampled=True)
    adapted = owner.sequence(Mode.parse("auto"), AUTO, 15, variant="mine")
    seen(greedy, right=0)
    seen(adapted, right=7)
    assert not sampled.by_slots.drafts and not sequence(owner, sampled=True).by_slots.drafts
    assert sequence(owner).prospect(15).tokens == 0.0
    assert owner.sequence(Mode.parse("auto"), AUTO, 15, variant="mine").prospect(15).tokens == pytest.approx(7.0)
    owner.forget("mine")
    owner.forget("never there")
    anew = owner.sequence(Mode.parse("auto"), AUTO, 15, variant="mine")
    assert not anew.by_slots.drafts and sequence(owner).by_slots.drafts


# Before drafting.


@pytest.mark.parametrize("free", [False, True])
def test_an_unknown_drafter_is_drafted_as_an_average_one(free: bool) -> None:
    owner = policy(free)
    assert owner.plan_drafts([view(sequence(owner))])[0] > 0
    dear = Policy(CostTable(STEPS, DEAR_DRAFTS))
    assert dear.plan_drafts([view(sequence(dear))]) == [0], "a single draft would cost more than trials may"
    assert sequence(owner).expected(3) == pytest.approx(0.7 + 0.7**2 + 0.7**3)


@pytest.mark.parametrize(("room", "most"), [(0, 0), (1, 0), (2, 1), (5, 4), (100, 15)])
def test_nothing_is_drafted_beyond_the_room(room: int, most: int) -> None:
    owner = policy(free=True)
    own = sequence(owner)
    seen(own, right=14, rows_ms=0.0)
    assert owner.plan_drafts([view(own, room=room)]) == [most]
    assert most or "one token" in owner.choose([Offer(own, 100, False)])[0].decision.reason


@pytest.mark.parametrize(
    ("mode", "most", "kind"),
    [("auto", 63, "tree"), ("chain", 15, "chain"), ("chain:6", 5, "chain"), ("tree:24", 23, "tree")],
)
def test_modes_limit_kind_and_width(mode: str, most: int, kind: str) -> None:
    owner = policy(free=True)
    own = sequence(owner, mode)
    assert own.max_nodes == most and own.deepest == min(15, most) and own.chains_only is (kind == "chain")
    nodes = chain(0.95, most) if own.chains_only else [*chain(0.95, 3), *[0.8] * (most - 3)]
    (choice,) = owner.choose([offer(own, nodes, most if own.chains_only else 3)])
    assert (choice.kind, choice.nodes) == (kind, most)
    (slots,) = owner.plan_drafts([view(own)])
    assert 0 < slots <= min(15, most)


def test_plain_requests_and_drafters_without_proposals_never_draft() -> None:
    owner = policy(free=True)
    plain, empty = sequence(owner, "plain"), owner.sequence(Mode.parse("auto"), AUTO, 0)
    assert owner.plan_drafts([view(plain), view(empty)]) == [0, 0]
    assert plain.note == empty.note == "nothing can be drafted"


def test_slots_follow_what_deep_slots_are_worth() -> None:
    owner = policy()
    spent(owner)
    poor, rich = sequence(owner), sequence(owner)
    seen(poor, right=2, nodes=3, rows_ms=4.0)
    seen(rich, right=14, rows_ms=20.0)
    assert owner.plan_drafts([view(poor)]) == [3]
    assert owner.plan_drafts([view(rich)]) == [15]


def test_a_draft_of_many_slots_may_be_the_best() -> None:
    """Depths between 15 slots and the full block are compared as well."""
    owner = Policy(CostTable(FREE_STEPS, {3: 0.8, 15: 0.9, 31: 1.0, 63: 9.0}))
    own = owner.sequence(Mode.parse("auto"), AUTO, 63)
    own.slots = 63
    for _ in range(40):
        own.learn(chain_proposal(40), accepted(31))
    assert owner.plan_drafts([view(own)]) == [31]


def test_a_plan_serves_further_steps_while_the_other_sequences_contexts_grow() -> None:
    owner, rest = policy(), Rest(rows=1, sequences=1, context=100)
    own = sequence(owner, gate=Gate("auto", explore=0.0))
    seen(own, right=4)
    first = owner.plan_drafts([view(own)], rest)
    assert first[0] > 0
    seen(own, right=0)  # a new plan would draft less
    assert owner.plan_drafts([view(own)], rest._replace(context=101)) == first
    assert owner.plan_drafts([view(own)], rest._replace(rows=2)) != first


def test_a_text_is_searched_only_if_its_first_token_may_promise_as_much_as_the_drafter() -> None:
    owner = policy()
    good, bad = sequence(owner), sequence(owner, gate=Gate("auto", explore=0.0))
    seen(good, right=6)
    assert owner.plan_drafts([view(good)])[0] > 0
    assert 0.5 < good.first_from_text < 1.0
    seen(bad, right=0)
    assert owner.plan_drafts([view(bad)]) == [0]
    assert bad.first_from_text == 0.0, "beside a plain step, any likely token of the text is of use"


@pytest.mark.parametrize("margin", [0.5, 1.0, 1.2, 1.5, 3.0])
def test_the_margin_is_what_drafting_must_beat(margin: float) -> None:
    owner = policy()
    spent(owner)
    own = sequence(owner, gate=Gate("auto", margin=margin))
    seen(own, right=1, nodes=3, rows_ms=4.2, times=100)
    plain_ms = owner.costs.step_ms(StepShape(1, 1, 100, False, False))
    speed = 2 * plain_ms / (plain_ms + 4.2 + owner.costs.draft_ms(1, 3, 100))
    assert 1.0 < speed < 1.2
    drafted = 0
    for _ in range(200):
        drafted += owner.plan_drafts([view(own)])[0] > 0
        owner.progress(1, plain_ms)
    assert drafted == 200 if speed > margin else 0 < drafted < 100
    if margin >= 1.5:
        assert drafted < 10, "a draft that falls short of its margin is a trial and costs as one"


def test_exchanged_costs_count_at_once() -> None:
    owner = policy()
    own = sequence(owner)
    seen(own, right=4)
    assert owner.plan_drafts([view(own)])[0] > 0
    owner.costs = CostTable(STEPS, DEAR_DRAFTS)
    assert owner.plan_drafts([view(own)]) == [0]
    assert own.note == "a draft would take too long"
    owner.costs = CostTable(STEPS, {slots: 8 * ms for slots, ms in DRAFTS.items()})
    own.explore = 0.0
    assert owner.plan_drafts([view(own)]) == [0]
    assert "times plain decoding's speed" in own.note
    owner.costs = CostTable(FREE_STEPS, FREE_DRAFTS)
    assert owner.plan_drafts([view(own)])[0] > 0 and own.note == ""


def test_other_rows_of_the_step_are_part_of_its_price() -> None:
    """A step that is long anyway makes drafts cheap, and a crowd of plain sequences makes them dear."""
    owner, strict = policy(), Gate("auto", explore=0.0)
    poor, good = sequence(owner, gate=strict), sequence(owner, gate=strict)
    seen(poor, right=1, nodes=3, rows_ms=6.0, times=100)
    seen(good, right=2, nodes=3, rows_ms=6.0, times=100)
    assert owner.plan_drafts([view(poor)]) == [0]
    assert owner.plan_drafts([view(poor)], Rest(rows=200)) == [3]
    assert owner.plan_drafts([view(good)]) == [3]
    assert owner.plan_drafts([view(good)], Rest(rows=16, sequences=16)) == [0]


def test_a_good_sequence_drafts_beside_hopeless_ones() -> None:
    owner = Policy(CostTable({1: 10.0, 256: 73.75}, {3: 2.0, 7: 2.2, 15: 2.5}))
    spent(owner)
    good, *bad = (sequence(owner) for _ in range(4))
    seen(good, right=6, rows_ms=2.0)
    for own in bad:
        seen(own, right=0, rows_ms=2.0)
    slots = owner.plan_drafts([view(own) for own in (bad[0], good, *bad[1:])])
    assert slots[1] > 0 and slots[0] == slots[2] == slots[3] == 0
    assert not good.trial


# Trials.


@pytest.mark.parametrize("explore", [0.0, 0.01, 0.1, 0.2])
@pytest.mark.parametrize("batch", [1, 3])
def test_trials_lose_no_more_than_their_share_of_the_time(explore: float, batch: int) -> None:
    owner = policy()
    both = [sequence(owner, gate=Gate("auto", explore=explore)) for _ in range(batch)]
    for own in both:
        seen(own, right=0, nodes=3, rows_ms=5.0)
    step = StepShape(batch, batch, 100, False, False)
    plain_ms, total_ms, lost_ms = owner.costs.step_ms(step), 0.0, 0.0
    for _ in range(3000):
        slots = owner.plan_drafts([view(own) for own in both])
        drafting = [own for own, count in zip(both, slots, strict=True) if count]
        choices = owner.choose([offer(own, chain(0.01, count)) for own, count in zip(both, slots, strict=True)])
        nodes = sum(choice.nodes for choice in choices)
        assert nodes == 3 * len(drafting) and all(own.trial for own in drafting)
        extra_ms = owner.costs.draft_ms(len(drafting), max(slots), 100)
        extra_ms += owner.costs.step_ms(step._replace(rows=batch + nodes)) - plain_ms
        for own in drafting:
            own.learn(chain_proposal(3), accepted(0))
        total_ms += plain_ms + extra_ms
        lost_ms += extra_ms
        owner.progress(batch, plain_ms + extra_ms)
    free_ms = 4 * owner.costs.step_ms(step._replace(batch=1, rows=1))  # what is free at the start, and one trial more
    assert lost_ms <= explore * total_ms + free_ms
    assert lost_ms >= 0.8 * explore * total_ms
    assert (lost_ms > 0) is (explore > 0)


def test_the_largest_share_of_a_step_s_sequences_counts() -> None:
    drafted = []
    for shares in ((0.0, 0.0), (0.01, 0.01), (0.01, 0.2)):
        owner = policy()
        spent(owner)
        both = [sequence(owner, gate=Gate("auto", explore=share)) for share in shares]
        for own in both:
            seen(own, right=0, nodes=3, rows_ms=4.0)
        count = 0
        for _ in range(400):
            count += sum(slots > 0 for slots in owner.plan_drafts([view(own) for own in both]))
            owner.progress(2, 17.0)
        drafted.append(count)
    assert drafted[0] == 0 < 4 * drafted[1] < drafted[2]


def test_a_sequence_that_may_not_explore_has_no_trials_beside_one_that_may() -> None:
    owner = policy()
    both = [sequence(owner, gate=Gate("auto", explore=share)) for share in (0.0, 0.2)]
    for own in both:
        seen(own, right=0, nodes=3, rows_ms=4.0)
    plans = []
    for _ in range(50):
        plans.append(owner.plan_drafts([view(own) for own in both]))
        owner.progress(2, 17.0)
    never, sometimes = zip(*plans, strict=True)
    assert not any(never) and any(sometimes)


def test_a_draft_that_would_be_unfair_to_its_neighbour_is_a_trial_with_its_price() -> None:
    owner = Policy(CostTable({1: 10.0, 256: 12.0}, {3: 12.0, 15: 12.5}))
    easy, other = sequence(owner), sequence(owner)
    seen(easy, right=3, nodes=3, rows_ms=0.5)
    seen(other, right=0, nodes=3, rows_ms=0.5)
    drafted = 0
    for _ in range(300):
        drafted += owner.plan_drafts([view(easy), view(other)])[0] > 0
        owner.progress(2, 10.0)
    assert 0 < drafted < 10
    assert owner.plan_drafts([view(easy)]) != [0] and not easy.trial, "alone it pays"


def test_a_trial_verifies_a_few_nodes_however_unlikely_they_are() -> None:
    owner = policy()
    own = sequence(owner)
    seen(own, right=0, nodes=3, rows_ms=4.0)
    assert owner.plan_drafts([view(own)]) == [3] and own.trial
    (choice,) = owner.choose([offer(own, [0.001] * 3)])
    step = owner.costs.step_ms(StepShape(1, 4, 100, False, False))
    plain_ms = owner.costs.step_ms(StepShape(1, 1, 100, False, False))
    assert choice.nodes == 3 and "a trial" in choice.decision.reason
    assert choice.decision.expected_ms == pytest.approx(step + owner.costs.draft_ms(1, 3, 100))
    assert own.rows_ms == pytest.approx(step - plain_ms), "what its rows took is part of what it cost"
    assert owner.choose([offer(own, [0.001] * 2)])[0].nodes == 2, "more than there is cannot be verified"
    own.trial = False
    assert owner.choose([offer(own, [0.001] * 3)])[0].nodes == 0


def test_saved_time_pays_for_few_trials_at_once() -> None:
    owner = policy()
    own = sequence(owner)
    seen(own, right=0, nodes=3, rows_ms=4.0)
    owner.plan_drafts([view(own)])
    for _ in range(5000):
        owner.progress(1, 14.5)
    in_a_row = 0
    while owner.plan_drafts([view(own)])[0]:
        own.learn(chain_proposal(3), accepted(0))
        in_a_row += 1
    assert 1 <= in_a_row <= 4


def test_a_drafter_that_fails_is_not_asked_at_every_step() -> None:
    owner = policy()
    for limit in (6, 15):  # the second sequence begins with what the first has shown
        own = sequence(owner, gate=Gate("auto", explore=0.01))
        asked = 0
        for _ in range(60):
            if owner.plan_drafts([view(own)])[0]:
                asked += 1
                owner.choose([Offer(own, 100, False)])
                own.draft_was_useless()
            owner.progress(1, 14.5)
        assert 1 <= asked <= limit
        for _ in range(3):
            own.learn(chain_proposal(7), accepted(5))


# After drafting.


def test_the_decision_explains_itself() -> None:
    owner = policy()
    own = sequence(owner)
    own.slots = 7
    (choice,) = owner.choose([offer(own, chain(0.85, 7))])
    rows = choice.nodes + 1
    tokens = 1 + sum(chain(0.85)[: choice.nodes])
    ms = 9.7 + owner.costs.step_ms(StepShape(1, rows, 100, False, False))
    assert choice.kind == "chain" and choice.decision.choice == f"chain:{rows}" and rows > 2
    assert choice.decision.expected_tokens == pytest.approx(tokens)
    assert choice.decision.expected_ms == pytest.approx(ms)
    assert choice.decision.reason == f"chain:{rows} expects {tokens:.1f} tokens in {ms:.0f} ms, plain 0.069/ms"


def test_a_tree_is_called_a_chain_while_it_is_one() -> None:
    owner = policy(free=True)
    (wide,) = owner.choose([offer(sequence(owner), [0.5, 0.45, *[0.15] * 61], straight=1)])
    assert (wide.kind, wide.nodes) == ("tree", 63)
    owner = policy()
    (narrow,) = owner.choose([offer(sequence(owner), [0.9, 0.8, 0.7, 0.01], straight=3)])
    assert (narrow.kind, narrow.nodes) == ("chain", 3)


def test_time_is_priced_by_the_speed_seen_so_far() -> None:
    nodes = []
    for speed in (0.5, 1.0, 1.5, 2.5):
        owner = policy()
        made(owner, speed)
        nodes.append(owner.choose([offer(sequence(owner), chain(0.85))])[0].nodes)
    assert nodes[0] == nodes[1] > nodes[2] > nodes[3] > 0, "slower than plain is no reason to waste more time"
    assert owner.row_price(100, sampled=False) > 1.5 * policy().row_price(100, sampled=False) > 0.0


def test_the_time_of_rows_is_shared_out_by_nodes() -> None:
    owner = policy()
    both = [sequence(owner) for _ in range(2)]
    choices = owner.choose([offer(both[0], chain(0.95, 3)), offer(both[1], chain(0.9, 1))])
    assert [choice.nodes for choice in choices] == [3, 1]
    plain, verified = (owner.costs.step_ms(StepShape(2, rows, 100, False, False)) for rows in (2, 6))
    assert both[0].rows_ms == pytest.approx(3 * both[1].rows_ms)
    assert both[0].rows_ms + both[1].rows_ms == pytest.approx(verified - plain)


@pytest.mark.parametrize("mode", ["tree:128", "tree:256", "auto"])
def test_the_price_of_every_offered_node_is_known(mode: str) -> None:
    """A tree of a fixed size may be larger than those of auto, and its gate may be `auto` as well."""
    owner = policy(free=True)
    both = [sequence(owner, mode) for _ in range(2)]
    survivals = chain(0.999, both[0].max_nodes)
    nodes = [choice.nodes for choice in owner.choose([offer(own, survivals) for own in both])]
    assert all(0 < count <= len(survivals) for count in nodes)


def test_nothing_to_choose_from() -> None:
    owner = policy()
    assert owner.plan_drafts([], Rest(rows=3)) == [] and owner.choose([], Rest(rows=3)) == []
    (choice,) = owner.choose([Offer(sequence(owner), 100, False)])
    assert choice == VerifyChoice("plain", 0, choice.decision)
    assert choice.decision.expected_tokens == 1.0


def test_numbers_stay_finite_whatever_happens() -> None:
    rng = random.Random(5)
    for costs in (CostTable(STEPS, DRAFTS), CostTable({1: 1e-6}, {1: 1e-9}), CostTable({1: 5.0}, {})):
        owner = Policy(costs)
        own = [sequence(owner) for _ in range(3)]
        for _ in range(200):
            slots = owner.plan_drafts([view(each, room=rng.randint(0, 20)) for each in own], Rest(rng.randint(0, 2)))
            offers = [
                offer(each, sorted((rng.random() for _ in range(count)), reverse=True))
                for each, count in zip(own, slots, strict=True)
            ]
            for each, choice in zip(own, owner.choose(offers), strict=True):
                assert math.isfinite(choice.decision.expected_tokens or 0.0)
                assert math.isfinite(choice.decision.expected_ms or 0.0)
                if choice.nodes:
                    claims = rng.choice((0.0, 0.5, 1.0))
                    each.learn(chain_proposal(choice.nodes, claims), accepted(rng.randint(0, choice.nodes)))
                elif each.slots:
                    each.draft_was_useless()
                assert all(map(math.isfinite, (*each.prospect(15), each.expected(63), each.rows_ms)))
                assert math.isfinite(each.estimate.chance(rng.random(), 1))
            owner.progress(rng.randint(0, 9), rng.choice((0.0, 1e-9, 30.0, 1e9)))
            assert math.isfinite(owner.row_price(100, sampled=False))


def test_the_policy_does_without_torch() -> None:
    code = "import sys, slipstream.speculative.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
