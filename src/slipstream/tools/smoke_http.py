"""An HTTP client for the server checks, with requests and streams; it uses only the standard library."""

from __future__ import annotations

import http.client
import json
import ssl
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
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        """The JSON body of a page."""
        return self._whole("GET", path, None)

    def post(self, path: str, body: JsonObject) -> Any:
        return self._whole("POST", path, body)

    def events(self, path: str, body: JsonObject) -> Generator[JsonObject | None, None, None]:
        """The JSON objects of an event stream, then None for its [DONE]; closing the iterator closes the connection."""
        lines = self._lines("POST", path, {**body, "stream": True})
        with closing(lines):
            for line in lines:
                if not line.startswith(b"data:"):
                    continue  # comments only keep the connection alive, and event names repeat what the data says
                data = line[5:].strip()
                yield None if data == b"[DONE]" else _object(data)

    def _whole(self, method: str, path: str, body: JsonObject | None) -> Any:
        with closing(self._lines(method, path, body)) as lines:
            return _parse(b"".join(lines))

    def _lines(self, method: str, path: str, body: JsonObject | None) -> Generator[bytes, None, None]:
        """The lines of a successful answer as they arrive."""
        until = time.monotonic() + self.timeout_s
        headers = {**self._headers, "Accept": "*/*", **({"Content-Type": "application/json"} if body else {})}
        answered = False
        with closing(self._connect()) as connection:
            try:
                connection.request(method, self._base + path, json.dumps(body) if body else None, headers)
                with connection.getresponse() as response:
                    if response.status >= 400:
                        raise _refusal(response.status, response.read(1_000_000))
                    answered = True
                    while line := response.readline():
                        yield line
                        if time.monotonic() > until:
                            raise Broken(f"{path} was not complete after {self.timeout_s:g} s")
            except TimeoutError:
                raise _lost(answered, f"{path} sent nothing for {self.timeout_s:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                raise _lost(answered, f"{path}: the connection broke ({_reason(error)})") from None

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self.timeout_s, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self.timeout_s)
        try:
            connection.connect()
        except OSError as error:
            raise Unreachable(f"no server answers at {self.url}: {_reason(error)}") from None
        return connection


def models(client: Client) -> list[JsonObject]:
    listed = client.get("/v1/models")
    data = listed.get("data") if isinstance(listed, Mapping) else None
    if not isinstance(data, list) or not all(isinstance(m, Mapping) and isinstance(m.get("id"), str) for m in data):
        raise Broken("/v1/models does not list models as OpenAI does")
    return data


def running(client: Client) -> set[str] | None:
    """The requests that hold a slot, as /slots names them; None if the server does not offer /slots."""
    try:
        body = client.get("/slots")
    except (Refused, Broken):
        return None
    return {_slot_name(slot) for slot in _slots(body) if slot.get("is_processing", True)}


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


def _slot_name(slot: JsonObject) -> str:
    return str(slot.get("request_id", slot.get("id_task", slot.get("id", ""))))


def _lost(answered: bool, what: str) -> SlipstreamError:
    return Broken(what) if answered else Unreachable(what)


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


def _object(data: bytes) -> JsonObject:
    value = _parse(data)
    if not isinstance(value, Mapping):
        raise Broken(f"not a JSON object: {data[:40]!r}")
    return value


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
