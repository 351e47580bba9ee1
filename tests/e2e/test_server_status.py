"""The status of a real server: health, slots, props, models, consistent metrics, one log line each, recording."""

# mypy: disable-error-code="call-overload, unused-ignore"

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import gguf
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.bench.workloads import read_prompts
from slipstream.config import EngineConfig
from slipstream.engine.llm import LLM
from slipstream.formats.sources import NAMED_DRAFTS, PAIRS
from slipstream.server.operations.canary import CanaryBoard, promise_of
from tests.e2e.serving import MODEL, Server, serve

pytestmark = pytest.mark.e2e

CODE = "Write a Python function that returns the n-th Fibonacci number."


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def server(records: Path) -> Iterator[Server]:
    with serve("--record", str(records), "--api-key", "sesame") as running:
        yield running


def key() -> dict[str, str]:
    return {"Authorization": "Bearer sesame"}


def numbers(server: Server) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics", headers=key())):
        for sample in family.samples:
            found[sample.name, *(f"{label}={value}" for label, value in sorted(sample.labels.items()))] = sample.value
    return found


def chat(server: Server, text: str = CODE, **settings: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 48, **settings}
    return server.post("/v1/chat/completions", body, headers=key())


def request_lines(server: Server, path: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == "request" and line["path"] == path]


def test_health_is_open_and_tells_no_names(server: Server) -> None:
    status, _, body = server.ask("/health")
    assert status == 200
    assert json.loads(body)["phase"] == "ready"
    assert MODEL not in body.decode()
    for path in ("/props", "/slots", "/metrics", "/v1/models"):
        assert server.ask(path)[0] == 401, path


def test_the_metrics_add_up_to_what_the_answers_say(server: Server) -> None:
    before = numbers(server)
    answers = [
        chat(server, text, speculative={"mode": mode})
        for text in (CODE, "Tell me about the sea.")
        for mode in ("chain", "plain")
    ]
    after = numbers(server)

    def grown(name: str, *labels: str) -> float:
        where = (f"slipstream_{name}", *labels)
        return after[where] - before.get(where, 0)

    timings = [answer["timings"] for answer in answers]
    model, base = f"model={MODEL}", "draft_lora=base"
    assert grown("generated_tokens_total", model) == sum(t["predicted_n"] for t in timings)
    assert grown("drafted_tokens_total", base, model) == sum(t["draft_n"] for t in timings) > 0
    assert grown("accepted_tokens_total", base, model) == sum(t["draft_n_accepted"] for t in timings) > 0
    assert grown("prompt_tokens_total", model) == sum(t["prompt_n"] + t["cached_n"] for t in timings)
    accepted = sum(grown("accepted_at_position_total", model, f"position={slot}") for slot in range(1, 16))
    assert accepted == grown("accepted_tokens_total", base, model)
    assert grown("requests_total", "api=chat", model, "outcome=length") + grown_stops(before, after) == 4
    assert grown("time_to_first_token_seconds_count", model) == 4
    assert grown("steps_total", model) > grown("drafted_steps_total", base, model) > 0
    assert after["slipstream_requests_running", model] == 0
    assert after["slipstream_model_state", model, "state=ready"] == 1
    assert after["slipstream_pages_total", model] > after["slipstream_pages_used", model] > 0
    assert after["slipstream_canary_ratio", model] > 0.7 and after["slipstream_canary_warning", model] == 0


def grown_stops(before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float]) -> float:
    where = ("slipstream_requests_total", "api=chat", f"model={MODEL}", "outcome=stop")
    return after.get(where, 0) - before.get(where, 0)


def test_the_prefix_cache_and_refusals_are_counted(server: Server) -> None:
    long = "One, two, three, four. " * 30
    chat(server, long, max_tokens=4)
    before = numbers(server)
    cached = chat(server, long, max_tokens=4)["timings"]["cached_n"]
    assert cached > 0
    assert server.ask("/v1/chat/completions", {"model": MODEL, "messages": [], "magic": 1}, headers=key())[0] == 400
    assert (
        server.ask(
            "/v1/chat/completions", {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, headers=key()
        )[0]
        == 404
    )
    after = numbers(server)
    hits, tokens = (f"slipstream_prefix_cache_{kind}_total" for kind in ("hits", "tokens"))
    assert after[hits, f"model={MODEL}"] - before[hits, f"model={MODEL}"] == 1
    assert after[tokens, f"model={MODEL}"] - before[tokens, f"model={MODEL}"] == cached
    refused = sum(value for where, value in after.items() if where[0] == "slipstream_refused_total")
    assert refused - sum(value for where, value in before.items() if where[0] == "slipstream_refused_total") == 2
    assert not any("nobody" in label for where in after for label in where), "a client's text became a label"


def test_slots_show_a_running_request_and_let_it_go(server: Server) -> None:
    seen: list[dict[str, Any]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.extend(slot for model in server.get("/slots", headers=key())["models"] for slot in model["slots"])
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    chat(server, "Write a long story about a fox.", max_tokens=200)
    done.set()
    watcher.join()
    assert len({slot["request_id"] for slot in seen}) == 1
    steps = [slot["generated"] for slot in seen]
    assert steps == sorted(steps) and steps[-1] > 20
    assert {slot["max_tokens"] for slot in seen} == {200} and {slot["mode"] for slot in seen} == {"auto"}
    (model,) = server.get("/slots", headers=key())["models"]
    assert model["model"] == MODEL and model["alive"] and not model["slots"] and model["waiting"] == 0


def test_models_say_state_draft_and_use(server: Server) -> None:
    (before,) = server.get("/v1/models", headers=key())["data"]
    assert (before["id"], before["state"], before["mode"]) == (MODEL, "ready", "auto") and "dspark" in before["draft"]
    assert before["context_length"] >= 2048 and before["failure"] is None
    chat(server, max_tokens=2)
    after = server.get(f"/v1/models/{MODEL}", headers=key())
    assert after["last_used_ms"] > before["last_used_ms"] > 0
    status, _, body = server.ask("/v1/models/absent", headers=key())
    assert status == 404 and "absent" in json.loads(body)["error"]["message"]
    assert [model.id for model in server.openai(api_key="sesame").models.list()] == [MODEL]
    assert [model.id for model in server.anthropic(api_key="sesame").models.list()] == [MODEL]


def test_props_tell_the_machine_the_costs_and_the_promise_but_no_secret(server: Server) -> None:
    chat(server, max_tokens=2)
    props = server.get("/props", headers=key())
    assert props["model"] == MODEL and "dspark" in props["engine"]["draft"]
    assert props["costs"]["steps_ms"] and props["engine"]["block_size"] == 16
    assert set(props["expected_tau"]) >= {"code", "maths", "chat"}
    assert props["canary"]["state"] in ("learning", "ok") and props["settings"]["retry_after_s"] == 5
    assert "sesame" not in json.dumps(props)
    assert server.ask("/props?model=absent", headers=key())[0] == 404


def test_a_model_is_unloaded_and_loaded_by_hand(server: Server) -> None:
    assert server.post(f"/models/{MODEL}/unload", {}, headers=key())["state"] == "unloaded"
    assert server.health()["phase"] == "ready", "the model was not loaded again by a request"
    assert server.ask(f"/props?model={MODEL}", headers=key())[0] in (200, 400)
    assert server.post(f"/models/{MODEL}/load", {}, headers=key())["state"] == "ready"
    assert server.ask("/models/absent/load", {}, headers=key())[0] == 404
    status, _, body = server.ask("/models/reload", {}, headers=key())
    assert status == 400 and "no models file" in json.loads(body)["error"]["message"]


def test_every_request_has_one_line_without_its_text(server: Server) -> None:
    path, secret = "/v1/chat/completions", "xylophone"
    before = len(request_lines(server, path))
    answer = chat(server, f"Repeat the word {secret}.", max_tokens=24, metadata={"prompt_class": "chat"})
    until = time.monotonic() + 10  # the line is written after the answer was sent
    while len(lines := request_lines(server, path)) == before and time.monotonic() < until:
        time.sleep(0.05)
    assert len(lines) == before + 1
    line, timings = lines[-1], answer["timings"]
    said = (line["status"], line["api"], line["model"], line["outcome"])
    assert said == (200, "chat", MODEL, answer["choices"][0]["finish_reason"])
    assert (line["tokens"], line["drafted"]) == (timings["predicted_n"], timings["draft_n"])
    assert line["tau"] == pytest.approx(timings["tau"], abs=0.01)
    assert line["client"].startswith("127.0.0.1:") and line["ms"] > 0
    assert secret not in server.log.read_text().lower()


def test_conversations_are_recorded_where_the_server_said(server: Server, records: Path) -> None:
    (said,) = [line for line in server.log.read_text().splitlines() if '"recording"' in line]
    file = Path(json.loads(said)["path"])
    assert file.parent == records and file.stat().st_mode & 0o777 == 0o600
    answer = chat(server, "Name a colour.", max_tokens=8)
    deadline = time.monotonic() + 5
    while "Name a colour." not in (text := file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    line = json.loads(text.splitlines()[-1])
    assert line["messages"][-1] == {"role": "user", "content": "Name a colour."}
    assert line["answer"]["content"] == answer["choices"][0]["message"]["content"]
    assert line["acceptance"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_a_pair_whose_drafter_lost_its_way_is_noticed(tmp_path: Path) -> None:
    """With taps in the wrong order the text stays right and acceptance falls; only the expected tau shows it."""
    shipped = NAMED_DRAFTS[PAIRS[MODEL].draft]
    broken = tmp_path / shipped
    shutil.copy(resources.files("slipstream").joinpath("data", shipped), broken)  # type: ignore[arg-type]
    reader = gguf.GGUFReader(broken, "r+")
    layers = reader.fields["dflash.target_layers"]
    ids = [int(layers.parts[part][0]) for part in layers.data]
    for part, layer in zip(layers.data, reversed(ids), strict=True):
        layers.parts[part][0] = layer
    reader.data.flush()
    prompts, board = [turns[0] for turns in read_prompts("mt-bench")[::16]], CanaryBoard()
    with LLM(MODEL, str(broken), config=EngineConfig(cache_tokens=8192)) as llm:
        promise = promise_of(llm)
        assert promise is not None and set(promise.taus) == {"code", "maths", "chat"}
        requests = [llm.request(llm.prompt_ids(text, chat=True), mode="chain", max_tokens=32) for text in prompts]
        for request, completion in zip(requests, llm.run(requests), strict=True):
            board.observe(MODEL, promise, request, completion.stats)
    report = board.reports()[MODEL]
    assert report.state == "warning" and report.ratio is not None and report.ratio < 0.35
