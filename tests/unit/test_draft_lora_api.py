"""Draft variants over HTTP with tiny models: their permissions, which paths are taken, and what outlives a load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.errors import ConfigError
from slipstream.server.apis import draft_lora_api
from slipstream.server.app import create_app
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.server_state import ServerSettings, ServerState
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.router import ModelRouter
from tests.adapters import factors, peft_tensors, write_peft
from tests.tiny import HIDDEN, keep_threads, write_pair

Ask = Callable[..., Coroutine[Any, Any, tuple[int, Any]]]


def client(**settings: Any) -> TestClient:
    app = create_app(ServerState(ServerSettings(**settings), ModelRouter([]), Metrics(), phase="ready"))
    return TestClient(app, base_url="http://localhost")


def adapter(folder: Path, seed: int = 1) -> Path:
    return write_peft(folder, peft_tensors({"layers.0.self_attn.o_proj": factors((HIDDEN, HIDDEN), seed=seed)}))


def test_without_a_folder_variants_are_fixed() -> None:
    asked = client()
    assert asked.get("/v1/draft-lora").json() == {"object": "list", "data": []}
    for answer in (asked.post("/v1/draft-lora", json={"path": "a"}), asked.delete("/v1/draft-lora/a")):
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "draft_lora_fixed"
        assert "--draft-lora-folder" in answer.json()["error"]["message"]


def test_the_servers_key_is_asked_for(tmp_path: Path) -> None:
    asked = client(api_keys=("sesame",), draft_lora_folder=tmp_path)
    for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/a")):
        assert asked.request(method, f"/v1/draft-lora{path}", json={"path": "a"}).status_code == 401
    assert asked.get("/v1/draft-lora", headers={"x-api-key": "sesame"}).status_code == 200


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        ServerSettings(draft_lora_folder=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "path", ["../outside", "inside/../../outside", "/etc", ".", "inside/..", "link", "link/deeper", "loop", "a\0b"]
)
def test_only_paths_in_the_folder_are_looked_at(tmp_path: Path, path: str) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    adapter(outside)
    (folder / "inside").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (folder / "loop").symlink_to(folder / "loop")
    answer = client(draft_lora_folder=folder).post("/v1/draft-lora", json={"path": path})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "path"
    assert str(tmp_path) not in answer.json()["error"]["message"]


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_of_an_adapter_may_be_a_link_only_within_the_folder(tmp_path: Path, file: str) -> None:
    folder = tmp_path.resolve() / "folder"
    outside = adapter(tmp_path / "outside")
    for name, source in (("inside", adapter(folder / "files")), ("leaving", outside)):
        linked = adapter(folder / name)
        (linked / file).unlink()
        (linked / file).symlink_to(source / file)
    assert str(folder / "inside") in draft_lora_api.adapter_source(folder, draft_lora_api.AddRequest(path="inside"))
    weights = "leaving/adapter_model.safetensors"  # named alone, it is read with the config beside it
    for path in ("leaving", weights):
        with pytest.raises(ApiError, match="not in the folder"):
            draft_lora_api.adapter_source(folder, draft_lora_api.AddRequest(path=path))


def test_nobodys_home_is_meant(tmp_path: Path) -> None:
    source = draft_lora_api.adapter_source(tmp_path.resolve(), draft_lora_api.AddRequest(path="~/adapter"))
    assert source == f"{tmp_path.resolve()}/~/adapter@1.0"


@pytest.mark.parametrize(
    ("asked", "source"),
    [
        ({"path": "a"}, "{}/a@1.0"),
        ({"path": "./b/../a", "scale": 2}, "{}/a@2.0"),
        ({"path": "a@3"}, "{}/a@3@1.0"),
        ({"path": "..@1"}, "{}/..@1@1.0"),
        ({"path": "x=y", "name": "n-1.b", "scale": 0.5}, "n-1.b={}/x=y@0.5"),
    ],
)
def test_what_the_engine_is_told(tmp_path: Path, asked: dict[str, Any], source: str) -> None:
    folder = tmp_path.resolve()
    assert draft_lora_api.adapter_source(folder, draft_lora_api.AddRequest(**asked)) == source.format(folder)


@pytest.mark.parametrize("name", ["", "a=b", "a/b", "-a", "a b", "a\n", "x" * 65])
def test_names_that_could_mean_something_else_are_refused(tmp_path: Path, name: str) -> None:
    answer = client(draft_lora_folder=tmp_path).post("/v1/draft-lora", json={"path": "a", "name": name})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "name"


def with_tiny_server(folder: Path, work: Callable[[Ask], Coroutine[Any, Any, None]], **spec: Any) -> None:
    """Runs `work` against a server of one tiny pair whose adapters lie in the folder."""
    target, draft = write_pair(folder)
    engine = EngineConfig("fp32", max_context=512, max_sequences=2, cache_tokens=24 * PAGE_TOKENS, threads=1)

    async def run() -> None:
        router = ModelRouter([ModelSpec("tiny", str(target), str(draft), engine, **spec)])
        app = create_app(ServerState(ServerSettings(draft_lora_folder=folder), router, Metrics(), phase="ready"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:

            async def ask(method: str, url: str, /, **body: Any) -> tuple[int, Any]:
                answer = await http.request(method, url, json=body or None)
                return answer.status_code, answer.json()

            try:
                await asyncio.wait_for(work(ask), 60)
            finally:
                await router.close()

    with keep_threads():
        asyncio.run(run())


async def variants(ask: Ask) -> list[str]:
    return list((await ask("GET", "/v1/models"))[1]["data"][0]["draft_variants"])


def test_what_was_added_and_removed_holds_for_the_next_load(tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "first"), adapter(tmp_path / "second", seed=5)

    async def work(ask: Ask) -> None:
        assert await variants(ask) == ["base", "first"]
        assert (await ask("POST", "/v1/draft-lora", path="second"))[0] == 200
        assert (await ask("DELETE", "/v1/draft-lora/first"))[0] == 200
        for state in ("unload", "load"):
            assert (await ask("POST", f"/models/tiny/{state}"))[0] == 200
            assert await variants(ask) == ["base", "second"]
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "draft_lora": "second"}
        assert (await ask("POST", "/v1/completions", **body, speculative={"mode": "chain"}))[0] == 200
        assert (await ask("POST", "/v1/completions", **{**body, "draft_lora": "first"}))[0] == 400

        second.rename(tmp_path / "gone")
        assert "second is gone" in (await ask("GET", "/v1/models/tiny"))[1]["warning"]
        await ask("POST", "/models/tiny/unload")
        status, answer = await ask("POST", "/models/tiny/load")
        assert status == 503 and "second" in answer["error"]["message"]
        # the way out: the variant goes, and the model is loaded at once
        assert (await ask("DELETE", "/v1/draft-lora/second"))[0] == 200
        assert (await ask("POST", "/models/tiny/load"))[0] == 200
        assert await variants(ask) == ["base"]

    with_tiny_server(tmp_path, work, draft_lora=(str(first),))


def test_a_models_own_variant_serves_who_names_none_and_stays(tmp_path: Path) -> None:
    own = adapter(tmp_path / "own")

    async def work(ask: Ask) -> None:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "speculative": {"mode": "chain"}}
        for named, used in (({}, "own"), ({"draft_lora": "base"}, "base")):
            assert (await ask("POST", "/v1/completions", **body, **named))[1]["timings"]["draft_lora"] == used
        several = (await ask("POST", "/v1/completions", **body, n=2))[1]
        assert several["timings"]["draft_lora"] == "own"
        status, answer = await ask("DELETE", "/v1/draft-lora/own")
        assert status == 409 and "start from 'own'" in answer["error"]["message"]
        assert await variants(ask) == ["base", "own"]

    with_tiny_server(tmp_path, work, draft_lora=(str(own),), defaults={"draft_lora": "own"})


def test_there_is_a_most_and_adapters_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_lora_api, "MAX_VARIANTS", 1)
    adapter(tmp_path / "good")
    write_peft(tmp_path / "wide", peft_tensors({"layers.0.self_attn.o_proj": factors((HIDDEN, HIDDEN + 8))}))

    async def work(ask: Ask) -> None:
        status, answer = await ask("POST", "/v1/draft-lora", path="wide")
        assert (status, answer["error"]["code"]) == (400, "invalid_adapter") and "o_proj" in answer["error"]["message"]
        assert (await ask("POST", "/v1/draft-lora", path="good"))[0] == 200
        status, answer = await ask("POST", "/v1/draft-lora", path="good", name="more")
        assert (status, answer["error"]["code"]) == (409, "draft_lora_conflict")
        assert await variants(ask) == ["base", "good"]

    with_tiny_server(tmp_path, work)
