"""The engine as a GPU runs it, on the CPU: whole device steps with torch's kernels, and a few under the interpreter."""

# mypy: disable-error-code="arg-type, assignment, attr-defined, has-type, unused-ignore"

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS
from slipstream.engine import devices
from slipstream.engine.active_sequence import ActiveSequence
from slipstream.engine.batch_planner import BatchPlan, BatchPlanner, DeviceBatch, TimedStep
from slipstream.engine.executor import NO_SEQUENCE, BatchColumn, RowWork, Wish, bucket
from slipstream.engine.gpu import decode_step as step_module
from slipstream.engine.gpu.decode_loop import DecodeLoop, device_drafter
from slipstream.engine.gpu.decode_state import DecodeState
from slipstream.engine.gpu.gpu_executor import GpuExecutor, batch_shapes
from slipstream.engine.llm import LLM
from slipstream.errors import IntegrityError
from slipstream.grammar import notations as grammars
from slipstream.kernels.gpu.tree_growth import calibration_line
from slipstream.kernels.rows import TREE
from slipstream.models.gpu.device_models import GpuDrafter
from slipstream.models.gpu.device_stack import GpuContext
from slipstream.speculative.accept import accept
from slipstream.speculative.estimate import DraftOutcome, Estimate, Record
from slipstream.speculative.policy import SequencePolicy
from slipstream.speculative.text_drafts import MOST_TEXT_NODES
from slipstream.types import BASE_VARIANT, Decision, Proposal, SamplingParams, Verdict
from tests.adapters import write_random_adapter
from tests.tiny import Driver, assert_idle, keep_threads, mixed_requests, prompt, tiny_llm
from tests.watched import add_watched

NO_ROW = -7  # a token that nothing carries
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_device", lambda: DEVICE)


def gpu_llm(folder: Path, kernels: str = "reference", **settings: object) -> LLM:
    llm = tiny_llm(folder, weight_format="bf16", device="cuda", kernels=kernels, **settings)
    assert isinstance(llm.engine.executor, GpuExecutor)
    return llm


def loop_of(llm: LLM) -> DecodeLoop:
    assert isinstance(llm.engine.executor, GpuExecutor)
    return llm.engine.executor.device_steps


def planner_of(llm: LLM) -> BatchPlanner:
    assert llm.engine.ahead is not None
    return llm.engine.ahead.planner


def drafter_of(llm: LLM, variant: str = BASE_VARIANT) -> GpuDrafter:
    drafter = device_drafter(llm.engine.executor.variants[variant])
    assert drafter is not None
    return drafter


def texts(llm: LLM, mode: str) -> dict[str, tuple[list[int], str]]:
    requests = mixed_requests(mode)
    found = llm.run(requests)
    assert all(answer.error is None for answer in found), [answer.error for answer in found]
    return {r.id: (answer.token_ids, answer.finish_reason) for r, answer in zip(requests, found, strict=True)}


def test_every_mode_writes_the_plain_text_and_leaves_nothing_behind(gpu: None, tmp_path: Path) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path)
        plain = texts(llm, "plain")
        for mode in ("chain", "chain:5", "tree:16", "tree:24:seed", "auto"):
            assert texts(llm, mode) == plain, mode
        assert_idle(llm)


def test_device_steps_go_on_while_a_mask_is_computed(gpu: None, tmp_path: Path) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path)
        settings = {"temperature": 0, "max_tokens": 30, "mode": "chain"}
        held, free = {**settings, "constraint": grammars.regex("[A-E]{20,30}(yes|no)")}, settings
        alone = [answer.text for answer in llm.run([llm.request(prompt(9, 1), **s) for s in (held, free)])]
        slow, other = (llm.request(prompt(9, 1), **s) for s in (held, free))
        watch = add_watched(llm, slow, closed=True)
        llm.engine.add(other)
        texts = {slow.id: "", other.id: ""}
        while llm.engine.has_work:
            for event in llm.engine.step():
                texts[event.request_id] += event.text
                if event.request_id == other.id and event.finish_reason is not None:
                    assert not texts[slow.id] and watch.began.is_set() and not watch.gave_up
                    watch.gate.set()
        assert [texts[slow.id], texts[other.id]] == alone
        assert_idle(llm)


@pytest.mark.parametrize("most", [1, 3])
def test_an_engine_for_few_sequences_measures_no_more_than_it_has_room_for(
    gpu: None, tmp_path: Path, most: int
) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path, max_sequences=most)
        assert llm.measure_costs()
        answers = {}
        for mode in ("plain", "auto"):
            requests = [llm.request(prompt(30, number), max_tokens=24, mode=mode) for number in (3, 4)]
            answers[mode] = [answer.token_ids for answer in llm.run(requests)]
        assert answers["auto"] == answers["plain"]
        with pytest.raises(IntegrityError, match="room for"):
            loop_of(llm).step(8, 1, None, False)


def test_a_server_captures_every_size_of_batch_before_it_serves(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch_shapes(1, 256) == []
    assert batch_shapes(2, 64) == [(2, 1, False), (2, 1, True), (2, 8, True), (2, 16, True), (2, 32, True)]
    rows = [sequences * each for sequences, each, _ in batch_shapes(64, 256) if each > 1]
    assert {min(rows), max(rows)} == {16, 256} and len(rows) == 23
    with keep_threads():
        llm = gpu_llm(tmp_path, max_sequences=6)
        backend, loop = llm.engine.executor.device, loop_of(llm)
        assert not loop.steps
        llm.prepare_batches()
        assert not loop.steps, "without graphs there is nothing to capture"
        monkeypatch.setattr(backend.graphs, "enabled", True)
        monkeypatch.setattr(backend.graphs, "runner", lambda key, launches: launches)
        free = itertools.chain([2**40, 2**40], itertools.repeat(0))
        with monkeypatch.context() as full:
            full.setattr(backend, "free_bytes", lambda: next(free))
            llm.prepare_batches()
        assert len(loop.steps) == 2, "what finds no room waits until it is needed"
        llm.prepare_batches()
        assert {(sequences, each) for _, sequences, each, _, _ in loop.steps} == {
            (sequences, each) for sequences, each, _ in batch_shapes(8, 256)
        }
        known = set(loop.steps)
        monkeypatch.setattr(planner_of(llm).gate, "drafts", lambda size: True)  # type: ignore[attr-defined]
        requests = [llm.request(prompt(20, number), max_tokens=12 + 9 * number, mode="auto") for number in range(6)]
        assert all(answer.stats.drafted for answer in llm.run(requests))
        # the rest is one sequence's, and what costs are measured by
        assert not [key for key in set(loop.steps) - known if key[1] != 1 and key[4]], "auto chose something else"


def test_device_steps_accept_drafts(gpu: None, tmp_path: Path) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path)
        for mode, temperature in (("chain", 0.8), ("tree:16", 0.0)):
            settings = {"max_tokens": 40, "mode": mode, "gate": "off", "temperature": temperature, "seed": 5}
            answer = llm.run([llm.request(prompt(40, 7), **settings)])[0]
            assert answer.stats.accepted > 0
            assert answer.stats.tau > 1.2
            assert len(answer.step_sizes) < 40


def first_drafts(llm: LLM, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What is drafted after prompts, whose context has come from nothing but their chunks."""
    found = []
    for ids in prompts:
        request = llm.request(list(ids), max_tokens=12, mode="chain", gate="off", cache_prompt=False)
        llm.engine.add(request)
        events = []
        while llm.engine.has_work:
            events += llm.engine.step()
        found.append(next(event.step.proposal.tokens for event in events if event.step is not None))
    return found


def test_prompts_bring_the_draft_context_that_they_bring_on_a_cpu(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it texts would be right, and drafts as good as random."""
    prompts = [prompt(length, length) for length in (5, 23, 40, 64, 65, 90, 130, 150)]
    with keep_threads():
        right = first_drafts(tiny_llm(tmp_path, weight_format="bf16", device="cpu", prefill_chunk=64), prompts)

        def agreed(drafts: list[tuple[int, ...]]) -> float:
            pairs = [pair for own, other in zip(drafts, right, strict=True) for pair in zip(own, other, strict=True)]
            return sum(a == b for a, b in pairs) / len(pairs)

        assert agreed(first_drafts(gpu_llm(tmp_path), prompts)) > 0.9
        monkeypatch.setattr(GpuContext, "write", lambda *given: None)
        assert agreed(first_drafts(gpu_llm(tmp_path), prompts)) < 0.7, "this test would not see it"


def test_wishes_bring_their_estimates_and_leave_those_of_others_alone() -> None:
    state = DecodeState(4, 2, 9, DEVICE)
    own = [Estimate(Record()) for _ in range(3)]

    def lines() -> list[list[float]]:
        return [calibration_line(each.table()).tolist() for each in own]

    def sent() -> list[list[float]]:
        return state.wishes.calibration[:3].tolist()

    state.load([BatchColumn(5, 1, [0], SamplingParams(), True)] * 3)
    wishes = [Wish(3, 3, TREE, each) for each in own]
    state.wish(wishes)
    assert sent() == lines() and state.wishes.nodes.tolist() == [3, 3, 3, NO_SEQUENCE.nodes]
    before = lines()
    for each in own:
        each.learn([DraftOutcome(0.6, 1, True)])
    assert lines() != before
    state.wish([wishes[0], NO_SEQUENCE, wishes[2]])
    assert sent() == before and state.wishes.nodes.tolist() == [3, NO_SEQUENCE.nodes, 3, NO_SEQUENCE.nodes]
    state.wish([Wish(7, 3, TREE, each) for each in own])
    assert sent() == lines() and state.wishes.nodes.tolist() == [7, 7, 7, NO_SEQUENCE.nodes]
    state.wish([Wish(7, 3, TREE)] * 3)
    assert [line[0] for line in sent()] == [0.0] * 3, "claims are taken as they are"
    state.clear()
    assert state.wishes.nodes.tolist() == [NO_SEQUENCE.nodes] * 4


def test_draft_context_has_room_for_the_longest_path_and_no_more(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    usual = GpuContext.write
    monkeypatch.setattr(GpuContext, "write", lambda *given: (written.append(given[1].shape[0]), usual(*given)))
    with keep_threads(), torch.inference_mode():
        llm = gpu_llm(tmp_path, max_sequences=128)
        drafter = drafter_of(llm)
        assert drafter is not None and drafter.proposals < MOST_TEXT_NODES
        whole = bucket(MOST_TEXT_NODES + 1)
        for sequences, each, rows in ((1, 16, 16), (32, 2, 64), (4, 16, 4 * whole), (2, 32, 2 * whole)):
            step, run = loop_of(llm).step(sequences, each, drafter, True)
            del written[:]
            run()
            assert step.held is None and written == [rows], (sequences, each)
        for sequences, turns in ((1, 16), (32, 16), (128, 8)):
            step, run = loop_of(llm).step(sequences, 1, drafter, False)
            assert step.held is not None and step.held.turns == turns
            del written[:]
            run()
            assert not written
            step.write_held()
            assert written == [len(step.held.places)] == [turns * sequences]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_only_slots_that_a_steps_rows_can_reach_pass_the_output_matrix(gpu: None, tmp_path: Path, kernels: str) -> None:
    """And their candidates are those of whole blocks."""
    with keep_threads(), torch.inference_mode():
        llm = gpu_llm(tmp_path, kernels, max_sequences=8)
        engine = llm.engine
        drafter = drafter_of(llm)
        assert drafter is not None
        engine.executor.memory.draft_keys.normal_()  # type: ignore[attr-defined]
        engine.executor.memory.draft_values.normal_()  # type: ignore[attr-defined]
        steps = [loop_of(llm).step(4, each, drafter, True)[0] for each in (4, 16)]
        sequences = [BatchColumn(9 + 5 * number, 65 + number, [number], SamplingParams(), True) for number in range(4)]
        loop_of(llm).state.load(sequences)
        drafts = [step.draft for step in steps if step.draft is not None]
        asked = Mock(side_effect=drafter.logits)
        with patch.object(drafter, "logits", asked):
            for draft in drafts:
                draft.run()
        assert [call.args[0].shape[0] for call in asked.call_args_list] == [16, 4 * drafter.block_size]
        few, whole = (draft.candidates for draft in drafts)
        assert (few.shape[1], whole.shape[1]) == (3, drafter.proposals)
        assert torch.equal(few.tokens, whole.tokens[:, :3])
        torch.testing.assert_close(few.scores, whole.scores[:, :3])
        # random draft context may put the same tokens in the same order for two slots, but never with the same scores
        assert few.scores.flatten(0, 1).unique(dim=0).shape[0] == 12, "every slot has its own"


def test_context_that_steps_hold_back_is_there_when_it_is_read(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against an engine that writes it at every step: the same texts, the same drafts accepted, the same context."""
    written = []
    usual = GpuContext.write
    monkeypatch.setattr(GpuContext, "write", lambda *given: (written.append(given[1].shape[0]), usual(*given)))

    def run(turns: int) -> tuple[list[object], Tensor, int]:
        monkeypatch.setattr(step_module, "MOST_HELD_TURNS", turns)
        llm = gpu_llm(tmp_path, max_sequences=2, cache_tokens=12 * PAGE_TOKENS)
        engine = llm.engine
        steps, plan = itertools.count(), planner_of(llm).plan

        def now_and_then(batch: DeviceBatch, alone: bool) -> BatchPlan:
            made = plan(batch, alone)
            return made if next(steps) % 30 in (5, 6, 28) else BatchPlan.plain(batch, "")

        monkeypatch.setattr(planner_of(llm), "plan", now_and_then)
        # Prompts wait for decoding steps by the time that steps take. Here they never wait, so that both runs have the
        # same steps and drafts come at the same places.
        monkeypatch.setattr(engine.scheduler, "took", lambda *_: None)
        # the third finds the first's beginning in the cache, all come and go while others decode
        prompts = [prompt(40, 7), prompt(70, 2), prompt(40, 7) + prompt(30, 4), prompt(100, 5)]
        lengths = 30, 47, 38, 25
        settings = {"mode": "tree:8", "gate": "off", "ignore_eos": True}
        requests = [llm.request(ids, max_tokens=n, **settings) for ids, n in zip(prompts, lengths, strict=True)]
        del written[:]
        answers = llm.run(requests)
        engine.executor.memory.settle()  # type: ignore[attr-defined]
        pools = engine.executor.memory
        told = [(answer.token_ids, answer.step_sizes, answer.stats.accepted) for answer in answers]
        return list(told), torch.stack((pools.draft_keys, pools.draft_values))[:, :, :-1].float(), len(written)

    with keep_threads():
        (told, context, often), (expected, at_once, always) = run(16), run(1)
    assert told == expected and sum(accepted for *_, accepted in expected) > 5  # type: ignore[misc]
    torch.testing.assert_close(context, at_once, rtol=2**-7, atol=1e-3)
    assert always - often > 30


def test_sequences_that_may_draft_do_not_keep_prompts_waiting(gpu: None, tmp_path: Path) -> None:
    def steps_until_all_decode(llm: LLM, mode: str) -> int:
        llm.engine.scheduler.took = lambda *_: None  # type: ignore[method-assign]  # no step waits by the clock
        requests = [llm.request(prompt(60, n), max_tokens=40, mode=mode) for n in range(40)]
        for request in requests:
            llm.engine.add(request)
        steps = 0
        while any(ticket.prefilling for ticket in llm.engine.scheduler.running) or llm.engine.scheduler.waiting:
            llm.engine.step()
            steps += 1
        for request in requests:
            llm.engine.cancel(request.id)
        while llm.engine.has_work:
            llm.engine.step()
        return steps

    with keep_threads():
        llm = gpu_llm(tmp_path, max_sequences=40, max_waiting=40, step_rows=512, cache_tokens=40 * 8 * PAGE_TOKENS)
        assert steps_until_all_decode(llm, "auto") == steps_until_all_decode(llm, "plain")


def test_steps_among_prompts_neither_teach_the_gate_nor_try_anything(gpu: None, tmp_path: Path) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path, max_context=2048, cache_tokens=4096)
        gate, asked = planner_of(llm).gate, []  # type: ignore[attr-defined]
        for name in ("drafts", "better", "observe"):
            usual = getattr(gate, name)
            setattr(gate, name, lambda *told, name=name, usual=usual: (asked.append(name), usual(*told))[1])
        llm.engine.add(llm.request(prompt(9, 1), max_tokens=40, mode="auto"))
        for _ in range(6):
            llm.engine.step()
        assert {"drafts", "observe"} == set(asked)
        llm.engine.scheduler.took = lambda *_: None  # type: ignore[method-assign]  # every step has a part of the prompt
        llm.engine.add(llm.request(prompt(1500, 2), max_tokens=2, mode="plain"))
        llm.engine.step()  # lands what was in flight
        del asked[:]
        while any(ticket.prefilling for ticket in llm.engine.scheduler.running) or llm.engine.scheduler.waiting:
            llm.engine.step()
        assert set(asked) == {"better"}
        while llm.engine.has_work:
            llm.engine.step()


def test_requests_join_and_leave_a_running_batch(gpu: None, tmp_path: Path) -> None:
    lengths = (9, 70, 33)
    settings = {"max_tokens": 30, "mode": "tree:16", "gate": "off", "temperature": 1.5, "seed": 5}
    with keep_threads():
        llm = gpu_llm(tmp_path)
        alone = [llm.run([llm.request(prompt(n, n), **settings)])[0].token_ids for n in lengths]
        first, second, third = (llm.request(prompt(n, n), **settings) for n in lengths)
        found: dict[str, list[int]] = {request.id: [] for request in (first, second, third)}
        llm.engine.add(first)
        for step in range(200):
            if step == 2:
                llm.engine.add(second)
            if step == 4:
                llm.engine.add(third)
                llm.engine.cancel(second.id)
            for event in llm.engine.step():
                found[event.request_id] += [token.id for token in event.tokens]
        assert found[first.id] == alone[0] and found[third.id] == alone[2]
        assert found[second.id] == alone[1][: len(found[second.id])]
        assert_idle(llm)


@pytest.mark.parametrize("pages", [24, 7])
def test_a_paused_request_goes_on_where_it_stood(gpu: None, tmp_path: Path, pages: int) -> None:
    """Paused while a step is in flight for it; with few pages it even loses its own and is computed again."""
    settings = {"max_tokens": 40, "mode": "tree:16", "gate": "off", "temperature": 1.5, "seed": 5}
    with keep_threads():
        llm = gpu_llm(tmp_path, cache_tokens=pages * PAGE_TOKENS, prefix_cache=False)
        alone = [llm.run([llm.request(prompt(n, n), **settings)])[0].token_ids for n in (9, 33, 20)]
        first, second, third = (llm.request(prompt(n, n), **settings) for n in (9, 33, 20))
        found: dict[str, list[int]] = {request.id: [] for request in (first, second, third)}
        llm.engine.add(first)
        llm.engine.add(second)
        for step in range(200):
            if step == 4:
                assert llm.engine.pause(second.id)
            if step == 5:
                llm.engine.add(third)
            if step == (5 if pages > 7 else 60):
                assert llm.engine.resume(second.id)
            for event in llm.engine.step():
                found[event.request_id] += [token.id for token in event.tokens]
        assert [found[request.id] for request in (first, second, third)] == alone
        assert_idle(llm)


def test_variants_of_the_drafter_come_and_go(gpu: None, tmp_path: Path) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path)
        settings = {"max_tokens": 30, "mode": "tree:16", "gate": "off"}
        plain = llm.run([llm.request(prompt(40, 7), max_tokens=30, mode="plain")])[0].token_ids
        adapter = write_random_adapter(tmp_path / "a", tmp_path / "draft", seed=3, size=2.0)
        assert llm.add_draft_lora(f"other={adapter}") == "other"
        requests = [llm.request(prompt(40, 7), **settings, draft_lora=name) for name in ("base", "other", "other")]
        answers = llm.run(requests)
        assert [answer.token_ids for answer in answers] == [plain] * 3
        assert [answer.stats.draft_lora for answer in answers] == ["base", "other", "other"]
        alone = llm.run([llm.request(prompt(40, 7), **settings, draft_lora="other")])[0]
        assert alone.stats.accepted == answers[1].stats.accepted != answers[0].stats.accepted
        steps, graphs = len(loop_of(llm).steps), llm.engine.executor.passes.graphs
        captured = len(graphs)
        weights = weakref.ref(drafter_of(llm, "other"))
        llm.remove_draft_lora("other")
        assert len(loop_of(llm).steps) < steps and len(graphs) < captured
        del requests, answers, alone
        gc.collect()
        assert weights() is None, "a removed variant keeps its weights on the device"
        assert_idle(llm)


def test_who_ends_leaves_the_others_to_go_on(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight answers of different lengths: the batch is laid out anew only when half of its columns are empty."""
    lengths = (6, 9, 12, 15, 18, 21, 24, 27)
    loads: list[int] = []
    load = DecodeState.load

    def counted(state: DecodeState, batch: Sequence[BatchColumn]) -> None:
        loads.append(len(batch))
        load(state, batch)

    monkeypatch.setattr(DecodeState, "load", counted)
    with keep_threads():
        llm = gpu_llm(tmp_path, max_sequences=8, cache_tokens=48 * PAGE_TOKENS)
        for mode in ("plain", "tree:4"):
            settings = [
                {"max_tokens": most, "mode": mode, "gate": "off", "temperature": 1.2, "seed": most} for most in lengths
            ]
            alone = [llm.run([llm.request(prompt(9, 3), **each)])[0].token_ids for each in settings]
            loads.clear()
            together = llm.run([llm.request(prompt(9, 3), **each) for each in settings])
            assert [answer.token_ids for answer in together] == alone
            sizes = [size for size in loads if size]
            assert sizes[0] == 8 and 2 <= len(sizes) <= 4
            assert all(2 * fewer <= columns for columns, fewer in itertools.pairwise(sizes)), sizes
        assert_idle(llm)


def test_a_step_is_told_as_the_host_would_have_walked_it(gpu: None, tmp_path: Path) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path)
        requests = [llm.request(prompt(20, n), max_tokens=30, mode="tree:16", gate="off", seed=n) for n in range(3)]
        for request in requests:
            llm.engine.add(request)
        written: dict[str, list[int]] = {request.id: [] for request in requests}
        accepted = 0
        while llm.engine.has_work:
            for event in llm.engine.step():
                before = written[event.request_id]
                written[event.request_id] = before + [token.id for token in event.tokens]
                if event.step is None:
                    continue
                proposal, verdict = event.step.proposal, event.step.verdict
                assert proposal.tokens[0] == before[-1]
                # what the target chose is only known along the path: a row after it must not carry the next token
                chosen = [NO_ROW] * len(proposal.tokens)
                for row, token in zip(verdict.path, verdict.tokens, strict=True):
                    chosen[row] = token
                assert accept(proposal, chosen) == verdict
                accepted += verdict.accepted
        assert accepted > 0


def tiny_sequences(llm: LLM, count: int) -> list[ActiveSequence]:
    """Sequences under the policy as they are before their first step."""
    requests = [llm.request(prompt(4, number), mode="auto") for number in range(count)]
    return [llm.engine.make_sequence(request) for request in requests]


@pytest.mark.parametrize("count", [1, 2, 4, 6, 64])
def test_of_many_sequences_a_few_are_learnt_from(gpu: None, tmp_path: Path, count: int) -> None:
    """One or two sequences learn from every step; of more each has its turn."""
    with keep_threads():
        llm = gpu_llm(tmp_path)
        batch = DeviceBatch.of(tiny_sequences(llm, count))
        turns = [planner_of(llm).learnt_places(batch) for _ in range(3 * count)]
        if count <= 2:
            assert all(turn == set(range(count)) for turn in turns)
        else:
            assert max(map(len, turns)) == 2 and set().union(*turns) == set(range(count))


def test_a_plan_for_many_outlives_those_who_leave(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = gpu_llm(tmp_path, cache_tokens=64 * PAGE_TOKENS)
    planner = planner_of(llm)
    monkeypatch.setattr(planner.gate, "drafts", lambda size: True)
    made = Mock(side_effect=llm.engine.proposer.most_slots)
    monkeypatch.setattr(llm.engine.proposer, "most_slots", made)
    sequences = tiny_sequences(llm, 12)
    batch = DeviceBatch.of(sequences, llm.engine.executor.variants[BASE_VARIANT])
    first = planner.plan(batch, alone=True)
    assert made.call_count == 1 and all(wish.nodes for wish in first.wishes)
    for gone in (3, 7):
        left = batch.reduced([sequence for sequence in batch.sequences if sequence is not sequences[gone]])
        assert left is not None
        batch = left
        held = planner.plan(batch, alone=True)
        assert made.call_count == 1 and held.wishes[gone] is NO_SEQUENCE
        assert all(held.wishes[place] is first.wishes[place] for place in batch.places)
    planner.plan(DeviceBatch.of(sequences[:6]), alone=True)
    assert made.call_count == 2


def test_of_many_sequences_everybody_drafts_who_can(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = gpu_llm(tmp_path)
    engine = llm.engine
    monkeypatch.setattr(planner_of(llm).gate, "drafts", lambda size: True)
    monkeypatch.setattr(engine.proposer, "slots", Mock(side_effect=AssertionError("nobody is chosen among many")))
    sequences = tiny_sequences(llm, 6)
    for sequence in sequences:
        assert sequence.policy is not None
        for _ in range(50):
            sequence.policy.draft_was_useless()  # alone it would not draft
    sequences[2].next_step_plain = True
    sequences[4].generated = sequences[4].max_tokens - 1
    batch = DeviceBatch.of(sequences, llm.engine.executor.variants[BASE_VARIANT])
    wishes = planner_of(llm).plan(batch, alone=True).wishes
    assert [wish.nodes > 0 for wish in wishes] == [True, True, False, True, False, True]
    assert not sequences[2].next_step_plain, "one step is enough"


def test_the_policy_is_told_of_what_was_drafted(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path, max_sequences=8, cache_tokens=64 * PAGE_TOKENS)
        planner, taught = planner_of(llm), list[tuple[float, Proposal, Verdict]]()
        monkeypatch.setattr(planner.gate, "drafts", lambda size: True)
        timed = Mock(side_effect=planner.learn_times)
        monkeypatch.setattr(planner, "learn_times", timed)
        usual = SequencePolicy.learn

        def learn(own: SequencePolicy, proposal: Proposal, verdict: Verdict) -> None:
            taught.append((own.rows_ms, proposal, verdict))
            usual(own, proposal, verdict)

        monkeypatch.setattr(SequencePolicy, "learn", learn)
        llm.run([llm.request(prompt(20, number), max_tokens=24, mode="auto") for number in range(6)])
        assert timed.call_count > 3 and all(len(call.args[3]) <= 2 for call in timed.call_args_list)
        assert 3 < len(taught) <= 2 * timed.call_count
        for rows_ms, proposal, verdict in taught:
            assert rows_ms >= 0.0 and proposal.nodes and len(proposal.claims) == proposal.nodes + 1
            assert all(0.0 < chance <= 1.0 for chance in proposal.claims)
            assert len(verdict.path) == len(verdict.tokens) <= proposal.nodes + 1
        assert any(rows_ms > 0.0 for rows_ms, _, _ in taught)
        new = llm.engine.make_sequence(llm.request(prompt(4), mode="auto"))
        assert new.policy is not None and new.policy.by_slots.drafts, "a request begins with what these have shown"


@pytest.mark.parametrize(("count", "crowded", "heeded"), [(8, False, True), (8, True, False), (4, False, False)])
def test_the_slowest_of_many_count_unless_somebody_waits(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, crowded: bool, heeded: bool
) -> None:
    llm = gpu_llm(tmp_path)
    told = Mock()
    monkeypatch.setattr(planner_of(llm).gate, "observe", told)
    batch = DeviceBatch.of(tiny_sequences(llm, count))
    drafts, plain = (BatchPlan.of(batch, [Wish()] * count, [Decision()] * count, may) for may in (True, False))
    tokens = [1] * (count // 4) + [4] * (count - count // 4)
    for _ in range(30):
        planner_of(llm).tell_gate(batch, drafts, TimedStep(4, range(count), tokens, 0.002, crowded), captured=False)
    size, drafting, rows, counted, seconds = told.call_args.args
    assert (size, drafting, rows, seconds) == (count, True, 4, 0.002)
    assert counted == pytest.approx(0.7 * 3.25 if heeded else 3.25)
    planner_of(llm).tell_gate(batch, plain, TimedStep(1, range(count), [1] * count, 0.001, crowded), captured=False)
    assert told.call_args.args == (count, False, 1, 1.0, 0.001)


def test_random_operations_leak_nothing(gpu: None, tmp_path: Path) -> None:
    with keep_threads():
        llm = gpu_llm(tmp_path, check_integrity=False, cache_tokens=24 * PAGE_TOKENS)
        seen = Driver(llm.engine, random.Random(5)).run(60)
        assert seen.free == seen.total and seen.accepted > 0


def test_the_interpreter_runs_the_same_rows(gpu: None, tmp_path: Path) -> None:
    """One pass over a short prompt by both kinds of kernels; then a whole step, which only has to come through."""
    with keep_threads():
        logits = []
        for kernels in ("reference", "triton"):
            llm = gpu_llm(tmp_path, kernels, prefill_chunk=16)
            engine = llm.engine
            state = SequenceState(engine.table, PAGE_TOKENS, engine.executor.memory, drafting=True)
            state.start(prompt(4, 3), [])
            state.reserve(8)
            logits.append(engine.executor.forward([RowWork(state, 0, state.tokens, 4)]).logits[0])
            state.release()
        assert (logits[0] - logits[1]).abs().max() < 0.03 * logits[0].abs().max()
        answer = llm.run([llm.request(prompt(4, 3), max_tokens=2, mode="chain:2", gate="off")])[0]
        assert len(answer.token_ids) == 2 and answer.error is None
