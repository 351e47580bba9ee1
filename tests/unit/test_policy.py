"""The policy's two choices, before and after drafting, on numbers worked out by hand or by brute force."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
from slipstream.speculative.allocation import LEAST_SHARE, StepTimes
from slipstream.speculative.expected_gains import ExpectedGains
from slipstream.speculative.planning import DraftPlan, best_plan
from slipstream.speculative.sequence_policy import DraftDebt

from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.policy import Offer, Policy, SequencePolicy, VerifyChoice, View
from slipstream.types import Gate, Mode, Proposal, Verdict

STEPS = {1: 14.5, 2: 16.8, 4: 18.7, 8: 25.7, 16: 39.7, 32: 76.0, 64: 160.0}
DRAFTS = {3: 8.9, 7: 9.7, 15: 13.5}
FREE_STEPS = {1: 4.25, 64: 4.36, 1024: 6.0}
FREE_DRAFTS = {3: 0.8, 7: 0.8, 15: 0.9}
AUTO = Gate("auto")


@pytest.fixture
def solvent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits as they are where the drafts of the test, which lose and write nothing, leave no debts."""
    monkeypatch.setattr(DraftDebt, "exceeded", False)


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
    own.planned(15)  # a sequence that never drafted would begin with a probe
    for _ in range(times):
        owner.choose([offer(own, chance)])


def made(owner: Policy, speedup: float, steps: int = 200) -> None:
    """Lets the policy see steps that went so many times as fast as plain decoding."""
    owner.choose([Offer(sequence(owner), 100, False)])
    plain_ms = owner.costs.step_ms(StepShape(1, 1, 100, False, False))
    for _ in range(steps):
        owner.progress(4, 4 * plain_ms / speedup)


def brute_force(costs: CostTable, offers: list[Offer], spent: float, price: float) -> tuple[float, bool]:
    """The most tokens beyond the price of their time over all numbers of chain nodes of each sequence.

    Also whether that choice gives every sequence its least share of the speed of plain steps.
    """
    best, fair = -math.inf, True
    plain_ms = costs.step_ms(StepShape(len(offers), len(offers), 100, False, False))
    for counts in itertools.product(*(range(len(each.chain) + 1) for each in offers)):
        tokens = [1.0 + sum(each.chain[:count]) for each, count in zip(offers, counts, strict=True)]
        ms = spent + costs.step_ms(StepShape(len(offers), len(offers) + sum(counts), 100, False, False))
        if sum(tokens) - price * ms > best:
            best, fair = sum(tokens) - price * ms, min(tokens) / ms >= LEAST_SHARE / plain_ms
    return best, fair


@pytest.mark.parametrize("speedup", [1.0, 1.8])
def test_chosen_chain_is_the_best_of_all_combinations(speedup: float) -> None:
    rng = random.Random(2)
    compared = 0
    for _ in range(20):
        owner = policy()
        made(owner, speedup)
        offers = []
        for _ in range(3):
            survival, value = [], 1.0
            for _ in range(6):
                value *= rng.random() ** 0.3
                survival.append(value)
            offers.append(Offer(sequence(owner), 100, False, (), survival))
        spent = owner.costs.draft_ms(3, 6, 100)
        choices = owner.choose(offers)
        total = sum(choice.decision.expected_tokens or 0 for choice in choices)
        price = speedup * 3 / owner.costs.step_ms(StepShape(3, 3, 100, False, False))
        worth = total - price * (choices[0].decision.expected_ms or 0)
        best, fair = brute_force(owner.costs, offers, spent, price)
        assert worth <= best + 1e-3
        if fair:
            compared += 1
            assert worth == pytest.approx(best, abs=1e-3)
    assert compared > 5


def test_a_text_that_is_easy_to_draft_leaves_its_neighbours_half_of_their_speed() -> None:
    """Their drafts are hopeless, and every row makes the step longer for them too."""
    owner = policy()
    easy, *hopeless = (sequence(owner) for _ in range(3))
    offers = [offer(easy, 0.99, tree=chain(0.99)), *(Offer(own, 100, False) for own in hopeless)]
    plain_ms = owner.costs.step_ms(StepShape(3, 3, 100, False, False))
    choices = owner.choose(offers)
    assert choices[0].nodes, "the costs leave room for some drafts"
    assert all((choice.decision.expected_ms or 0.0) <= plain_ms / LEAST_SHARE for choice in choices)


def test_what_was_verified_unasked_is_remembered_as_if_it_had_been_chosen() -> None:
    """If rows are fixed before the draft, the whole step's time is shared out, whichever sequences are looked at."""
    shape = StepShape(8, 8 + 8 * 15, 100, False, True)
    pays, loses = policy(free=True), policy(free=True)
    for owner, chance in ((pays, 0.8), (loses, 0.02)):
        looked_at = [sequence(owner) for _ in range(2)]
        for own in looked_at:
            own.planned(15)
            own.back_off(0.5)
        for _ in range(20):
            owner.verified([offer(own, chance, tree=chain(chance)) for own in looked_at], shape, 8)
        assert all(own.gains.expected(15, 15, branching=True) == pytest.approx(sum(chain(chance))) for own in looked_at)
        assert all(own.backing_off == (owner is loses) for own in looked_at)
        plain_ms, ms = owner.costs.step_ms(shape._replace(rows=8, branching=False)), owner.costs.step_ms(shape)
        forgone = (owner.costs.draft_ms(8, 15, 100) + ms - plain_ms) / plain_ms  # of each, as all drafted as many
        assert forgone < sum(chain(0.8)) and forgone > sum(chain(0.02))
        owner.progress(80, 10.0)
        assert owner.row_price(100, sampled=False) > 0.0


def test_time_is_priced_by_the_speed_seen_so_far() -> None:
    nodes = []
    for speedup in (0.5, 1.0, 1.5, 2.5):
        owner = policy()
        made(owner, speedup)
        nodes.append(owner.choose([offer(sequence(owner), 0.85)])[0].nodes)
    assert nodes[0] == nodes[1] > nodes[2] > nodes[3] > 0  # slower than plain is no reason to waste more time
    assert owner.row_price(100, sampled=False) > 1.5 * policy().row_price(100, sampled=False)


def test_sure_step_goes_wider_than_an_unsure_one() -> None:
    owner = policy()
    made(owner, 1.5)
    widths = [owner.choose([offer(sequence(owner), chance)])[0].nodes for chance in (0.3, 0.6, 0.8, 0.95)]
    assert widths == sorted(widths) and len(set(widths)) == 4


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


@pytest.mark.parametrize(
    ("mode", "most", "kinds"),
    [("auto", 63, {"tree"}), ("chain", 15, {"chain"}), ("chain:6", 5, {"chain"}), ("tree:24", 23, {"tree"})],
)
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
    taken = []
    for margin in (1.0, 1.2, 3.0, 8.0):
        owner = policy()
        own = sequence(owner, gate=Gate("auto", margin=margin))
        taken.append(owner.choose([offer(own, 0.85)])[0].nodes)
        seen(owner, own, 0.85)
        assert (owner.plan_drafts([view(own)])[0] > 0) is (margin < 3.0)
    assert taken[0] > taken[1] > taken[2] > taken[3] == 0


def test_first_step_of_a_new_engine_drafts_whatever_it_costs() -> None:
    owner = Policy(CostTable(STEPS, {3: 500.0, 15: 900.0}))
    own = sequence(owner)
    assert owner.plan_drafts([view(own)]) == [3]
    owner.choose([offer(own, 0.9, slots=3)])
    assert owner.plan_drafts([view(own)]) == [0]


def test_new_request_tries_once_whatever_the_last_one_ended_with() -> None:
    owner = policy()
    last = sequence(owner)
    seen(owner, last, 0.3)
    assert owner.plan_drafts([view(last)]) == [0]
    new = sequence(owner)
    assert owner.plan_drafts([view(new)])[0] > 0
    owner.choose([offer(new, 0.3, slots=7)])
    assert owner.plan_drafts([view(new)]) == [0]


@pytest.mark.usefixtures("solvent")
def test_new_request_waits_where_nothing_was_ever_right() -> None:
    owner = policy()
    seen(owner, sequence(owner), 0.05)
    new = sequence(owner)
    assert plain_steps_until_draft(owner, new) == 4 * AUTO.probe


def test_sampled_and_greedy_requests_do_not_learn_from_each_other() -> None:
    owner = policy()
    greedy = sequence(owner)
    seen(owner, greedy, 0.05)
    for _ in range(5):
        greedy.calibration.observe(0.9, 1, False)
    new_greedy, new_sampled = (owner.sequence(Mode.parse("auto"), AUTO, 15, sampled) for sampled in (False, True))
    assert new_greedy.gains.known and not new_sampled.gains.known
    assert new_greedy.calibration.chance(0.9, 1) < 0.2 < 0.6 < new_sampled.calibration.chance(0.9, 1)
    assert new_sampled.shared is not greedy.shared is new_greedy.shared


@pytest.mark.parametrize(("free", "slots"), [(False, 7), (True, 15)])
def test_unknown_drafter_is_drafted_as_deep_as_an_average_one(free: bool, slots: int) -> None:
    owner = policy(free)
    own = sequence(owner)
    assert owner.plan_drafts([view(own)]) == [slots]
    owner.choose([offer(own, 0.9, slots=slots)])
    own.calibration.observe(0.9, 1, True)  # the draft was accepted, so depths that were never tried are worth a try
    assert owner.plan_drafts([view(own)]) == [15]


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
    seen(shallow, poor, 0.55)
    seen(deep, rich, 0.99)
    assert shallow.plan_drafts([view(poor)], fixed_rows=200, fixed_sequences=0) == [3]
    assert deep.plan_drafts([view(rich)]) == [15]


def test_deeper_drafts_are_looked_at_now_and_then() -> None:
    owner = policy()
    own = sequence(owner)
    seen(owner, own, 0.75)
    depths = []
    for _ in range(64):
        depths += owner.plan_drafts([view(own)])
        owner.choose([offer(own, 0.75, slots=depths[-1])])
    assert depths.count(7) == 60 and depths.count(15) == 4
    for _ in range(20):
        owner.choose([offer(own, 0.97)])
    assert owner.plan_drafts([view(own)]) == [15]


def test_exchanged_costs_count_at_once() -> None:
    owner = policy()
    own = sequence(owner)
    seen(owner, own, 0.85)
    assert owner.plan_drafts([view(own)])[0] > 0
    owner.costs = CostTable(STEPS, {slots: 30 * ms for slots, ms in DRAFTS.items()})
    assert owner.plan_drafts([view(own)]) == [0]
    owner.costs = CostTable(FREE_STEPS, FREE_DRAFTS)
    assert owner.plan_drafts([view(own)]) == [15]


@pytest.mark.parametrize(
    ("chance", "rows", "sequences", "drafts"),
    [(0.65, 0, 0, True), (0.65, 16, 16, False), (0.85, 200, 0, True), (0.3, 0, 0, False), (0.3, 200, 0, True)],
)
def test_other_rows_of_the_step_are_part_of_its_price(chance: float, rows: int, sequences: int, drafts: bool) -> None:
    # a step that is long anyway makes further rows and drafts cheap, a crowd of plain tokens makes them dear
    owner = policy()
    own = sequence(owner)
    seen(owner, own, chance)
    slots = owner.plan_drafts([view(own)], fixed_rows=rows, fixed_sequences=sequences)
    assert (slots[0] > 0) is drafts


def test_plan_holds_for_a_few_steps_unless_its_grounds_change(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = policy()
    own, other = sequence(owner), sequence(owner)
    for each in (own, other):
        seen(owner, each, 0.85)
    made_for: list[int] = []

    def counted(costs: CostTable, step: StepTimes, prospects: Sequence[tuple[View, ExpectedGains]]) -> DraftPlan | None:
        made_for.append(len(prospects))
        return best_plan(costs, step, prospects)

    monkeypatch.setattr("slipstream.speculative.policy.best_plan", counted)

    def plans(*views: View) -> int:
        made_for.clear()
        assert owner.plan_drafts(views)[0] > 0
        return len(made_for)

    assert [plans(view(own)) for _ in range(16)] == 2 * [1, 0, 0, 0, 0, 0, 0, 0]
    assert plans(view(own)) == 1 and plans(view(own), view(other)) == 1 and plans(view(own), view(other)) == 0
    owner.costs = CostTable(STEPS, DRAFTS)
    assert plans(view(own), view(other)) == 1 and plans(view(own), view(other)) == 0
    own.gains.correct(0.9)
    assert plans(view(own), view(other)) == 0
    other.gains.correct(0.02)  # less than half of what the two promised is left
    assert plans(view(own), view(other)) == 1


def test_slots_hold_with_the_plan_unless_the_step_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = policy()
    own = sequence(owner)
    seen(owner, own, 0.85)
    looks: list[int] = []
    depth = owner._depth

    def counted(step: StepTimes, seen_by: View, blocks: int) -> int:
        looks.append(depth(step, seen_by, blocks))
        return looks[-1]

    monkeypatch.setattr(owner, "_depth", counted)
    first = owner.plan_drafts([view(own)])
    assert owner.plan_drafts([view(own)]) == first == looks, "one look served both steps"
    own.planned(0)
    owner.plan_drafts([view(own)])
    assert own.asked and len(looks) == 1, "a held plan asks for drafts like any other"
    assert owner.plan_drafts([view(own, room=3)]) == [2], "no deeper than there is room"
    owner.plan_drafts([view(own)], fixed_rows=1, fixed_sequences=1)
    assert len(looks) == 3, "somebody else has joined the step"
    own.back_off(0.5)
    owner.plan_drafts([view(own)], fixed_rows=1, fixed_sequences=1)
    assert len(looks) == 4, "a sequence that backs off is looked at"


def test_broken_promise_ends_drafting_at_once() -> None:
    owner = policy()
    own = sequence(owner)
    seen(owner, own, 0.85)
    assert owner.plan_drafts([view(own)])[0] > 0
    own.gains.correct(0.1)
    assert owner.plan_drafts([view(own)]) == [0]


def test_good_neighbour_does_not_make_a_hopeless_sequence_probe_often() -> None:
    owner = Policy(CostTable({1: 10.0, 256: 73.75}, {3: 2.0, 7: 2.2, 15: 2.5}))
    good, bad = sequence(owner), sequence(owner)
    seen(owner, good, 0.9)
    seen(owner, bad, 0.02)
    slots = owner.plan_drafts([view(good), view(bad)])
    assert slots[0] > 0 == slots[1]
    assert bad.tokens_to_probe == AUTO.probe and not good.backing_off


def plain_steps_until_draft(owner: Policy, own: SequencePolicy) -> int:
    for steps in range(2000):
        if owner.plan_drafts([view(own)])[0]:
            return steps
        owner.choose([Offer(own, 100, False)])
        own.committed([7])
    raise AssertionError("no probe within 2000 tokens")


@pytest.mark.usefixtures("solvent")
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
    assert waits[1:] == [15, 31, 31, 31, 31, 31]  # the probe's own step commits a token too
    seen(owner, own, 0.9)
    assert own.backing_off, "a probe's promise alone proves nothing"
    own.committed([1] * 200)
    assert owner.plan_drafts([view(own)])[0] > 0
    seen(owner, own, 0.9)
    assert not own.backing_off
    seen(owner, own, 0.05)
    assert plain_steps_until_draft(owner, own) == 4


def test_probe_that_came_true_is_followed_by_another_whatever_the_average_says() -> None:
    owner = policy()
    own = sequence(owner)
    seen(owner, own, 0.05)
    plain_steps_until_draft(owner, own)
    owner.choose([offer(own, 0.95, slots=7)])
    verified = Proposal((0, 1, 2, 3), (-1, 0, 1, 2), (1.0, 0.9, 0.9, 0.9))
    own.learn(verified, Verdict((0, 1, 2, 3), (1, 2, 3, 4)), (1, 2, 3, 4))
    own.committed([1, 2, 3, 4])
    assert owner.plan_drafts([view(own)])[0] > 0
    owner.choose([offer(own, 0.95, slots=7)])
    own.learn(verified, Verdict((0,), (9,)), (9,))
    own.committed([9])
    assert owner.plan_drafts([view(own)])[0] == 0


@pytest.mark.usefixtures("solvent")
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


@pytest.mark.usefixtures("solvent")
def test_first_draft_that_would_have_paid_is_repeated_at_once() -> None:
    owner = policy()
    seen(owner, sequence(owner), 0.3)
    own = sequence(owner)
    assert owner.plan_drafts([view(own)])[0] > 0
    assert owner.choose([offer(own, 0.05, slots=7)])[0].kind == "plain"
    own.shadow([5, 6, 7, 8], [0.05] * 4)
    for token in (5, 6, 7, 99):
        own.committed([token])
    assert owner.plan_drafts([view(own)])[0] > 0


@pytest.mark.usefixtures("solvent")
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


def test_nobody_to_choose_for() -> None:
    owner = policy()
    assert owner.plan_drafts([], fixed_rows=3) == []
    assert owner.choose([], fixed_rows=3) == []
    (choice,) = owner.choose([Offer(sequence(owner), 100, False)])
    assert choice == VerifyChoice("plain", 0, choice.decision)
    assert choice.decision.expected_tokens == 1.0


def test_policy_needs_no_numeric_library() -> None:
    code = "import sys, slipstream.speculative.policy as p; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
