"""Bodies as JSON: they are bounded before they are parsed, parsed once, and passed on as values.

While the JSON parser works, no other Python thread can run, and a value takes many times the memory of its text: `{},`
has three bytes and takes 72. Therefore values are counted in the bytes of a body before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope

from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.server_state import MAX_JSON_DEPTH

# Values in one body. A number or a short string takes up to 72 bytes with its place in a list, and 8 more in the list
# that validation makes, so that all values together stay below 64 MiB.
MAX_JSON_VALUES = 1 << 19
# Objects, lists and keys in one body. Each takes up to 250 bytes, and about 900 as a validated part of a message.
MAX_JSON_STRUCTURE = 1 << 16
# Larger bodies are parsed in a thread. Parsing this many bytes takes about a millisecond, which is what a thread costs.
_LARGE_BYTES = 64 << 10
_STRING = re.compile(rb'"[^"]*+"')
# Finds half of an escaped surrogate pair. The pattern begins with its literal part, because the regular expression
# engine can search for that quickly.
_HALF_PAIR = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])", re.DOTALL)
_PARSED = "slipstream.body"  # the key of the parsed body in a request's scope
_STAND_IN = b" "  # the body that the framework sees in place of a parsed one, whose bytes are dropped


def check_json(body: bytes) -> Any:
    """The value of a body; refuses text that is not JSON, too many values, and what only Python accepts as JSON."""
    _check_amount(body)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
        _check_depth(value)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_utf8") from None
    except RecursionError:
        raise ApiError(
            400, f"the body is nested deeper than {MAX_JSON_DEPTH} levels", "flatten it", code="nested_too_deep"
        ) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if b"\\u" in body and _HALF_PAIR.search(body.replace(rb"\\", b"..")):
        raise ApiError(
            400,
            "the body has half of a surrogate pair in a string",
            "escape characters beyond U+FFFF as pairs",
            code="invalid_unicode",
        )
    return value


def _check_amount(body: bytes) -> None:
    """Refuses a body with too many values.

    The commas, brackets and colons of the whole body are counted first. If these are too many, those outside of strings
    are counted, which is slower.
    """
    if _too_many(*_marks(body)) is None:
        return
    values = structure = 0
    for piece in outside_of_strings(body):
        more_values, more_structure = _marks(piece)
        values, structure = values + more_values, structure + more_structure
        too_many = _too_many(values, structure)
        if too_many is not None:
            raise ApiError(400, f"the body has more than {too_many}", "send less at once", code="too_many_values")


def _marks(text: bytes) -> tuple[int, int]:
    """Counts commas (one before each value except the first of its list) and marks of objects, lists and keys."""
    return text.count(b","), text.count(b"{") + text.count(b"[") + text.count(b":")


def _too_many(values: int, structure: int) -> str | None:
    if structure > MAX_JSON_STRUCTURE:
        return f"{MAX_JSON_STRUCTURE} objects, lists and keys"
    return f"{MAX_JSON_VALUES} values" if values > MAX_JSON_VALUES else None


def outside_of_strings(body: bytes) -> Iterator[bytes]:
    """The parts of a body outside of its strings, piece by piece; a string may go on in the next piece."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote that is left begins or ends a string
    begun = b""
    for start in range(0, len(plain), _LARGE_BYTES):
        outside, begun, _ = _STRING.sub(b"", begun + plain[start : start + _LARGE_BYTES]).partition(b'"')
        yield outside


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _check_depth(value: object) -> None:
    """Raises RecursionError for a value that the parser can read, but that is too deep for code that walks it."""
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RecursionError


class ParsedRequest(Request):
    """A request whose body the gatekeeper has already parsed."""

    async def json(self) -> Any:
        return self.scope[_PARSED]


class ParsedRoute(APIRoute):
    """The route class of every API: it uses the value that the gatekeeper parsed, so that a body is parsed once."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(ParsedRequest(request.scope, request.receive))

        return handle_parsed


async def hand_on(scope: Scope, receive: Receive, body: bytes, turn: asyncio.Lock) -> Receive:
    """Parses a body into the scope of its request, where `ParsedRequest` finds it.

    While a body is parsed or validated, no stream goes on, and streams must not wait for several bodies in a row.
    Large bodies are therefore parsed in a thread, one at a time. The task that releases `turn` goes on to validation
    without waiting, so that the next large body is parsed only after that.

    The returned `receive` first gives a stand-in for the body, then the connection's messages, such as a disconnect.
    """
    if len(body) > _LARGE_BYTES:
        async with turn:
            scope[_PARSED] = await asyncio.to_thread(check_json, body)
    elif body:
        scope[_PARSED] = check_json(body)
    message: Message | None = {"type": "http.request", "body": _STAND_IN if body else b"", "more_body": False}

    async def handed_on() -> Message:
        nonlocal message
        if message is None:
            return await receive()
        given, message = message, None
        return given

    return handed_on
