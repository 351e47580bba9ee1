"""What all parts of one server share: its settings, its models, its numbers and whether it still takes work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slipstream.server.settings import ServerSettings

if TYPE_CHECKING:
    from slipstream.server.metrics import Metrics
    from slipstream.server.recording import Recorder
    from slipstream.server.router import Router

Phase = Literal["loading", "ready", "draining"]


@dataclass(slots=True)
class ServerState:
    """One server. `phase` is loading until the first model is there, and draining once it was asked to end."""

    settings: ServerSettings
    router: Router
    metrics: Metrics
    recorder: Recorder | None = None  # None: nothing is recorded
    phase: Phase = "loading"
