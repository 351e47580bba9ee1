"""What the metrics count, what their gauges read from real engines, and that several servers do not collide."""

# mypy: disable-error-code="unused-ignore"

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.errors import EngineFailedError
from slipstream.server.apis import status_api
from slipstream.server.operations import errors_http
from slipstream.server.operations.canary import Promise
from slipstream.server.operations.metrics import Metrics, rounded_choice
from slipstream.server.operations.server_state import ServerSettings, ServerState
from slipstream.server.serving.answering import report
from slipstream.server.serving.generation import start
from slipstream.server.serving.jobs import Answer, Job
from slipstream.server.serving.model_entries import ModelFailedError
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.router import ModelRouter
from slipstream.stats import Decision, RequestStats
from slipstream.types import FinishReason, Mode, Request, SamplingParams
from tests.tiny import keep_threads, write_pair


def numbers(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample by its name and label values, read back with Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found[sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))] = sample.value
    return found


def answer(reason: FinishReason = "stop", cached: int = 0, draft_lora: str = "base") -> Answer:
    stats = RequestStats(
        prompt_tokens=20,
        cached_tokens=cached,
        completion_tokens=9,
        ttft_ms=30.0,
        decode_ms=40.0,
        bad_drafts=1,
        draft_lora=draft_lora,
    )
    stats.record_step(4, 4, 3, 4)
    stats.record_step(4, 2, 1, 2)
    stats.record_step(0, 0, 0, 1)
    stats.record_step(0, 0, 0, 1)
    for choice in ("chain:5", "tree:19", "tree:30", "plain"):
        stats.policy.record(Decision(choice), 1)
    return Answer("m", "auto", "d", finish_reason=reason, stats=stats)


def test_accepted_tokens_are_counted_by_their_source() -> None:
    both, alone, plain = (RequestStats(draft_lora=variant) for variant in ("base", None, None))
    both.record_step(6, 4, 4, 5, drafter_depth=3, drafter_accepted=3)
    alone.record_step(5, 5, 2, 3, drafter_depth=0, drafter_accepted=0)
    plain.record_step(0, 0, 0, 1)
    metrics = Metrics()
    for model, stats in (("pair", both), ("alone", alone), ("plain", plain)):
        metrics.answered(Answer(model, "auto", None, finish_reason="stop", stats=stats))
    seen = numbers(metrics)
    found = {key[1:]: value for key, value in seen.items() if key[0] == "slipstream_accepted_tokens_by_source_total"}
    assert found == {
        ("model=pair", "source=drafter"): 3,
        ("model=pair", "source=text"): 1,
        ("model=alone", "source=drafter"): 0,
        ("model=alone", "source=text"): 2,
    }
    assert seen["slipstream_accepted_tokens_total", "draft_lora=", "model=alone"] == 2
    assert not any("model=plain" in key and "accepted" in key[0] for key in seen)


def test_an_answer_is_counted_once_in_every_family() -> None:
    metrics = Metrics()
    metrics.answered(answer(), "chat")
    metrics.answered(answer("length", cached=16), "chat")
    seen = numbers(metrics)

    def count(name: str, *labels: str) -> float:
        return seen[f"slipstream_{name}", *labels]

    assert count("requests_total", "api=chat", "model=m", "outcome=stop") == 1
    assert count("requests_total", "api=chat", "model=m", "outcome=length") == 1
    totals = {
        "prompt_tokens": 40,
        "prefix_cache_tokens": 16,
        "prefix_cache_hits": 1,
        "generated_tokens": 18,
        "steps": 8,
        "bad_drafts": 2,
    }
    assert {name: count(f"{name}_total", "model=m") for name in totals} == totals
    drafted = {"drafted_steps": 4, "drafted_tokens": 16, "accepted_tokens": 8}
    assert {name: count(f"{name}_total", "draft_lora=base", "model=m") for name in drafted} == drafted
    by_position = {
        kind: [count(f"{kind}_at_position_total", "model=m", f"position={slot}") for slot in range(1, 5)]
        for kind in ("verified", "accepted")
    }
    assert by_position == {"verified": [4, 4, 2, 2], "accepted": [4, 2, 2, 0]}
    choices = {
        choice: count("policy_choices_total", f"choice={choice}", "model=m")
        for choice in ("plain", "chain:5", "tree:32")
    }
    assert choices == {"plain": 2, "chain:5": 2, "tree:32": 4}


def test_each_variant_of_a_drafter_is_counted_until_it_is_removed() -> None:
    metrics = Metrics()
    for variant in ("base", "code", "code"):
        metrics.answered(answer(draft_lora=variant), "chat")

    def accepted() -> dict[str, float]:
        name = "slipstream_accepted_tokens_total"
        return {key[1]: value for key, value in numbers(metrics).items() if key[0] == name}

    assert accepted() == {"draft_lora=base": 4, "draft_lora=code": 8}
    metrics.forget_variant("m", "code")
    metrics.forget_variant("m", "never drafted")
    assert accepted() == {"draft_lora=base": 4}
    assert not [key for key in numbers(metrics) if "draft_lora=code" in key]


def test_histograms_hold_seconds() -> None:
    metrics = Metrics()
    metrics.answered(answer(), "chat")
    seen = numbers(metrics)
    assert seen["slipstream_time_to_first_token_seconds_sum", "model=m"] == pytest.approx(0.030)
    assert seen["slipstream_time_per_token_seconds_sum", "model=m"] == pytest.approx(0.040 / 8)
    assert seen["slipstream_step_seconds_sum", "model=m"] == pytest.approx(0.040 / 4)
    assert seen["slipstream_request_seconds_sum", "api=chat", "model=m"] == pytest.approx(0.070)
    assert seen["slipstream_time_per_token_seconds_bucket", "le=0.004", "model=m"] == 0
    assert seen["slipstream_time_per_token_seconds_bucket", "le=0.008", "model=m"] == 1


def test_an_answer_that_never_began_leaves_no_latency_behind() -> None:
    metrics = Metrics()
    metrics.answered(Answer("m", "auto", "d", finish_reason="cancelled"), "chat")
    seen = numbers(metrics)
    assert seen["slipstream_requests_total", "api=chat", "model=m", "outcome=cancelled"] == 1
    assert ("slipstream_time_to_first_token_seconds_count", "model=m") not in seen
    assert ("slipstream_time_per_token_seconds_count", "model=m") not in seen


def test_refusals_are_counted_by_reason() -> None:
    metrics = Metrics()
    for reason in ("queue_full", "queue_full", "invalid_value"):
        metrics.refused(reason)
    seen = numbers(metrics)
    assert seen["slipstream_refused_total", "reason=queue_full"] == 2
    assert seen["slipstream_refused_total", "reason=invalid_value"] == 1


def test_two_servers_in_one_process_do_not_collide() -> None:
    first, second = Metrics(), Metrics()
    first.refused("queue_full")
    assert ("slipstream_refused_total", "reason=queue_full") not in numbers(second)


def test_the_canary_is_a_gauge() -> None:
    metrics = Metrics()
    stats = RequestStats()
    for _ in range(200):
        stats.record_step(4, 4, 0, 1)
    request = Request("r", (1,), SamplingParams(), Mode("chain"))
    metrics.canaries.observe("m", Promise({"chat": 2.0}, 15), request, stats)
    seen = numbers(metrics)
    assert seen["slipstream_canary_ratio", "model=m"] == 0
    assert seen["slipstream_canary_warning", "model=m"] == 1
    assert seen["slipstream_canary_warnings_total", "model=m"] == 1


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("plain", "plain"),
        ("chain:5", "chain:5"),
        ("tree:2", "tree:2"),
        ("tree:19", "tree:32"),
        ("tree:256", "tree:256"),
        ("tree:33", "tree:64"),
    ],
)
def test_trees_are_counted_by_rounded_size(choice: str, shown: str) -> None:
    assert rounded_choice(choice) == shown


def with_tiny_server(folder: Path, work: Callable[[ServerState], Coroutine[Any, Any, None]]) -> None:
    """Runs `work` against a router with one tiny pair in it and one that cannot be loaded."""
    target, draft = write_pair(folder)
    engine = EngineConfig("fp32", max_context=512, max_sequences=2, cache_tokens=24 * PAGE_TOKENS, threads=1)
    specs = [ModelSpec("tiny", str(target), str(draft), engine), ModelSpec("absent", str(folder / "nothing.gguf"))]

    async def run() -> None:
        state = ServerState(ServerSettings(), ModelRouter(specs), Metrics())
        state.metrics.watch(state.router)
        try:
            await asyncio.wait_for(work(state), 60)
        finally:
            await state.router.close()

    with keep_threads():
        asyncio.run(run())


def test_gauges_show_engines_and_models_as_they_are(tmp_path: Path) -> None:
    async def work(state: ServerState) -> None:
        job = Job("tiny", prompt="hello", settings={"max_tokens": 400, "mode": "chain", "ignore_eos": True})
        before = numbers(state.metrics)
        assert before["slipstream_models", "state=unloaded"] == 2
        assert ("slipstream_requests_running", "model=tiny") not in before
        generations = [await start(await state.router.lease("tiny"), job) for _ in range(4)]
        await anext(generations[0])
        during = numbers(state.metrics)
        assert during["slipstream_models", "state=ready"] == 1
        assert during["slipstream_model_state", "model=tiny", "state=ready"] == 1
        pairs = set()
        while (2, 2) not in pairs:  # a snapshot may fall into the middle of a step
            await asyncio.sleep(0.001)
            now = numbers(state.metrics)
            pairs.add(tuple(now[f"slipstream_requests_{kind}", "model=tiny"] for kind in ("running", "waiting")))
            assert not generations[0].over, pairs
        assert 0 < during["slipstream_pages_used", "model=tiny"] <= during["slipstream_pages_total", "model=tiny"] == 24
        for generation in generations:
            await generation.aclose()
            report(state, "chat", job, generation)
        after = numbers(state.metrics)
        assert after["slipstream_requests_running", "model=tiny"] == 0
        assert after["slipstream_requests_waiting", "model=tiny"] == 0
        assert after["slipstream_requests_total", "api=chat", "model=tiny", "outcome=cancelled"] == 4
        assert after["slipstream_generated_tokens_total", "model=tiny"] >= 1

    with_tiny_server(tmp_path, work)


def test_an_engine_that_dies_is_counted(tmp_path: Path) -> None:
    async def work(state: ServerState) -> None:
        lease = await state.router.lease("tiny")
        thread = lease.worker.thread
        job = Job("tiny", prompt="hello", settings={"max_tokens": 400, "ignore_eos": True, "mode": "plain"})
        generation = await start(lease, job)
        await anext(generation)
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        async for _ in generation:
            pass
        assert generation.answer.finish_reason == "error"
        await (await state.router.lease("tiny")).__aexit__(None, None, None)
        assert numbers(state.metrics)["slipstream_engine_failures_total", "model=tiny"] == 1

    with_tiny_server(tmp_path, work)


def test_health_and_the_list_of_models_follow_what_happens(tmp_path: Path) -> None:
    """A model that cannot be loaded says why and harms no other; a server without any usable model is failed."""

    async def work(state: ServerState) -> None:
        app = FastAPI()
        errors_http.install(app, state.metrics.refused)
        app.include_router(status_api.routes(state))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for phase in ("loading", "draining", "ready"):
                state.phase = phase  # type: ignore[assignment]
                health = await client.get("/health")
                assert (health.status_code, health.json()["phase"]) == (200 if phase == "ready" else 503, phase)
            assert (await client.post("/models/absent/load")).status_code == 503
            assert (await client.post("/models/tiny/load")).json()["state"] == "ready"
            listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
            assert listed["absent"]["state"] == "failed" and "nothing.gguf" in listed["absent"]["failure"]
            assert (listed["tiny"]["context_length"], listed["tiny"]["failure"]) == (512, None)
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/props")).json()["model"] == "tiny"
            assert (await client.get("/props?model=absent")).status_code == 400
            for path in ("/models/nobody/unload", "/models/nobody/load"):
                assert (await client.post(path)).status_code == 404
            assert (await client.post("/models/tiny/unload")).json()["state"] == "unloaded"
            assert (await client.post("/models/reload")).status_code == 400

    with_tiny_server(tmp_path, work)


def test_a_server_none_of_whose_models_can_be_loaded_is_failed(tmp_path: Path) -> None:
    async def run() -> str:
        router = ModelRouter([ModelSpec("absent", str(tmp_path / "nothing.gguf"))])
        state = ServerState(ServerSettings(), router, Metrics(), phase="ready")
        before = status_api.phase_of(state)
        with pytest.raises(ModelFailedError):
            await router.lease("absent")
        await router.close()
        return f"{before}, {status_api.phase_of(state)}"

    assert asyncio.run(run()) == "ready, failed"


def test_a_question_is_answered_on_the_engines_thread_and_cannot_hurt_it(tmp_path: Path) -> None:
    async def work(state: ServerState) -> None:
        async with await state.router.lease("tiny") as lease:
            worker = lease.worker
            assert worker.ask(threading.current_thread) is worker.thread
            with pytest.raises(ZeroDivisionError):
                worker.ask(lambda: 1 // 0)
            assert worker.alive and worker.ask(lambda: 7) == 7
            gate = threading.Event()
            with pytest.raises(EngineFailedError, match="does not answer"):
                worker.ask(gate.wait, timeout_s=0.05)
            gate.set()
            assert worker.ask(lambda: 8) == 8
            worker.stop(10)
            with pytest.raises(EngineFailedError):
                worker.ask(lambda: 9)

    with_tiny_server(tmp_path, work)
