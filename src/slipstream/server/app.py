"""The ASGI application: all APIs behind one gatekeeper, and a documentation page that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse

from slipstream.server.apis import (
    anthropic_api,
    draft_lora_api,
    openai_api,
    responses_api,
    status_api,
    text_api,
    web_api,
)
from slipstream.server.operations import errors_http
from slipstream.server.operations.limits import Gatekeeper
from slipstream.server.operations.logs import RequestLogMiddleware
from slipstream.server.operations.server_state import ServerState
from slipstream.version import __version__

Hook = Callable[[], Awaitable[None]]
# Every API as a function that makes its routes; `create_app` includes them in this order.
APIS: tuple[Callable[[ServerState], APIRouter], ...] = (
    openai_api.routes,
    responses_api.routes,
    anthropic_api.routes,
    text_api.routes,
    status_api.routes,
    draft_lora_api.routes,
    web_api.routes,
)
_ABOUT = (
    "Chat, completions, responses and messages as OpenAI's and Anthropic's clients know them. Every answer carries "
    "`timings`: what speculation did for it. A field that is not listed here is refused, never ignored."
)
_DOCS_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Slipstream API</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
:root{color-scheme:light dark} body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
summary{cursor:pointer;padding:.35rem 0} code,pre{font:13px/1.45 ui-monospace,monospace}
pre{overflow:auto;padding:.75rem;border:1px solid #8884;border-radius:6px} b{display:inline-block;min-width:3.5rem}
</style>
<h1>Slipstream API</h1><p id="about"></p><p>The machine-readable form is <a href="openapi.json">openapi.json</a>.</p>
<div id="paths"></div><h2>Schemas</h2><div id="schemas"></div>
<script>
const part = (where, title, value, method) => {
  const box = document.createElement('details'), head = document.createElement('summary');
  if (method) { const verb = document.createElement('b'); verb.textContent = method.toUpperCase(); head.append(verb); }
  const name = document.createElement('code'); name.textContent = title; head.append(name);
  const body = document.createElement('pre'); body.textContent = JSON.stringify(value, null, 2);
  box.append(head, body); document.getElementById(where).append(box);
};
fetch('openapi.json').then(answer => answer.json()).then(api => {
  document.getElementById('about').textContent = api.info.description || '';
  for (const [path, verbs] of Object.entries(api.paths))
    for (const [verb, about] of Object.entries(verbs)) part('paths', path, about, verb);
  for (const [name, about] of Object.entries((api.components || {}).schemas || {})) part('schemas', name, about);
});
</script></html>
"""


def create_app(state: ServerState, on_start: Hook | None = None, on_stop: Hook | None = None) -> FastAPI:
    """The whole server as one ASGI application; the hooks run in its event loop."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if on_start is not None:
            await on_start()
        try:
            yield
        finally:
            if on_stop is not None:
                await on_stop()

    app = FastAPI(
        title="Slipstream",
        version=__version__,
        description=_ABOUT,
        lifespan=lifespan,
        # FastAPI's own documentation pages load their scripts from another host, so they are off
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.server = state
    errors_http.install(app, state.metrics.refused)
    for routes in APIS:
        app.include_router(routes(state))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_DOCS_PAGE)

    _document_refusals(app)
    # The middleware added last is the outermost. CORS must stand before the gatekeeper, because a browser's preflight
    # carries no key.
    app.add_middleware(Gatekeeper, state=state)
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["authorization", "content-type", "x-api-key"],
            expose_headers=["retry-after", "x-request-id"],
        )
    app.add_middleware(RequestLogMiddleware)
    return app


def _document_refusals(app: FastAPI) -> None:
    """Replaces 422 by 400 in the API document, because this server answers 400 where FastAPI would answer 422."""
    write = app.openapi

    def documented() -> dict[str, Any]:
        document = write()
        for path in document["paths"].values():
            for operation in path.values():
                if operation["responses"].pop("422", None) is not None:
                    operation["responses"]["400"] = {"description": "Refused; `error.param` names the field"}
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        return document

    app.openapi = documented  # type: ignore[method-assign]
