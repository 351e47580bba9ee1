"""The chat page as a file: it brings all it needs, trusts no text, and is sent with a policy that holds it to that."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from slipstream.server.apis import web_api
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.server_state import ServerSettings, ServerState
from slipstream.server.serving.router import ModelRouter


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(web_api.routes(ServerState(ServerSettings(), ModelRouter([]), Metrics())))
    return TestClient(app, base_url="http://localhost")


def test_the_page_is_served_with_its_policy(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert answer.text == web_api.read_page()
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("connect-src", "img-src")} == {"'self'"}
    assert not re.search(r"https?:|\*|unsafe", " ".join(policy.values()))
    for tag in ("script", "style"):
        bodies = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", answer.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        assert bodies and policy[f"{tag}-src"].split() == [f"'sha256-{digest}'" for digest in digests]


def test_the_page_asks_no_other_host_and_never_reads_text_as_markup() -> None:
    page = web_api.read_page()
    assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", page)
    # the policy would silently drop them
    assert not re.search(r"<[^>]+\s(?:style|on[a-z]+)=", re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))


def test_the_icon_is_a_picture(client: TestClient) -> None:
    answer = client.get("/favicon.ico")
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/svg+xml"
    assert answer.text.startswith("<svg")
