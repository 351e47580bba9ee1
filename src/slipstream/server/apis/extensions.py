"""Slipstream's own fields, which the Messages and Responses APIs accept besides their documented ones."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from slipstream.server.apis.openai_schemas import MAX_TOKENS, DraftLora, Speculative, Strict
from slipstream.server.operations.errors_http import refuse
from slipstream.server.operations.server_state import ServerSettings
from slipstream.types import MAX_SEED


class Extensions(Strict):
    """Fields for further sampling settings, speculation, caching, priority and time limits."""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="Extension")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Extension")
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, description="Extension; 1 is off")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="Extension")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="Extension")
    cache_prompt: bool | None = Field(default=None, description="Extension: use and fill the prefix cache")
    speculative: Speculative | None = None
    draft_lora: DraftLora | None = None
    priority: int | None = Field(
        default=None,
        ge=-100,
        le=100,
        description="Extension: larger values are served first; above 0 only with --allow-priority",
    )
    timeout: float | None = Field(
        default=None, gt=0, le=86400, description="Extension: the most seconds that the request may take"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Extension: such as enable_thinking")
    top_k: int | None = Field(default=None, ge=0, le=MAX_TOKENS, description="0 is off")
    temperature: float | None = Field(default=None, ge=0, le=2, description="Default: the model's own, or 0 (greedy)")
    top_p: float | None = Field(default=None, gt=0, le=1)

    def sampling(self) -> dict[str, object]:
        """The fields that were given, as settings of an engine's request."""
        names = (
            "seed",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "cache_prompt",
            "top_k",
            "temperature",
            "top_p",
            "draft_lora",
        )
        said = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.speculative is not None:
            said["mode"] = self.speculative.mode_name()
        return said


def allowed_priority(asked: int | None, settings: ServerSettings) -> int:
    """The priority of a request; a priority above 0 is refused unless the server allows it."""
    if asked is not None and asked > 0 and not settings.allow_priority:
        raise refuse("priority", "may not be above 0 here", "leave it out, or start the server with --allow-priority")
    return asked or 0
