"""Slow masks: their sequence waits, all others continue, and no text depends on it."""

# mypy: disable-error-code="call-overload, unused-ignore"

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Sequence
from functools import partial

import pytest

from slipstream.engine.llm import LLM
from slipstream.grammar import guide as guide_module
from slipstream.grammar import notations as grammars
from slipstream.grammar.guide import STEP_S, GuideError
from slipstream.grammar.mask_lane import Allowed, Lane
from slipstream.speculative.constrained_drafts import DraftRule
from slipstream.speculative.costs import CostTable
from slipstream.speculative.policy import Policy
from slipstream.types import Constraint, GenEvent
from tests.tiny import assert_idle, tiny_llm
from tests.unit.test_constraint import PERSON, chain
from tests.watched import Watch, add_watched, watch_guide

pytestmark = pytest.mark.usefixtures("threads")
LETTERS = grammars.regex("[A-E]{20,30}(yes|no)")
SETTINGS = {"temperature": 0, "seed": 0, "max_tokens": 40}
SLOW_S = 2 * STEP_S


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("slow"), weight_format="int8", check_integrity=True)


def text_of(llm: LLM, constraint: Constraint | None, mode: str) -> str:
    return llm.generate("x", constraint=constraint, mode=mode, **SETTINGS).text


def run_until(llm: LLM, ended: Sequence[str]) -> dict[str, tuple[str, GenEvent]]:
    """Runs steps until these requests have ended; returns the text and the last event of every ended request."""
    texts: dict[str, str] = {}
    last: dict[str, tuple[str, GenEvent]] = {}
    while not last.keys() >= set(ended):
        for event in llm.engine.step():
            texts[event.request_id] = texts.get(event.request_id, "") + event.text
            if event.finish_reason is not None:
                last[event.request_id] = texts[event.request_id], event
    return last


@pytest.mark.parametrize("mode", ["plain", "chain", "auto"])
def test_others_go_on_while_a_mask_is_computed(pair: LLM, mode: str) -> None:
    alone = text_of(pair, None, mode), text_of(pair, LETTERS, mode)
    slow = pair.request(pair.prompt_ids("x"), constraint=LETTERS, mode=mode, **SETTINGS)
    other = pair.request(pair.prompt_ids("x"), mode=mode, **SETTINGS)
    watch = add_watched(pair, slow, closed=True)
    pair.engine.add(other)
    text, event = run_until(pair, [other.id])[other.id]
    assert event.finish_reason in ("stop", "length") and text == alone[0]
    assert watch.began.is_set() and not watch.gave_up, "the engine waited for the mask of another request"
    watch.gate.set()
    text, event = run_until(pair, [slow.id])[slow.id]
    assert event.finish_reason == "stop" and text == alone[1]
    assert_idle(pair)


def test_others_go_on_while_a_mask_is_computed_in_the_middle_of_a_text(pair: LLM) -> None:
    alone = text_of(pair, LETTERS, "plain")
    slow = pair.request(pair.prompt_ids("x"), constraint=LETTERS, mode="chain", **SETTINGS)
    other = pair.request(pair.prompt_ids("x"), mode="chain", **SETTINGS)
    watch = add_watched(pair, slow, burn_s=SLOW_S)
    text = ""
    while len(text) < 5:
        text += "".join(event.text for event in pair.engine.step())
    watch.gate.clear()
    pair.engine.add(other)
    ended = run_until(pair, [other.id])
    assert ended[other.id][1].finish_reason in ("stop", "length") and not watch.gave_up and slow.id not in ended
    watch.gate.set()
    while pair.engine.has_work:
        text += "".join(event.text for event in pair.engine.step() if event.request_id == slow.id)
    assert alone.endswith(text[5:]) and alone.startswith(text[:5])
    assert_idle(pair)


def test_an_engine_whose_sequences_all_wait_sleeps(pair: LLM) -> None:
    slow = pair.request(pair.prompt_ids("x"), constraint=LETTERS, **SETTINGS)
    watch = add_watched(pair, slow, closed=True)
    assert watch.began.wait(0) is False
    pair.engine.step()
    slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw  # how often this thread gave up its core
    for _ in range(10):
        assert pair.engine.step() == []
    slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - slept
    assert slept >= 9, "a step without anything to do comes back at once"
    watch.gate.set()
    run_until(pair, [slow.id])
    assert_idle(pair)


def test_a_request_that_waits_is_cancelled_at_once(pair: LLM) -> None:
    """A cancelled request's pages are released while its mask is computed; a queued mask is never started."""
    first, second, third = (pair.request(pair.prompt_ids("x"), constraint=LETTERS, **SETTINGS) for _ in range(3))
    running, queued = add_watched(pair, first, closed=True), add_watched(pair, second)
    pair.engine.step()
    assert running.began.wait(10)
    assert pair.engine.cancel(first.id) and pair.engine.cancel(second.id)
    assert {event.request_id: event.finish_reason for event in pair.engine.step()} == {
        first.id: "cancelled",
        second.id: "cancelled",
    }
    assert not running.gave_up
    assert_idle(pair)
    pair.engine.add(third)
    running.gate.set()
    assert run_until(pair, [third.id])[third.id][1].finish_reason == "stop"
    assert not queued.paths and not running.gave_up
    assert_idle(pair)


def test_a_request_is_paused_and_resumed_while_its_mask_is_computed(pair: LLM) -> None:
    alone = text_of(pair, LETTERS, "auto")
    slow = pair.request(pair.prompt_ids("x"), constraint=LETTERS, mode="auto", **SETTINGS)
    watch = add_watched(pair, slow, closed=True)
    pair.engine.step()
    assert watch.began.wait(10)
    assert pair.engine.pause(slow.id) and not pair.engine.busy
    assert pair.engine.resume(slow.id)
    watch.gate.set()
    text, event = run_until(pair, [slow.id])[slow.id]
    assert event.finish_reason == "stop" and text == alone and not watch.gave_up
    assert_idle(pair)


@pytest.mark.parametrize("mode", ["chain", "tree:16", "auto"])
def test_quick_constraints_are_drafted_for(pair: LLM, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small a model decodes faster than it drafts; here the policy is not to notice.
    monkeypatch.setattr(pair.engine.proposer, "policy", Policy(CostTable({1: 50.0, 64: 51.0}, {15: 0.5})))
    constraint = grammars.json_schema(PERSON)
    alone = text_of(pair, constraint, "plain")
    request = pair.request(pair.prompt_ids("x"), constraint=constraint, mode=mode, **SETTINGS)
    watch = add_watched(pair, request)
    text, event = run_until(pair, [request.id])[request.id]
    assert text == alone and event.stats is not None and event.stats.drafted
    assert any(watch.paths), "masks behind drafted paths were asked for"
    assert_idle(pair)


def test_a_drafted_row_whose_mask_does_not_come_is_not_kept(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = text_of(pair, LETTERS, "plain")
    request = pair.request(pair.prompt_ids("x"), constraint=LETTERS, mode="chain", **SETTINGS)
    watch = add_watched(pair, request)
    monkeypatch.setattr(guide_module.Guide, "knows", lambda guide, path: False)
    text, event = run_until(pair, [request.id])[request.id]
    assert text == alone and event.finish_reason == "stop" and not watch.gave_up
    assert_idle(pair)


def test_an_end_that_is_known_late_is_the_same_end(pair: LLM) -> None:
    """The last token is emitted before its mask is known; the mask then ends the request without another token."""
    quick = pair.generate("x", constraint=LETTERS, mode="plain", **SETTINGS)
    request = pair.request(pair.prompt_ids("x"), constraint=LETTERS, mode="plain", **SETTINGS)
    add_watched(pair, request, burn_s=SLOW_S)
    ids: list[int] = []
    while pair.engine.has_work:
        for event in pair.engine.step():
            ids += [token.id for token in event.tokens]
    assert (ids, event.finish_reason) == (quick.token_ids, "stop")
    assert_idle(pair)


def test_a_slow_constraint_has_no_drafts(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, draft = list[object](), pair.engine.contexts.draft
    monkeypatch.setattr(pair.engine.contexts, "draft", lambda jobs: (drafts.extend(jobs), draft(jobs))[1])
    alone = text_of(pair, LETTERS, "plain")
    request = pair.request(pair.prompt_ids("x"), constraint=LETTERS, mode="chain", **SETTINGS)
    watch = add_watched(pair, request, burn_s=SLOW_S)
    text, event = run_until(pair, [request.id])[request.id]
    assert text == alone and event.finish_reason == "stop" and not drafts and not any(watch.paths)
    assert_idle(pair)


def test_a_constraint_that_turns_slow_holds_up_few_steps(pair: LLM) -> None:
    """A guide may be slow after every second mask; each time it needs twice as many quick masks to be trusted again."""
    request = pair.request(pair.prompt_ids("x"), constraint=grammars.regex("[A-E]{300}"), temperature=0, max_tokens=300)
    watch = add_watched(pair, request)
    held_up = 0
    while pair.engine.has_work:
        guide = pair.engine.sequences[request.id].sampler.guide
        assert guide is not None
        inline, before = not guide.slow, len(watch.paths)
        watch.burn_s = SLOW_S if inline else 0.0
        pair.engine.step()
        held_up += inline and len(watch.paths) > before
    assert 2 <= held_up <= 12
    assert_idle(pair)


def test_a_step_computes_drafted_masks_for_a_moment_only(pair: LLM) -> None:
    guide = pair.engine.grammars.guide(LETTERS, None)
    assert guide is not None
    watch = Watch(burn_s=0.6 * STEP_S)
    watch_guide(guide, watch)
    path = pair.tokenizer.encode("ABCDEABCDE", add_bos=False)
    assert guide.mask() is not None and not DraftRule(guide, lambda slot, mask: None).fits(chain(path))
    assert len(watch.paths) <= 2
    assert guide.draft_mask(()) is guide.mask(), "what is known already costs nothing"
    with pytest.raises(GuideError):
        guide.draft_mask(tuple(path))


def test_a_mask_that_never_ends_ends_its_request_and_nothing_else(pair: LLM) -> None:
    """The library has no limit for some intersections: the mask process is killed, and other requests continue."""
    endless = grammars.lark(
        'start: /[A-E]{20}/ T{2}\nT: "a"+ "a"+ & ("a"{0,9} ("a"* "bc"i{0,9} /(?:[a-z]|[^x])?/)? "a".."z"?)* "a".."z"\n'
    )
    plain, held = text_of(pair, None, "plain"), text_of(pair, LETTERS, "plain")
    settings = {**SETTINGS, "max_tokens": 40}
    hanging = pair.request(pair.prompt_ids("x"), constraint=endless, **settings)
    others = [
        pair.request(pair.prompt_ids("x"), constraint=constraint, mode="plain", **settings)
        for constraint in (None, LETTERS)
    ]
    for request in (hanging, *others):
        pair.engine.add(request)
    ended = run_until(pair, [hanging.id, *(request.id for request in others)])
    text, event = ended[hanging.id]
    assert event.finish_reason == "error" and "takes too long" in (event.error or "") and len(text) == 20
    assert [ended[request.id][0] for request in others] == [plain, held]
    assert_idle(pair)


def test_a_constraint_that_stays_slow_ends_its_request(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_module, "GRACE_S", 6 * SLOW_S)
    monkeypatch.setattr(guide_module, "GRACE_TOKEN_S", SLOW_S / 2)
    slow = pair.request(pair.prompt_ids("x"), constraint=LETTERS, **SETTINGS)
    other = pair.request(pair.prompt_ids("x"), constraint=LETTERS, **SETTINGS)
    add_watched(pair, slow, burn_s=SLOW_S)
    pair.engine.add(other)
    ended = run_until(pair, [slow.id, other.id])
    text, event = ended[slow.id]
    assert event.finish_reason == "error" and "takes too long" in (event.error or "") and 4 < len(text) < 20
    assert ended[other.id][1].finish_reason == "stop"
    assert_idle(pair)


@pytest.mark.parametrize(("tokens", "reason"), [(4, "stop"), (3, "length")])
def test_the_last_token_says_the_same_however_late_its_mask_comes(pair: LLM, tokens: int, reason: str) -> None:
    settings = {"constraint": grammars.regex("ABCD"), "mode": "plain", "temperature": 0, "max_tokens": tokens}
    for burn_s in (0.0, SLOW_S):
        request = pair.request(pair.prompt_ids("x"), **settings)
        add_watched(pair, request, burn_s=burn_s)
        text, event = run_until(pair, [request.id])[request.id]
        assert (text, event.finish_reason) == ("ABCD"[:tokens], reason)
    assert_idle(pair)


def test_a_lane_works_in_a_forked_process() -> None:
    lane = Lane()
    assert lane.submit(lambda: 7).result(10) == 7
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os._exit(lane.submit(lambda: 8).result(10))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8


def test_slow_work_rests_while_the_engine_is_busy_and_quick_work_does_not() -> None:
    lane, order = Lane(), list[str]()

    def work(name: str) -> Allowed:
        order.append(name)
        return Allowed(b"", False, 30.0)

    assert lane.submit(partial(work, "slow"), urgent=False).result(10)
    waiting = lane.submit(partial(work, "slow again"), urgent=False)
    lane.submit(partial(work, "quick")).result(10)
    assert order == ["slow", "quick"] and not waiting.done()
    while not waiting.done():
        lane.wait()  # the engine has nothing else to do
    assert order == ["slow", "quick", "slow again"]
    lane.begin_forward(2)
    waiting = lane.submit(partial(work, "slow at last"), urgent=False)
    lane.submit(partial(work, "quick")).result(10)
    assert not waiting.done()
