"""Speculation from the text on the real target: beside its drafter, and alone, from the command line and a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.llm import LLM
from tests.e2e.serving import MODEL, Server, serve
from tests.helpers_models import smollm2_path

pytestmark = pytest.mark.e2e
# A text that goes on as it went on before, so that drafts from it are worth a row on any machine.
LINES = "Item 17: three red apples, two green pears and a basket of ripe plums.\n" * 6
QUESTION = "Repeat this list word by word, and then once more:\n" + LINES
GENERATE = ("generate", "--prompt", LINES, "--max-tokens", "48")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--draft", "suffix") as running:
        yield running


def test_generate_drafts_from_the_text_alone(as_json: Any, tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    fast = as_json(*GENERATE, "--draft", "suffix", "--trace", str(trace))
    plain = as_json(*GENERATE, "--draft", "none")
    assert (fast["draft"], plain["draft"]) == ("suffix", None)
    assert (fast["text"], fast["token_ids"]) == (plain["text"], plain["token_ids"])
    counts = fast["stats"]["accepted_by_source"]
    assert counts == {"drafter": 0, "text": fast["stats"]["accepted"]} and counts["text"] > 0
    assert fast["stats"]["steps"] < plain["stats"]["steps"] == plain["stats"]["completion_tokens"] - 1
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {line["mode"] for line in lines} == {"auto"}
    drafted = [source for line in lines for source in line["proposal"]["sources"][1:]]
    assert set(drafted) == {"text"} and len(drafted) == fast["stats"]["drafted"]
    assert all(line["proposal"]["sources"][0] is None for line in lines)


def test_a_target_without_a_known_drafter_drafts_from_its_text_by_default(cli: Any, as_json: Any) -> None:
    done = as_json(*GENERATE, "--target", str(smollm2_path()))
    assert done["draft"] == "suffix" and done["stats"]["accepted_by_source"]["text"] > 0
    refused = cli(*GENERATE, "--target", str(smollm2_path()), "--mode", "chain")
    assert refused.code == 2
    assert "mode 'chain' needs a drafter" in refused.err and "use mode auto" in refused.err


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}])
def test_the_default_pair_takes_drafts_from_both(settings: dict[str, Any]) -> None:
    with LLM(MODEL) as llm:
        auto, plain = (llm.generate(LINES, mode=mode, max_tokens=128, **settings) for mode in ("auto", "plain"))
        again, second = (
            llm.generate(LINES + plain.text + LINES, mode=mode, max_tokens=32, **settings) for mode in ("auto", "plain")
        )
    assert auto.token_ids == plain.token_ids and again.token_ids == second.token_ids
    counts = auto.stats.accepted_by_source
    assert counts["text"] > 0 and again.stats.cached_tokens > 0


def chat(server: Server, **more: Any) -> Any:
    messages = [{"role": "user", "content": QUESTION}]
    return server.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 64, **more})


def test_a_server_without_a_drafter_speculates_and_says_so(server: Server) -> None:
    fast, plain = chat(server), chat(server, speculative={"mode": "plain"})
    assert fast["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    timings = fast["timings"]
    assert (timings["draft"], timings["mode"], timings["draft_lora"]) == ("suffix", "auto", None)
    assert timings["accepted_by_source"] == {"drafter": 0, "text": timings["draft_n_accepted"]}
    assert timings["draft_n_accepted"] > 0 and timings["tau"] > 1
    assert plain["timings"]["draft"] is None and plain["timings"]["draft_n"] == 0
    details = fast["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == timings["draft_n_accepted"]


def test_its_models_props_and_metrics_name_the_source(server: Server) -> None:
    accepted = chat(server)["timings"]["draft_n_accepted"]
    (model,) = server.get("/v1/models")["data"]
    assert (model["draft"], model["mode"], model["draft_variants"]) == ("suffix", "auto", [])
    props = server.get("/props")
    assert (props["engine"]["draft"], props["draft_source"], props["canary"]) == ("suffix", "suffix", None)
    assert props["costs"]["steps_ms"], "the policy needs the costs of steps without a drafter too"
    counter = f'slipstream_accepted_tokens_by_source_total{{model="{MODEL}",source="text"}}'
    (line,) = [line for line in server.get("/metrics").splitlines() if line.startswith(counter)]
    assert float(line.rsplit(" ", 1)[1]) >= accepted > 0


def test_a_fixed_shape_is_refused_by_a_server_without_a_drafter(server: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "speculative": {"mode": "chain"}}
    status, _, answer = server.ask("/v1/chat/completions", body)
    assert status == 400 and b"mode 'chain' needs a drafter" in answer


def test_a_server_without_a_drafter_passes_the_smoke_test(server: Server, as_json: Any) -> None:
    result = as_json("smoke", server.url)
    seen = {check["name"]: (check["verdict"], check["sentence"]) for check in result["servers"][0]["checks"]}
    assert "fail" not in {verdict for verdict, _ in seen.values()}, seen
    assert seen["drafter and mode listed"] == ("pass", f"its own text drafts for {MODEL}, mode auto")
