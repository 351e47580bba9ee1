"""The chat page at `/`: one file, sent with a policy that lets the browser talk to this server only."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from slipstream.server.operations.server_state import ServerState

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#0f766e"/>'
    '<g fill="none" stroke="#fff" stroke-width="2.6" stroke-linecap="round">'
    '<path d="M7 11h11"/><path d="M7 16h18"/><path d="M7 21h7"/></g></svg>'
)


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    page = read_page()
    headers = {
        "Content-Security-Policy": content_policy(page),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @router.api_route("/favicon.ico", methods=["GET", "HEAD"])
    async def favicon() -> Response:
        return Response(ICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})

    return router


def read_page() -> str:
    return files("slipstream.server.apis").joinpath("web", "index.html").read_text(encoding="utf-8")


def content_policy(page: str) -> str:
    """A policy under which only the page's own script and style run, and the page can only contact its own server.

    The policy names script and style by their hashes, so that a script injected into the page does not run.
    """
    script, style = (_hashes(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: str, tag: str) -> str:
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (hashlib.sha256(body.encode()).digest() for body in bodies)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"
