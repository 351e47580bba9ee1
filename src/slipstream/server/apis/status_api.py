"""The state of a server: /health, /props, /slots, /metrics, the list of models, loading or unloading a model, and
reading the models file again.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from slipstream.errors import ConfigError
from slipstream.server.operations.bodies import ParsedRoute
from slipstream.server.operations.canary import CanaryReport
from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.metrics import CONTENT_TYPE
from slipstream.server.operations.server_state import RETRY_AFTER_S, ServerState
from slipstream.server.serving.model_entries import ModelInfo, unknown_model
from slipstream.server.serving.residency import Resident
from slipstream.version import __version__


def routes(state: ServerState) -> APIRouter:
    """The routes about the server itself; the gauges of the metrics show this server's router from now on."""
    state.metrics.watch(state.router)
    router = APIRouter(tags=["Status"], route_class=ParsedRoute)

    @router.get("/health", response_model=None, summary="Whether the server takes requests")
    async def health() -> JSONResponse:
        phase = phase_of(state)
        body: dict[str, object] = {
            "status": "ok" if phase == "ready" else phase,
            "phase": phase,
            "version": __version__,
            "canary": _worst(list(state.metrics.canaries.reports().values())),
        }
        # This path needs no key, so it does not name models or failures; /v1/models, which needs the key, does.
        headers = {} if phase == "ready" else {"Retry-After": str(RETRY_AFTER_S)}
        return JSONResponse(body, 200 if phase == "ready" else 503, headers)

    @router.get("/metrics", response_model=None, summary="Numbers for Prometheus")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/slots", response_model=None, summary="Open requests and how far they are")
    async def slots() -> JSONResponse:
        models = [(model, model.worker.snapshot()) for model in state.router.residents()]
        listed = [{"model": model.name, "alive": model.worker.alive, **asdict(seen)} for model, seen in models]
        return JSONResponse({"models": listed})

    @router.get("/props", response_model=None, summary="What is loaded, how it is set, and what its steps cost")
    async def props(model: str | None = Query(default=None, max_length=256)) -> JSONResponse:
        resident = _resident(state, model)
        body: dict[str, object] = {
            "version": __version__,
            "phase": phase_of(state),
            "settings": _settings(state),
            "models": [info.name for info in state.router.describe()],
            "model": None if resident is None else resident.name,
        }
        if resident is not None:
            # The question runs on the engine's thread, because every step changes the costs.
            body |= await asyncio.to_thread(resident.worker.ask, partial(_describe, resident))
            report = state.metrics.canaries.reports().get(resident.name)
            body["canary"] = None if report is None else report.to_json()
        return JSONResponse(body)

    _add_models(router, state)
    return router


def _add_models(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/models", response_model=None, summary="The models that may be asked for")
    async def models() -> JSONResponse:
        listed = _model_objects(state)
        names = [str(model["id"]) for model in listed]
        # The last three fields are for Anthropic's clients, which use them to read a long list in parts.
        return JSONResponse(
            {
                "object": "list",
                "data": listed,
                "has_more": False,
                "first_id": names[0] if names else None,
                "last_id": names[-1] if names else None,
            }
        )

    @router.get("/v1/models/{name:path}", response_model=None, summary="One model")
    async def model(name: str) -> JSONResponse:
        return JSONResponse(_one(state, name))

    @router.post("/models/reload", response_model=None, summary="Read the models file again")
    async def reload() -> JSONResponse:
        try:
            report = await state.router.reload()
        except ConfigError as error:
            # This is a 400, because the operator can correct the file; the models stay as they were.
            raise ApiError(400, error.message, error.hint, code="models_file") from None
        return JSONResponse({**report, "data": _model_objects(state)})

    @router.post("/models/{name:path}/load", response_model=None, summary="Load a model now")
    async def load(name: str) -> JSONResponse:
        async with await state.router.lease(name) as lease:
            return JSONResponse(_one(state, lease.name))

    @router.post("/models/{name:path}/unload", response_model=None, summary="Unload a model once its requests are over")
    async def unload(name: str) -> JSONResponse:
        state.router.unload(name)
        return JSONResponse(_one(state, name))


def phase_of(state: ServerState) -> str:
    """The server's phase; it is `failed` if the server runs but none of its models can be loaded."""
    models = state.router.describe()
    if state.phase == "ready" and models and all(model.state == "failed" for model in models):
        return "failed"
    return state.phase


def _worst(reports: list[CanaryReport]) -> str:
    """The most serious state of all canaries, or `learning` without reports."""
    found = {report.state for report in reports} or {"learning"}
    return next((state for state in ("warning", "ok", "learning") if state in found), "no promise")


def _model_objects(state: ServerState) -> list[dict[str, object]]:
    residents = {resident.name: resident for resident in reversed(state.router.residents())}
    return [_model_object(info, residents.get(info.name), state) for info in state.router.describe()]


def _model_object(info: ModelInfo, resident: Resident | None, state: ServerState) -> dict[str, object]:
    """A model as OpenAI lists it, with the fields that Anthropic's clients need and then Slipstream's own."""
    canary = state.metrics.canaries.reports().get(info.name)
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "slipstream",
        "type": "model",
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(info.created, UTC).isoformat().replace("+00:00", "Z"),
        "state": info.state,
        "target": info.target,
        "draft": info.draft,
        "mode": info.mode,
        "draft_variants": list(info.draft_variants),
        "last_used_ms": info.last_used_ms,
        "running": info.users,
        "memory_bytes": info.memory_bytes,
        "context_length": None if resident is None else resident.llm.max_context,
        "progress": info.progress or None,
        "failure": info.reason or None,
        "warning": info.warning or None,
        "canary": None if canary is None else canary.state,
    }


def _one(state: ServerState, name: str) -> dict[str, object]:
    for listed in _model_objects(state):
        if listed["id"] == name:
            return listed
    raise unknown_model(name, [info.name for info in state.router.describe()])


def _resident(state: ServerState, name: str | None) -> Resident | None:
    """The named model, which must be in memory; without a name the model used last, or None if none is in memory."""
    known = {info.name: info for info in state.router.describe()}
    if name is not None and name not in known:
        raise unknown_model(name, list(known))
    found = [r for r in state.router.residents() if r.name in known and name in (None, r.name)]
    if name is not None and not found:
        raise ApiError(
            400, f"model '{name}' is not in memory", "load it with a request or POST /models/NAME/load", param="model"
        )
    return max(found, key=lambda resident: known[resident.name].last_used_ms, default=None)


def _describe(resident: Resident) -> dict[str, Any]:
    llm = resident.llm
    return {
        "engine": llm.describe(),
        "engine_settings": asdict(llm.config),
        "request_defaults": dict(resident.spec.defaults),
        "memory_bytes": resident.memory_bytes,
        "expected_tau": llm.expected_tau,
        "draft_variants": llm.draft_variants,
        "draft_source": llm.draft_source,
        # Costs are measured only where something drafts.
        "costs": llm.measure_costs() if llm.speculates else None,
        "chat_template": llm.tokenizer.chat_template,
    }


def _settings(state: ServerState) -> dict[str, object]:
    """The server's settings without its secrets."""
    settings = asdict(state.settings)
    settings["api_keys"] = len(state.settings.api_keys)
    settings["retry_after_s"] = float(RETRY_AFTER_S)
    folder = state.settings.draft_lora_folder
    settings["draft_lora_folder"] = None if folder is None else str(folder)
    settings["recording"] = None if state.recorder is None else str(state.recorder.path)
    return settings
