"""An HTTP client for the server checks, with requests and streams; it uses only the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slipstream.errors import RequestError, SlipstreamError

JsonObject = Mapping[str, Any]
SHOWN_CHARACTERS = 160  # longer error texts of a server are cut, so that a report stays readable
_NOT_OFFERED = (404, 405, 501)  # statuses that mean that a server does not have an endpoint


class Unreachable(SlipstreamError):
    """No server answers at this address, or it does not answer in time."""


class Broken(SlipstreamError):
    """The connection ended or stalled, or its answers are not what the API promises."""


class Refused(SlipstreamError):
    """The server answered with an error."""

    def __init__(self, status: int, message: str, about_model: bool = False) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.not_offered = status in _NOT_OFFERED and not about_model


@dataclass(slots=True)
class Run:
    """The result of one generation, streamed or whole; `output` holds reasoning and content."""

    name: str
    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: JsonObject = field(default_factory=dict)
    timings: JsonObject = field(default_factory=dict)
    chunks: int = 0
    ended: bool = False  # whether a stream ended with [DONE]

    @property
    def output(self) -> str:
        return self.reasoning + self.content

    @property
    def drafted(self) -> int | None:
        return _count(self.timings.get("draft_n"))

    @property
    def accepted(self) -> int | None:
        return _count(self.timings.get("draft_n_accepted"))

    @property
    def cached(self) -> int | None:
        return _count(self.timings.get("cached_n"))

    def tokens(self, kind: str) -> int | None:
        return _count(self.usage.get(f"{kind}_tokens"))

    def add(self, body: object) -> None:
        """Takes in a whole answer, or one chunk of a streamed one."""
        if not isinstance(body, Mapping):
            raise Broken("the answer is not a JSON object")
        if isinstance(body.get("error"), Mapping):
            raise Broken(f"the answer ended with an error: {_error_text(body, '')}")
        for key in ("usage", "timings"):
            if isinstance(body.get(key), Mapping):
                setattr(self, key, body[key])
        choices = body.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
            raise Broken("the answer has no list of 'choices'")
        for choice in choices:
            self._add_choice(choice)

    def _add_choice(self, choice: JsonObject) -> None:
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        if not isinstance(said, Mapping):
            raise Broken("the message is not a JSON object")
        content, reasoning = said.get("content") or "", said.get("reasoning_content") or ""
        if not isinstance(content, str) or not isinstance(reasoning, str):
            raise Broken("the content of the message is not text")
        self.content += content
        self.reasoning += reasoning
        self.chunks += bool(content or reasoning)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


class Client:
    """A client of one server; every call opens its own connection and takes no longer than the timeout."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise RequestError(f"'{url}' is not the address of a server", "give one such as http://localhost:8080")
        self.url = url
        self.timeout_s = timeout_s
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ask(self, path: str, body: JsonObject | None = None) -> Any:
        """The JSON of a page, or with a body the JSON answer to it."""
        with closing(self._lines(path, body)) as lines:
            return _parse(b"".join(lines))

    def events(self, path: str, body: JsonObject) -> Generator[JsonObject | None, None, None]:
        """The JSON objects of an event stream, then None for its [DONE]; closing the iterator closes the connection."""
        with closing(self._lines(path, {**body, "stream": True})) as lines:
            for line in lines:
                if not line.startswith(b"data:"):
                    continue  # comments only keep the connection alive, and event names repeat what the data says
                data = line[5:].strip()
                event = {} if data == b"[DONE]" else _parse(data)
                if not isinstance(event, Mapping):
                    raise Broken(f"not a JSON object: {data[:40]!r}")
                yield None if data == b"[DONE]" else event

    def _lines(self, path: str, body: JsonObject | None) -> Generator[bytes, None, None]:
        """The lines of a successful answer as they arrive."""
        until = time.monotonic() + self.timeout_s
        headers = {**self._headers, "Accept": "*/*", **({"Content-Type": "application/json"} if body else {})}
        method, data = ("POST", json.dumps(body)) if body else ("GET", None)
        lost: type[SlipstreamError] = Unreachable
        with closing(self._connect()) as connection:
            try:
                connection.request(method, self._base + path, data, headers)
                with connection.getresponse() as response:
                    if response.status >= 400:
                        raise _refusal(response.status, response.read(1_000_000))
                    lost = Broken
                    while line := response.readline():
                        yield line
                        if time.monotonic() > until:
                            raise Broken(f"{path} was not complete after {self.timeout_s:g} s")
            except TimeoutError:
                raise lost(f"{path} sent nothing for {self.timeout_s:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                raise lost(f"{path}: the connection broke ({_reason(error)})") from None

    def _connect(self) -> http.client.HTTPConnection:
        connection = self._kind(self._host, self._port, timeout=self.timeout_s)
        try:
            connection.connect()
        except OSError as error:
            raise Unreachable(f"no server answers at {self.url}: {_reason(error)}") from None
        return connection


def models(client: Client) -> list[JsonObject]:
    listed = client.ask("/v1/models")
    data = listed.get("data") if isinstance(listed, Mapping) else None
    if not isinstance(data, list) or not all(isinstance(m, Mapping) and isinstance(m.get("id"), str) for m in data):
        raise Broken("/v1/models does not list models as OpenAI does")
    return data


def running(client: Client) -> set[str] | None:
    """The requests that hold a slot, as /slots names them; None if the server does not offer /slots."""
    try:
        body = client.ask("/slots")
    except (Refused, Broken):
        return None
    held = [slot for slot in _slots(body) if slot.get("is_processing", True)]
    return {str(slot.get("request_id", slot.get("id_task", slot.get("id", "")))) for slot in held}


def _slots(body: Any) -> list[JsonObject]:
    """Finds the slots in a list, in a list under `slots`, or in one such list per model."""
    if isinstance(body, Mapping):
        inner = body.get("slots", body.get("data", body.get("models", [])))
        body = list(inner.values()) if isinstance(inner, Mapping) else inner
    found: list[JsonObject] = []
    for item in body if isinstance(body, list) else []:
        if isinstance(item, list) or (isinstance(item, Mapping) and isinstance(item.get("slots"), list)):
            found += _slots(item)
        elif isinstance(item, Mapping):
            found.append(item)
    return found


def _refusal(status: int, body: bytes) -> Refused:
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = {}
    error = parsed.get("error") if isinstance(parsed, Mapping) else None
    details = error if isinstance(error, Mapping) else {}
    about_model = details.get("param") == "model" or details.get("code") == "model_not_found"
    return Refused(status, _error_text(parsed, body.decode("utf-8", "replace")), about_model)


def _error_text(body: object, otherwise: str) -> str:
    error = body.get("error") if isinstance(body, Mapping) else None
    text = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(text or otherwise or "no reason given").split())[:SHOWN_CHARACTERS]


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise Broken(f"not JSON: {data[:40]!r}") from None


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
