"""POST /tokenize and /detokenize: a model's tokens of a text, and back."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field

from slipstream.server.bodies import ParsedRoute
from slipstream.server.errors_http import ApiError
from slipstream.server.openai_schemas import MAX_TOKENS, Several, Strict
from slipstream.server.state import ServerState
from slipstream.text.tokenizer import Tokenizer


class TokenizeRequest(Strict):
    """`content` becomes tokens; `with_pieces` also tells the text of each."""

    model: str | None = Field(default=None, min_length=1, max_length=256, description="Needed where several are served")
    content: str
    add_special: bool = Field(default=False, description="Begin as the model's prompts begin (BOS)")
    parse_special: bool = Field(default=True, description="Read `<|...|>` as special tokens")
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    model: str | None = Field(default=None, min_length=1, max_length=256, description="Needed where several are served")
    tokens: Several[int]


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Text"], route_class=ParsedRoute)

    @router.post("/tokenize", response_model=None, summary="Tokens of a text")
    async def tokenize(body: TokenizeRequest) -> JSONResponse:
        name = model_asked(state, body.model)
        async with await state.router.lease(name) as lease:
            tokenizer = lease.llm.tokenizer
            ids = await asyncio.to_thread(_encode, tokenizer, body)
            pieces = [{"id": index, "piece": tokenizer.token_text(index)} for index in ids]
            return JSONResponse({
                "model": lease.name, "tokens": pieces if body.with_pieces else ids, "count": len(ids),
                "max_context": lease.llm.max_context,
            })

    @router.post("/detokenize", response_model=None, summary="The text of tokens")
    async def detokenize(body: DetokenizeRequest) -> JSONResponse:
        name = model_asked(state, body.model)
        async with await state.router.lease(name) as lease:
            size = lease.llm.tokenizer.vocab_size
            wrong = next((index for index in body.tokens if not 0 <= index < min(size, MAX_TOKENS)), None)
            if wrong is not None:
                raise ApiError(
                    400, f"token {wrong} is not in the vocabulary of {size}", param="tokens", code="invalid_value"
                )
            text = await asyncio.to_thread(lease.llm.tokenizer.decode, body.tokens)
            return JSONResponse({"model": lease.name, "content": text})

    return router


def _encode(tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    add_bos = None if body.add_special else False
    return tokenizer.encode(body.content, add_bos=add_bos, parse_special=body.parse_special)


def model_asked(state: ServerState, asked: str | None) -> str:
    """The model to ask; it need not be named where there is only one."""
    if asked is not None:
        return asked
    names = [model.name for model in state.router.describe()]
    if len(names) != 1:
        raise ApiError(400, "'model' is missing", f"this server has {', '.join(names)}", param="model",
                       code="missing_required_parameter")
    return names[0]
