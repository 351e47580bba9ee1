"""The policy's two choices, before and after drafting, on numbers worked out by hand or by brute force."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest

from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.policy import Choice, Offer, Policy, SequencePolicy, View
from slipstream.types import Gate, Mode, Proposal, Verdict

STEPS = {1: 14.5, 2: 16.8, 4: 18.7, 8: 25.7, 16: 39.7, 32: 76.0, 64: 160.0}
DRAFTS = {3: 8.9, 7: 9.7, 15: 13.5}
FREE_STEPS = {1: 4.25, 64: 4.36, 1024: 6.0}
FREE_DRAFTS = {3: 0.8, 7: 0.8, 15: 0.9}
AUTO = Gate("auto")


def policy(free: bool = False) -> Policy:
    return Policy(CostTable(FREE_STEPS, FREE_DRAFTS) if free else CostTable(STEPS, DRAFTS))


def sequence(owner: Policy, mode: str = "auto", gate: Gate = AUTO) -> SequencePolicy:
    return owner.sequence(Mode.parse(mode), gate, 15)


def chain(chance: float, slots: int = 15) -> list[float]:
    return [chance ** (slot + 1) for slot in range(slots)]


def offer(
    own: SequencePolicy, chance: float, slots: int = 15, tree: list[float] | None = None, context: int = 100
) -> Offer:
    return Offer(own, context, False, tree or (), chain(chance, slots))


def view(own: SequencePolicy, room: int = 100, context: int = 100) -> View:
    return View(own, context, False, room)


def seen(owner: Policy, own: SequencePolicy, chance: float, times: int = 30) -> None:
    """Lets the sequence's gains settle on drafts of one quality."""
    for _ in range(times):
        owner.choose([offer(own, chance)])


def brute_force(costs: CostTable, offers: list[Offer], spent: float) -> float:
    """The best rate over all numbers of chain nodes of each sequence."""
    best = 0.0
    for counts in itertools.product(*(range(len(each.chain) + 1) for each in offers)):
        tokens = len(offers) + sum(sum(each.chain[:count]) for each, count in zip(offers, counts, strict=True))
        ms = spent + costs.step_ms(StepShape(len(offers), len(offers) + sum(counts), 100, False, False))
        best = max(best, tokens / ms)
    return best


def test_chosen_chain_is_the_best_of_all_combinations() -> None:
    rng = random.Random(2)
    for _ in range(20):
        owner = policy()
        offers = []
        for _ in range(3):
            survival, value = [], 1.0
            for _ in range(6):
                value *= rng.random() ** 0.3
                survival.append(value)
            offers.append(Offer(sequence(owner), 100, False, (), survival))
        choices = owner.choose(offers, spent_ms=20.0)
        decision = choices[0].decision
        total = sum(choice.decision.expected_tokens or 0 for choice in choices)
        assert total / (decision.expected_ms or 1) == pytest.approx(brute_force(owner.costs, offers, 20.0))


def test_decision_explains_itself() -> None:
    owner = policy()
    (choice,) = owner.choose([offer(sequence(owner), 0.85, slots=7)])
    rows = choice.nodes + 1
    tokens = 1 + sum(chain(0.85)[: choice.nodes])
    ms = 9.7 + owner.costs.step_ms(StepShape(1, rows, 100, False, False))
    assert choice.kind == "chain" and choice.decision.choice == f"chain:{rows}"
    assert choice.decision.expected_tokens == pytest.approx(tokens)
    assert choice.decision.expected_ms == pytest.approx(ms)
    assert choice.decision.reason == (
        f"chain:{rows} expects {tokens:.1f} tokens in {ms:.0f} ms ({tokens / ms:.3f}/ms), plain 0.069/ms"
    )


def test_tree_is_taken_where_it_promises_more_and_called_a_chain_while_it_is_one() -> None:
    tree = [0.5, 0.45, 0.3, 0.28, 0.25, 0.2] + [0.15] * 57
    owner = policy(free=True)
    (wide,) = owner.choose([Offer(sequence(owner), 100, False, tree, [0.5, 0.3, 0.2])])
    assert (wide.kind, wide.nodes) == ("tree", 63)
    owner = policy()
    line = [0.9, 0.8, 0.7]
    (narrow,) = owner.choose([Offer(sequence(owner), 100, False, [*line, 0.05], line)])
    assert (narrow.kind, narrow.nodes) == ("chain", 3)


def test_branching_is_priced_as_branching() -> None:
    tree, line = [0.8, 0.75, 0.6, 0.55, 0.4], [0.8, 0.6, 0.4]
    owner = policy()
    assert owner.choose([Offer(sequence(owner), 100, False, tree, line)])[0].kind == "tree"
    for _ in range(40):
        for rows in (2, 4, 8):
            owner.costs.observe_step(StepShape(1, rows, 100, False, True), 4 * STEPS[rows])
            owner.costs.observe_step(StepShape(1, rows, 100, False, False), STEPS[rows])
    assert owner.choose([Offer(sequence(owner), 100, False, tree, line)])[0].kind == "chain"


@pytest.mark.parametrize(("mode", "most", "kinds"), [
    ("auto", 63, {"tree"}), ("chain", 15, {"chain"}), ("chain:6", 5, {"chain"}), ("tree:24", 23, {"tree"}),
])
def test_modes_limit_kind_and_width(mode: str, most: int, kinds: set[str]) -> None:
    owner = policy(free=True)
    tree = [0.95 ** (node + 1) for node in range(3)] + [0.8] * 80
    (choice,) = owner.choose([offer(sequence(owner, mode), 0.95, tree=tree)])
    assert choice.kind in kinds
    assert choice.nodes == most
    (slots,) = owner.plan_drafts([view(sequence(owner, mode))])
    assert 0 < slots <= min(15, most)


def test_rows_of_a_long_context_must_promise_more() -> None:
    owner = policy()
    for _ in range(60):
        for rows in (2, 4, 8, 12):
            owner.costs.observe_step(StepShape(2, rows, 9000, False, False), 20.0 + 8.0 * rows)
            owner.costs.observe_step(StepShape(2, rows, 100, False, False), 20.0 + 1.0 * rows)
    near, far = offer(sequence(owner), 0.8), offer(sequence(owner), 0.8, context=9000)
    choices = owner.choose([far, near])
    assert choices[1].nodes > choices[0].nodes


def test_margin_is_what_speculation_must_beat() -> None:
    for margin, kind in ((1.0, "chain"), (5.0, "plain")):
        owner = policy()
        own = sequence(owner, gate=Gate("auto", margin=margin))
        assert owner.choose([offer(own, 0.85)])[0].kind == kind
        seen(owner, own, 0.85)
        assert (owner.plan_drafts([view(own)])[0] > 0) is (kind == "chain")


def test_first_step_of_a_new_engine_drafts_whatever_it_costs() -> None:
    owner = Policy(CostTable(STEPS, {3: 500.0, 15: 900.0}))
    own = sequence(owner)
    assert owner.plan_drafts([view(own)]) == [3]
    owner.choose([offer(own, 0.9, slots=3)])
    assert owner.plan_drafts([view(own)]) == [0]


@pytest.mark.parametrize(("room", "most"), [(0, 0), (1, 0), (2, 1), (5, 4), (100, 15)])
def test_nothing_is_drafted_beyond_the_room(room: int, most: int) -> None:
    owner = policy(free=True)
    own = sequence(owner)
    seen(owner, own, 0.95)
    assert owner.plan_drafts([view(own, room=room)]) == [most]
    assert most or "one token" in owner.choose([Offer(own, 100, False)])[0].decision.reason


def test_slots_follow_what_deep_slots_are_worth() -> None:
    shallow, deep = policy(), policy()
    poor, rich = sequence(shallow), sequence(deep)
    seen(shallow, poor, 0.7)
    seen(deep, rich, 0.99)
    assert shallow.plan_drafts([view(poor)]) == [3]
    assert deep.plan_drafts([view(rich)]) == [15]


def test_exchanged_costs_count_at_once() -> None:
    owner = policy()
    own = sequence(owner)
    seen(owner, own, 0.85)
    assert owner.plan_drafts([view(own)])[0] > 0
    owner.costs = CostTable(STEPS, {slots: 30 * ms for slots, ms in DRAFTS.items()})
    assert owner.plan_drafts([view(own)]) == [0]
    owner.costs = CostTable(FREE_STEPS, FREE_DRAFTS)
    assert owner.plan_drafts([view(own)]) == [15]


def test_other_rows_of_the_step_are_part_of_its_price() -> None:
    # a step that is long anyway makes further rows and drafts cheap, a crowd of plain tokens makes them dear
    owner = policy()
    own = sequence(owner)
    seen(owner, own, 0.6)
    crowd = owner.plan_drafts([view(own)], fixed_rows=16)
    assert crowd == [0]
    seen(owner, own, 0.85)
    assert owner.plan_drafts([view(own)], fixed_rows=200, fixed_sequences=0)[0] > 0


def plain_steps_until_draft(owner: Policy, own: SequencePolicy) -> int:
    for steps in range(2000):
        if owner.plan_drafts([view(own)])[0]:
            return steps
        owner.choose([Offer(own, 100, False)])
        own.committed([7])
    raise AssertionError("no probe within 2000 tokens")


def test_probes_come_after_doubling_waits_and_a_success_resets_them() -> None:
    owner = policy()
    own = sequence(owner, gate=Gate("auto", probe=4))
    seen(owner, own, 0.05)
    waits = []
    for _ in range(7):
        waits.append(plain_steps_until_draft(owner, own))
        owner.choose([offer(own, 0.05, slots=7)])
        own.shadow([1] * 7, [0.05] * 7)
        own.committed([7])
    assert waits[0] == 4
    assert waits[1:] == [7, 15, 31, 63, 63, 63]  # the probe's own step commits a token too
    seen(owner, own, 0.9)
    assert not own.backing_off
    seen(owner, own, 0.05)
    assert plain_steps_until_draft(owner, own) == 4


def test_probe_that_would_have_paid_is_repeated_at_once() -> None:
    owner = policy()
    own = sequence(owner)
    seen(owner, own, 0.05)
    plain_steps_until_draft(owner, own)
    assert owner.choose([offer(own, 0.05, slots=7)])[0].kind == "plain"
    own.shadow([5, 6, 7, 8], [0.05] * 4)
    own.committed([5])
    own.committed([6])
    assert owner.plan_drafts([view(own)]) == [0]
    own.committed([7])
    own.committed([99])
    assert owner.plan_drafts([view(own)])[0] > 0


def test_probes_of_a_batch_share_a_step() -> None:
    owner = policy()
    both = [sequence(owner, gate=Gate("auto", probe=16)) for _ in range(2)]
    for own in both:
        seen(owner, own, 0.05)
    owner.plan_drafts([view(both[0])])
    both[0].committed([1] * 6)
    owner.plan_drafts([view(own) for own in both])
    both[0].committed([1] * 10)
    both[1].committed([1] * 10)
    slots = owner.plan_drafts([view(own) for own in both])
    assert min(slots) > 0


def test_drafter_that_fails_is_not_asked_at_every_step() -> None:
    owner = policy()
    for own in (sequence(owner), sequence(owner)):
        asked = 0
        for _ in range(40):
            asked += owner.plan_drafts([view(own)])[0] > 0
            owner.choose([Offer(own, 100, False)])
            own.committed([1])
        assert 1 <= asked <= 4
        seen(owner, own, 0.9, times=3)  # the second sequence knows gains, and then drafts stop coming


def observed(own: SequencePolicy) -> list[tuple[float, int, bool, bool]]:
    log: list[tuple[float, int, bool, bool]] = []

    def remember(claimed: float, depth: int, hit: bool, leading: bool = True) -> None:
        log.append((claimed, depth, hit, leading))

    own.calibration.observe = remember  # type: ignore[method-assign]
    return log


def test_verified_tree_teaches_along_the_accepted_path() -> None:
    own = sequence(policy())
    log = observed(own)
    # anchor; its four children 1-4; children 5 and 6 of row 2, child 7 of row 1
    proposal = Proposal(
        (0, 10, 11, 12, 13, 20, 21, 30), (-1, 0, 0, 0, 0, 2, 2, 1), (1.0, 0.5, 0.3, 0.1, 0.05, 0.6, 0.2, 0.9)
    )
    own.learn(proposal, Verdict((0, 2), (11, 99)), (11, 99))
    assert log == [
        (0.5, 1, False, True), (0.3, 1, True, False), (0.1, 1, False, False),
        (0.6, 2, False, True), (0.2, 2, False, False),
    ]


def test_fully_accepted_chain_teaches_nothing_about_the_bonus() -> None:
    own = sequence(policy())
    log = observed(own)
    own.learn(Proposal((0, 5, 6), (-1, 0, 1), (1.0, 0.9, 0.8)), Verdict((0, 1, 2), (5, 6, 7)), (5, 6, 7))
    assert log == [(0.9, 1, True, True), (0.8, 2, True, True)]


def test_shadow_is_judged_by_what_is_committed_until_its_first_miss() -> None:
    own = sequence(policy())
    log = observed(own)
    own.shadow([5, 6, 7], [0.9, 0.8, 0.7])
    own.committed([5])
    own.committed([9, 7])
    own.committed([7])
    assert log == [(0.9, 1, True, True), (0.8, 2, False, True)]


def test_verified_proposal_drops_the_shadow() -> None:
    own = sequence(policy())
    own.shadow([5, 6], [0.9, 0.8])
    log = observed(own)
    own.learn(Proposal((0, 8), (-1, 0), (1.0, 0.7)), Verdict((0,), (5,)), (5,))
    own.committed([5])
    assert log == [(0.7, 1, False, True)]


def test_recorded_timings_refresh_the_table_in_use() -> None:
    owner = policy()
    shape = StepShape(1, 8, 100, False, False)
    for _ in range(20):
        owner.record(shape, 50.0, blocks=1, slots=7, draft_ms=20.0)
    assert owner.costs.step_ms(shape) == pytest.approx(50.0, rel=0.1)
    assert owner.costs.draft_ms(1, 7, 100) == pytest.approx(20.0, rel=0.1)


def test_nobody_to_choose_for() -> None:
    owner = policy()
    assert owner.plan_drafts([], fixed_rows=3) == []
    assert owner.choose([], fixed_rows=3) == []
    (choice,) = owner.choose([Offer(sequence(owner), 100, False)])
    assert choice == Choice("plain", 0, choice.decision)
    assert choice.decision.expected_tokens == 1.0


def test_policy_needs_no_numeric_library() -> None:
    code = "import sys, slipstream.speculative.policy as p; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
