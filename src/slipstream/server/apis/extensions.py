"""Slipstream's own fields, which the Messages and Responses APIs accept besides their documented ones."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from slipstream.server.apis.openai_schemas import MAX_TOKENS, CommonFields
from slipstream.server.operations.errors_http import refuse
from slipstream.server.operations.server_state import ServerSettings
from slipstream.types import MAX_SEED


class Extensions(CommonFields):
    """The common fields, and further settings that OpenAI's completions have and other APIs lack."""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="Extension")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="Extension")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="Extension")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Extension: such as enable_thinking")
    top_k: int | None = Field(default=None, ge=0, le=MAX_TOKENS, description="0 is off")


def allowed_priority(asked: int | None, settings: ServerSettings) -> int:
    """The priority of a request; a priority above 0 is refused unless the server allows it."""
    if asked is not None and asked > 0 and not settings.allow_priority:
        raise refuse("priority", "may not be above 0 here", "leave it out, or start the server with --allow-priority")
    return asked or 0
