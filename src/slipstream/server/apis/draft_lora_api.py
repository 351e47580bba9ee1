"""The variants of a model's drafter over HTTP: clients list them, and add or remove one while the model serves.

Clients can only load adapters from the folder that `--draft-lora-folder` names; without it, the variants are fixed.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from slipstream.errors import ConfigError, FormatError, PairError, RequestError, SourceError
from slipstream.formats.adapters import PEFT_CONFIG
from slipstream.server.apis.common_schemas import OptionalModel, Strict
from slipstream.server.apis.text_api import model_asked
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.residency import in_thread
from slipstream.types import BASE_VARIANT

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

log = logging.getLogger("slipstream.server.models")

# Variants that may be added to one drafter. Each keeps its own adapted matrices in memory, so that more could
# exhaust it.
MAX_VARIANTS = 16
_BAD_ADAPTER = (SourceError, FormatError, ConfigError, PairError)
_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_InQuery = Annotated[OptionalModel, Query()]


class AddRequest(Strict):
    """POST /v1/draft-lora"""

    path: str = Field(min_length=1, max_length=1024, description="A PEFT folder or a GGUF file in the server's folder")
    name: str | None = Field(default=None, pattern=_NAME_PATTERN, description="Left out: the file's or folder's own")
    scale: float = Field(default=1.0, description="How much the adapter counts")
    model: OptionalModel = None


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Draft variants"], route_class=ParsedRoute)
    one_at_a_time = asyncio.Lock()  # merging an adapter takes memory that no limit counts

    @router.get("/v1/draft-lora", response_model=None, summary="The variants of every model's drafter")
    async def variants(model: _InQuery = None) -> JSONResponse:
        if model is not None:
            model = state.router.find(model).spec.name
        listed = [info for info in state.router.describe() if model in (None, info.name)]
        told = [
            {"name": name, "model": info.name, "source": info.adapters.get(name)}
            for info in listed
            for name in info.draft_variants
        ]
        return JSONResponse({"object": "list", "data": told})

    @router.post("/v1/draft-lora", response_model=None, summary="Add a variant while the model serves")
    async def add(body: AddRequest) -> JSONResponse:
        source = adapter_source(_folder(state), body)
        async with one_at_a_time:
            return JSONResponse(await _add(state, model_asked(state, body.model), source, body.name))

    @router.delete("/v1/draft-lora/{name}", response_model=None, summary="Remove a variant that no request uses")
    async def remove(name: str, model: _InQuery = None) -> JSONResponse:
        _folder(state)
        return JSONResponse(await _remove(state, model_asked(state, model), name))

    return router


def _folder(state: ServerState) -> Path:
    folder = state.settings.draft_lora_folder
    if folder is None:
        raise ApiError(
            403,
            "the draft variants of this server are fixed",
            "start it with --draft-lora-folder FOLDER",
            kind="permission_error",
            code="draft_lora_fixed",
        )
    return folder.resolve()


def adapter_source(folder: Path, body: AddRequest) -> str:
    """Returns the source that the engine loads an adapter from, [NAME=]PATH@SCALE; refuses paths outside the folder.

    Links and dots are resolved before the check.
    """
    try:
        path = (folder / body.path).resolve()
        lie_inside = path != folder and all(file.resolve().is_relative_to(folder) for file in (path, *_files_of(path)))
    except (OSError, RuntimeError, ValueError):  # the path is too long or has a NUL, or links form a circle
        lie_inside = False
    if not lie_inside:
        raise ApiError(
            400,
            "'path' or a file of it is not in the folder of this server's adapters",
            "give it relative to that folder",
            param="path",
            code="invalid_value",
        )
    # The scale is always written, so that an @ in the path is never read as the beginning of a scale.
    return f"{f'{body.name}=' if body.name else ''}{path}@{body.scale!r}"


def _files_of(path: Path) -> list[Path]:
    """The files that an adapter at this path may be read from: its whole folder, or the config beside its weights."""
    if path.is_dir():
        return list(path.iterdir())
    return [path.parent / PEFT_CONFIG] if path.suffix == ".safetensors" else []


async def _add(state: ServerState, model: str, source: str, name: str | None) -> dict[str, object]:
    async with await state.router.lease(model) as lease:
        llm = lease.llm
        _check_room(llm, name)
        try:
            variant = await in_thread(llm.load_draft_lora, source)
            await in_thread(lease.worker.ask, partial(llm.install_draft_lora, variant))
        except RequestError as error:
            raise _conflict(error) from None
        except _BAD_ADAPTER as error:
            raise ApiError(400, error.message, error.hint, param="path", code="invalid_adapter") from None
        lease.adapters[variant.name] = source
        log.info("draft variant added", extra={"fields": {"model": lease.name, "draft_lora": variant.name}})
        return {"name": variant.name, "model": lease.name, "draft_variants": llm.draft_variants}


def _check_room(llm: LLM, name: str | None) -> None:
    """Refuses a model without a drafter, a taken name and a variant beyond `MAX_VARIANTS` before the slow merge."""
    known = llm.draft_variants
    if not known:
        raise ApiError(400, "this model has no drafter to adapt", "add it to another", param="model")
    if name in known:
        raise _conflict(RequestError(f"there is a draft variant '{name}' already", "choose another name"))
    if len(known) > MAX_VARIANTS:
        raise _conflict(RequestError(f"there are {MAX_VARIANTS} draft variants already", "remove one of them first"))


async def _remove(state: ServerState, model: str, name: str) -> dict[str, object]:
    entry = state.router.find(model)
    if entry.resident is None and entry.loading is None:
        # The model is not loaded for this, because this adapter may be what keeps it from being loaded.
        _check_removable(name, [BASE_VARIANT, *entry.adapters], entry.spec)
        del entry.adapters[name]
        entry.retry_at = 0.0
        left = [BASE_VARIANT, *entry.adapters]
    else:
        async with await state.router.lease(entry.spec.name) as lease:
            _check_removable(name, lease.llm.draft_variants, lease.spec)
            try:
                await in_thread(lease.worker.ask, partial(lease.llm.remove_draft_lora, name))
            except RequestError as error:
                raise _conflict(error) from None
            lease.adapters.pop(name, None)
            left = lease.llm.draft_variants
    state.metrics.forget_variant(entry.spec.name, name)
    log.info("draft variant removed", extra={"fields": {"model": entry.spec.name, "draft_lora": name}})
    return {"name": name, "model": entry.spec.name, "draft_variants": left}


def _check_removable(name: str, known: list[str], spec: ModelSpec) -> None:
    if name == BASE_VARIANT:
        raise ApiError(400, "'base' is the drafter itself and cannot be removed", "unload the model instead")
    if name not in known:
        raise ApiError(
            404,
            f"unknown draft variant '{name[:64]}'",
            f"known: {', '.join(known)}",
            kind="not_found_error",
            code="draft_lora_not_found",
        )
    if name == spec.defaults.get("draft_lora"):
        raise _conflict(RequestError(f"requests of '{spec.name}' start from '{name}'", "change its models file first"))


def _conflict(error: RequestError) -> ApiError:
    return ApiError(409, error.message, error.hint, param="name", kind="conflict_error", code="draft_lora_conflict")
