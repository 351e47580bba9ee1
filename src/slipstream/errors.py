"""The errors that a user can cause or meet. Each has one sentence and a hint that says what to do next."""

from __future__ import annotations


class SlipstreamError(Exception):
    """A problem that one sentence explains to the user; the CLI prints it and exits with status 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class FormatError(SlipstreamError):
    """A model file is damaged, truncated or of a kind that Slipstream does not read."""


class ConfigError(SlipstreamError):
    """A model's configuration lacks something, contradicts the model's tensors, or asks for something unsupported."""


class PairError(SlipstreamError):
    """A drafter and a target do not belong together."""


class RequestError(SlipstreamError):
    """A request can never be served as it was asked."""


class SourceError(SlipstreamError):
    """A model could not be found or fetched."""


class IntegrityError(SlipstreamError):
    """An internal invariant does not hold; this is always a bug in Slipstream, never a mistake of the user."""


class BusyError(SlipstreamError):
    """The queue has no room now; the caller may try again after `retry_after_s` seconds."""

    def __init__(self, message: str, hint: str = "try again later", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class EngineFailedError(SlipstreamError):
    """The thread that ran an engine has ended, and with it every request of that engine."""


class StaleEpochError(SlipstreamError):
    """A command fits another state of its request, which has not begun, or was resumed, paused again or ended since."""
