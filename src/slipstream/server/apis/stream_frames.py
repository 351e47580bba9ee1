"""The stream socket's protocol: lines become operations, answers become frames, and frames wait for their reader.

A request has the settings of the HTTP APIs, validated by the same schemas, so that both refuse the same bodies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import Field, TypeAdapter, ValidationError

from slipstream.server.apis import openai_shared as shared
from slipstream.server.apis.common_schemas import MAX_TOKENS, Strict
from slipstream.server.apis.openai_schemas import ChatRequest, CompletionRequest, GenerationRequest
from slipstream.server.operations.bodies import check_json
from slipstream.server.operations.errors_http import ApiError, openai_body, refuse
from slipstream.server.operations.server_state import ServerSettings
from slipstream.server.serving.jobs import Answer, AnswerDelta, Job
from slipstream.text.tokenizer import Tokenizer

MAX_ID = 128  # characters of a request's id, which stands in every frame
_READ_BYTES = 1 << 16
_OF_HTTP_ONLY = ("stream", "stream_options", "n", "echo", "include_draft_info")

Frame = Mapping[str, object]
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]
Quantum = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class Start(Strict):
    """Begins a request; all other fields of its frame are the body of a chat or completions request."""

    op: Literal["start"]
    id: RequestId
    quantum: Quantum = 0  # tokens after which the server pauses and waits for a `continue`; 0 means never


class Continue(Strict):
    op: Literal["continue"]
    id: RequestId
    epoch: int
    quantum: Quantum | None = None  # None keeps the quantum of the request


class Pause(Strict):
    op: Literal["pause"]
    id: RequestId


class Cancel(Strict):
    op: Literal["cancel"]
    id: RequestId
    epoch: int | None = None


class List(Strict):
    op: Literal["list"]
    id: RequestId


Operation = Start | Continue | Pause | Cancel | List
_OPERATION: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="op")])
Started = tuple[Job, GenerationRequest] | Exception  # what a start begins, or the error that refuses it


class Asked(NamedTuple):
    """One line of a client: its id if that could be read, its operation or the error in it, and what a start begins."""

    id: str | None
    operation: Operation | Exception
    started: Started | None = None


def read(line: bytes, server: ServerSettings) -> Asked:
    """Reads a line and its job; for a long line this takes so long that it should run in a thread."""
    try:
        frame = check_json(line)
    except ApiError as error:
        return Asked(None, error)
    if not isinstance(frame, dict):
        return Asked(None, ApiError(400, "a frame must be a JSON object", code="invalid_frame"))
    name, own, started = frame.get("id"), frame, None
    request_id = name if isinstance(name, str) and len(name) <= MAX_ID else None
    if frame.get("op") == "start":
        own = {key: value for key, value in frame.items() if key in Start.model_fields}
        started = {key: value for key, value in frame.items() if key not in Start.model_fields}
    try:
        operation = _OPERATION.validate_python(own)
    except ValidationError as error:
        if all(not found["type"].startswith("union_tag") for found in error.errors()):
            return Asked(request_id, RequestValidationError(error.errors(), body=own))
        said, hint = f"unknown op {json.dumps(frame.get('op'))[:40]}", "use start, continue, pause, cancel or list"
        return Asked(request_id, ApiError(400, said, hint, param="op", code="unknown_op"))
    return Asked(request_id, operation, None if started is None else _started(started, server))


def _started(body: dict[str, Any], server: ServerSettings) -> Started:
    """The job of a start frame: a conversation if the frame has messages, otherwise a prompt to continue."""
    kind = ChatRequest if "messages" in body else CompletionRequest
    try:
        for field in _OF_HTTP_ONLY:
            if body.get(field) is not None:
                raise refuse(field, "has no meaning on the stream socket")
        request = kind.model_validate(body)
        jobs = request.jobs(server)
        if len(jobs) != 1:
            raise refuse("prompt", "must be one prompt", "start a request for each")
        return jobs[0], request
    except ValidationError as error:
        return RequestValidationError(error.errors(), body=body)
    except Exception as error:
        return error


def token_frame(request_id: str, delta: AnswerDelta, tokenizer: Tokenizer, logprobs: bool) -> Frame:
    frame: dict[str, object] = {
        "id": request_id,
        "type": "token",
        "kind": delta.kind,
        "text": delta.text,
        "tokens": [token.id for token in delta.tokens],
        "drafted": [token.drafted for token in delta.tokens],
    }
    if delta.kind == "tool_call":
        frame["call"] = delta.call
        if delta.call_id:
            frame |= {"call_id": delta.call_id, "name": delta.name}
    if logprobs:
        frame["logprobs"] = shared.token_entries(delta.tokens, tokenizer)
    return frame


def done_frame(request_id: str, answer: Answer | None) -> Frame:
    """The last frame of a request; one that was cancelled before it began has no numbers."""
    if answer is None:
        return {"id": request_id, "type": "done", "finish_reason": "cancelled"}
    cancelled = answer.finish_reason == "cancelled"
    return {
        "id": request_id,
        "type": "done",
        "finish_reason": "cancelled" if cancelled else shared.finish_reason(answer),
        "model": answer.model,
        "usage": shared.usage([answer]),
        "timings": answer.timings(),
    }


def error_frame(request_id: str | None, error: ApiError, over: bool) -> Frame:
    """An error; with `over`, it has ended the request, otherwise only the operation was refused."""
    frame: dict[str, object] = {"id": request_id, "type": "error", "over": over, "status": error.status}
    if "Retry-After" in error.headers:
        frame["retry_after_s"] = int(error.headers["Retry-After"])
    return frame | openai_body(error)


async def lines(reader: asyncio.StreamReader, limit: int) -> AsyncIterator[bytes | None]:
    """The lines of a connection; None stands for a line that was dropped because it is longer than `limit`."""
    held, skipping = bytearray(), False
    while piece := await reader.read(_READ_BYTES):
        held += piece
        while (end := held.find(b"\n")) >= 0:
            line = bytes(held[:end])
            del held[: end + 1]
            if skipping or len(line) > limit:
                yield None
            elif line.strip():
                yield line
            skipping = False
        if len(held) > limit:
            skipping = True
            held.clear()


class Outbox:
    """The frames that wait until one client reads them.

    The outbox becomes full at `most` frames and stays full until only `most / 4` are left. While it is full, the
    client's requests are held. A large frame counts as several.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._frames: asyncio.Queue[tuple[Frame, int]] = asyncio.Queue()
        self._weight = 0
        self._room = asyncio.Event()
        self._room.set()

    def put(self, frame: Frame, weight: int = 1) -> None:
        self._frames.put_nowait((frame, weight))
        self._weight += weight
        if self._weight >= self._most:
            self._room.clear()

    @property
    def empty(self) -> bool:
        return self._frames.empty()

    @property
    def full(self) -> bool:
        return not self._room.is_set()

    async def room(self) -> None:
        await self._room.wait()

    async def take(self) -> bytes:
        """Waits for the next frame and returns it as a line."""
        frame, weight = await self._frames.get()
        self._weight -= weight
        if self._weight <= self._most // 4:
            self._room.set()
        return json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
