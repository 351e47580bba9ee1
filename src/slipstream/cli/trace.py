"""Writes a trace of decoding: one JSON line per request and step, handed to the system as soon as the step is reported.

A run that is killed therefore keeps the lines of all its finished steps.

`slipstream generate --prompt "Once upon a time" --trace steps.jsonl`
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from slipstream.errors import SourceError
from slipstream.types import GenEvent

if TYPE_CHECKING:
    from slipstream.text.tokenizer import Tokenizer


class Trace:
    """The file of --trace; without a path it writes nothing."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._steps: Counter[str] = Counter()
        self._file = None
        if path is not None:
            try:
                self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # `__exit__` closes it
            except OSError as error:
                raise SourceError(f"cannot write the trace {path}: {error.strerror}", "name another file") from error

    def record(self, mode: str, event: GenEvent, tokenizer: Tokenizer) -> None:
        """Writes the step of an event; `mode` is what the request asked for, the step says what was chosen."""
        if self._file is None or event.step is None:
            return
        self._steps[event.request_id] += 1
        line = {
            "request": event.request_id,
            "step": self._steps[event.request_id],
            "mode": mode,
            **event.step.to_json(),
            "text": b"".join(tokenizer.token_bytes(token.id) for token in event.tokens).decode("utf-8", "replace"),
        }
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise SourceError(f"cannot write the trace {self._path}: {error.strerror}") from error

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> Literal[False]:
        if self._file is not None:
            with suppress(OSError):  # every line was flushed, so `close` has nothing left to write
                self._file.close()
        return False
