"""Draft variants of a real server: each request drafts with its own in every API, and variants come and go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import factors, gguf_tensors, peft_tensors, write_gguf_adapter, write_peft
from tests.e2e.serving import MODEL, Server, serve
from tests.e2e.test_stream_socket import Client

pytestmark = pytest.mark.e2e
LAYERS, HIDDEN, INNER, KEYS = range(5), 576, 1536, 192  # sizes of the default pair's drafter
VARIANTS = ("base", "context", "inner")
STORY = "Tell me a short story about a fox."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One adapter that changes the draft context, and one that does not."""
    place = tmp_path_factory.mktemp("adapters")
    context = {
        f"layers.{layer}.self_attn.{part}_proj": factors((KEYS, HIDDEN), seed=10 * layer + number)
        for layer in LAYERS
        for number, part in enumerate("kv")
    }
    inner = {f"layers.{layer}.mlp.down_proj": factors((HIDDEN, INNER), seed=100 + 10 * layer) for layer in LAYERS}
    write_gguf_adapter(place / "context.gguf", gguf_tensors(context))
    write_peft(place / "inner", peft_tensors(inner))
    (place / "half.gguf").write_bytes((place / "context.gguf").read_bytes()[:20_000])
    return place


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("socket") / "stream.sock"


@pytest.fixture(scope="module")
def server(folder: Path, path: Path) -> Iterator[Server]:
    with serve(
        "--draft-lora",
        f"{folder}/context.gguf@0.05",
        "--draft-lora",
        f"inner={folder}/inner@0.3",
        "--draft-lora-folder",
        str(folder),
        "--stream-socket",
        str(path),
    ) as running:
        yield running


def chat(server: Server, variant: str | None, mode: str = "chain", **settings: Any) -> Any:
    named = {} if variant is None else {"draft_lora": variant}
    return server.post(
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": STORY}],
            "max_tokens": 40,
            "temperature": 0,
            "speculative": {"mode": mode},
            **named,
            **settings,
        },
    )


def drafts(answer: Any) -> tuple[Any, ...]:
    timings = answer["timings"]
    return *(timings[name] for name in ("draft_lora", "draft_n", "draft_n_accepted")), *timings["accepted_per_position"]


def refusal(server: Server, path: str, body: object = None, method: str | None = None) -> tuple[int, Any]:
    status, _, answer = server.ask(path, body, method=method)
    return status, json.loads(answer)["error"]


def test_requests_of_one_batch_draft_with_their_own_variants(server: Server) -> None:
    alone = {variant: chat(server, variant) for variant in VARIANTS}
    assert [drafts(alone[variant])[0] for variant in VARIANTS] == list(VARIANTS)
    assert len({drafts(answer)[1:] for answer in alone.values()}) == len(VARIANTS), "two of them draft alike"
    asked = (*VARIANTS, None)
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda variant: chat(server, variant), asked))
    assert [drafts(answer) for answer in together] == [drafts(alone[variant or "base"]) for variant in asked]
    plain = chat(server, "inner", mode="plain")
    assert plain["timings"]["draft_lora"] is None
    answers = [plain, *alone.values(), *together]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": STORY}], "max_tokens": 8},
    "/v1/completions": {"prompt": STORY, "max_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": STORY}], "max_tokens": 8},
    "/v1/responses": {"input": STORY, "max_output_tokens": 8},
}


@pytest.mark.parametrize("api", BODIES)
def test_every_api_takes_a_variant_and_refuses_an_unknown_one_with_the_known_names(server: Server, api: str) -> None:
    body = {"model": MODEL, "speculative": {"mode": "chain"}, **BODIES[api]}
    assert server.post(api, {**body, "draft_lora": "inner"})["timings"]["draft_lora"] == "inner"
    for more in ({}, {"stream": True}):
        status, error = refusal(server, api, {**body, "draft_lora": "outer", **more})
        assert status == 400 and "'outer'" in error["message"] and "base, context, inner" in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error.get("param") == (None if api == "/v1/messages" else "draft_lora")
    assert refusal(server, api, {**body, "draft_lora": 3})[0] == 400


def test_the_stream_socket_takes_a_variant_too(server: Server, path: Path) -> None:
    client = Client(path)
    client.ask("story:known", draft_lora="context", speculative={"mode": "chain"})
    client.ask("story:unknown", draft_lora="outer")
    ends: dict[str, Any] = {}
    while len(ends) < 2:
        frame = client.frame()
        if frame["type"] != "token":
            ends[frame["id"]] = frame
    client.close()
    assert ends["story:known"]["timings"]["draft_lora"] == "context"
    assert ends["story:unknown"]["status"] == 400
    assert "base, context, inner" in ends["story:unknown"]["error"]["message"]


def test_the_status_names_variants_and_the_canary_judges_the_base_alone(server: Server) -> None:
    assert server.get("/v1/models")["data"][0]["draft_variants"] == list(VARIANTS)
    chat(server, "base")
    before = server.get("/props")
    assert before["draft_variants"] == list(VARIANTS)
    answer = chat(server, "context")
    after = server.get("/props")
    assert answer["timings"]["draft_n"] > 0 and after["canary"] == before["canary"]
    chat(server, "base")
    assert server.get("/props")["canary"]["drafted_steps"] > after["canary"]["drafted_steps"]
    metrics = server.get("/metrics")
    for variant in VARIANTS[:2]:
        assert f'slipstream_accepted_tokens_total{{draft_lora="{variant}",model="{MODEL}"}}' in metrics


def test_a_variant_is_added_used_and_removed_while_others_draft(server: Server) -> None:
    expected = drafts(chat(server, "inner"))
    running = server.open_stream(
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": STORY}],
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
            "draft_lora": "inner",
            "speculative": {"mode": "chain"},
        },
    )
    running.recv(1)
    added = server.post("/v1/draft-lora", {"path": "inner", "name": "again", "scale": 0.3})
    assert added == {"name": "again", "model": MODEL, "draft_variants": [*VARIANTS, "again"]}
    listed = {entry["name"]: entry for entry in server.get("/v1/draft-lora")["data"]}
    assert list(listed) == [*VARIANTS, "again"] and listed["base"]["source"] is None
    assert listed["again"]["source"].endswith("/inner@0.3") and listed["again"]["model"] == MODEL
    assert drafts(chat(server, "again")) == ("again", *expected[1:])

    assert [slot["draft_lora"] for slot in server.busy()] == ["inner"], "the variant was not in use meanwhile"
    status, error = refusal(server, "/v1/draft-lora/inner", method="DELETE")
    assert (status, error["code"]) == (409, "draft_lora_conflict") and "in use" in error["message"]
    assert server.get("/v1/draft-lora/again", method="DELETE")["draft_variants"] == list(VARIANTS)
    running.close()
    server.wait_idle()

    assert 'draft_lora="again"' not in server.get("/metrics")
    assert refusal(server, "/v1/completions", {"model": MODEL, "prompt": "x", "draft_lora": "again"})[0] == 400
    assert drafts(chat(server, "inner")) == expected


def test_what_cannot_be_added_or_removed_changes_nothing(server: Server) -> None:
    for body, wanted, word in (
        ({"path": "inner"}, 409, "'inner' already"),
        ({"path": "context.gguf", "name": "base"}, 409, "'base' already"),
        ({"path": "half.gguf"}, 400, "half.gguf"),
        ({"path": "nothing.gguf"}, 400, "there is no adapter"),
        ({"path": "inner", "name": "new", "model": "other"}, 404, "'other'"),
    ):
        status, error = refusal(server, "/v1/draft-lora", body)
        assert status == wanted and word in error["message"], body
    for name, wanted in (("base", 400), ("nobody", 404)):
        assert refusal(server, f"/v1/draft-lora/{name}", method="DELETE")[0] == wanted
    assert server.get("/v1/models")["data"][0]["draft_variants"] == list(VARIANTS)
