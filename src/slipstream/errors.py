"""Every error a user can cause or meet, each one sentence with a hint about what to do next."""

from __future__ import annotations


class SlipstreamError(Exception):
    """A problem that is explained to the user in one sentence; the CLI prints it and exits with 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class FormatError(SlipstreamError):
    """A model file is damaged, truncated or of a kind we do not read."""


class ConfigError(SlipstreamError):
    """A model's configuration is missing something, contradicts its tensors, or asks for the unsupported."""


class PairError(SlipstreamError):
    """A drafter and a target that do not belong together."""


class RequestError(SlipstreamError):
    """A request that can never be served as asked."""


class SourceError(SlipstreamError):
    """A model could not be found or fetched."""


class IntegrityError(SlipstreamError):
    """An internal invariant does not hold; always a bug of ours, never of the user."""


class BusyError(SlipstreamError):
    """No room in the queue now; asking again after `retry_after_s` seconds may help."""

    def __init__(self, message: str, hint: str = "try again later", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class EngineFailedError(SlipstreamError):
    """The thread that ran an engine has ended, and with it everything that ran there."""


class StaleEpochError(SlipstreamError):
    """Somebody acts on a state of a request that is over: it was resumed, paused again or ended since."""
