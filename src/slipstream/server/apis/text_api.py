"""POST /tokenize and /detokenize: the tokens of a text, and the text of tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from pydantic import Field

from slipstream.server.apis.common_schemas import OptionalModel, Several, Strict
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.preparing import Preparation
from slipstream.server.serving.prompts import check_pieces
from slipstream.text.cutting import PIECE_CHARS
from slipstream.text.tokenizer import Tokenizer


class TokenizeRequest(Strict):
    """`content` becomes tokens; `with_pieces` adds the text of each token."""

    model: OptionalModel = None
    content: str
    add_special: bool = Field(default=False, description="Begin as the model's prompts begin (BOS)")
    parse_special: bool = Field(default=True, description="Read `<|...|>` as special tokens")
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    model: OptionalModel = None
    tokens: Several[int]


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Text"], route_class=ParsedRoute)

    @router.post("/tokenize", response_model=None, summary="Tokens of a text")
    async def tokenize(body: TokenizeRequest) -> Response:
        name = model_asked(state, body.model)
        async with await state.router.lease(name) as lease:
            preparation, chars = lease.preparation, len(body.content)
            answer = _answer(lease.name, lease.llm.max_context, lease.llm.tokenizer, body)
            # The first part is made before the response begins, so that a refusal still gets an error status.
            first = await preparation.run(chars, next, answer)
            if chars <= PIECE_CHARS:
                return Response(first + await preparation.go_on(chars, b"".join, answer), media_type="application/json")
        return StreamingResponse(_parts(first, answer, preparation, chars), media_type="application/json")

    @router.post("/detokenize", response_model=None, summary="The text of tokens")
    async def detokenize(body: DetokenizeRequest) -> Response:
        name = model_asked(state, body.model)
        async with await state.router.lease(name) as lease:
            work = (_decoded, lease.name, lease.llm.tokenizer, body.tokens, state.settings.max_body_bytes)
            return Response(await lease.preparation.run(len(body.tokens), *work), media_type="application/json")

    return router


def _answer(model: str, context: int, tokenizer: Tokenizer, body: TokenizeRequest) -> Iterator[bytes]:
    """The JSON of an answer in parts, because the whole would take many times the memory of the text."""
    check_pieces(tokenizer, body.content)
    add_bos = None if body.add_special else False
    count = 0
    yield f'{{"model":{json.dumps(model)},"tokens":['.encode()
    for ids in tokenizer.encode_pieces(body.content, add_bos=add_bos, parse_special=body.parse_special):
        if ids:
            told = [{"id": index, "piece": tokenizer.token_text(index)} for index in ids] if body.with_pieces else ids
            yield b"," * (count > 0) + json.dumps(told, ensure_ascii=False, separators=(",", ":"))[1:-1].encode()
            count += len(ids)
    yield f'],"count":{count},"max_context":{context}}}'.encode()


async def _parts(
    first: bytes, rest: Iterator[bytes], preparation: Preparation, chars: int
) -> AsyncGenerator[bytes, None]:
    part: bytes | None = first
    while part is not None:
        yield part
        part = await preparation.go_on(chars, next, rest, None)


def _decoded(model: str, tokenizer: Tokenizer, tokens: list[int], most_bytes: int) -> bytes:
    size = tokenizer.vocab_size
    wrong = next((index for index in tokens if not 0 <= index < size), None)
    if wrong is not None:
        raise ApiError(400, f"token {wrong} is not in the vocabulary of {size}", param="tokens", code="invalid_value")
    total = sum(len(tokenizer.token_bytes(index)) for index in tokens)
    if total > most_bytes:
        raise ApiError(
            400,
            f"the text of these tokens has {total} bytes, and {most_bytes} are the most",
            "send them in parts",
            param="tokens",
            code="invalid_value",
        )
    answer = {"model": model, "content": tokenizer.decode(tokens)}
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def model_asked(state: ServerState, asked: str | None) -> str:
    """The name of the model to ask; a request may leave it out if the server has only one model."""
    if asked is not None:
        return asked
    names = [model.name for model in state.router.describe()]
    if len(names) != 1:
        raise ApiError(
            400,
            "'model' is missing",
            f"this server has {', '.join(names)}",
            param="model",
            code="missing_required_parameter",
        )
    return names[0]
