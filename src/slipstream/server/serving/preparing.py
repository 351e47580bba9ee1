"""Prepares texts in threads, and limits how many characters are being prepared at the same time.

Rendering, tokenising and compiling a grammar take time and memory before a request enters its engine's queue. The
limit of that queue does not bound this work, so it has a limit of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TypeVar

from slipstream.errors import BusyError
from slipstream.server.serving.jobs import Job

T = TypeVar("T")
# Larger texts are prepared one at a time, because preparing a text may take 300 bytes of memory per character.
LARGE_CHARS = 1 << 16
# Characters that may be in preparation together: sixteen bodies of 4 MiB. With more, the memory could fill up.
MAX_CHARS = 1 << 26
_RETRY_AFTER_S = 5.0  # preparing a text of 4 MiB takes about as long, so an earlier retry would be refused again


class Preparation:
    """The prompts and other texts that are being prepared for one model. Only the event loop's thread may use it."""

    def __init__(self) -> None:
        self.count = 0
        self._chars = 0
        self._one_large = asyncio.Lock()

    async def run(self, chars: int, work: Callable[..., T], *arguments: object) -> T:
        """Does `work` on a text of `chars` characters in another thread.

        It refuses the text if this text and those in preparation together exceed `MAX_CHARS`; a text that is alone is
        always admitted.
        """
        if self.count and self._chars + chars > MAX_CHARS:
            many = f"{self.count} texts of {self._chars} characters"
            raise BusyError(f"the server is already preparing {many}", retry_after_s=_RETRY_AFTER_S)
        self.count, self._chars = self.count + 1, self._chars + chars
        try:
            return await self.go_on(chars, work, *arguments)
        finally:
            self.count, self._chars = self.count - 1, self._chars - chars

    async def go_on(self, chars: int, work: Callable[..., T], *arguments: object) -> T:
        """Does more work on a text that `run` has admitted before; large texts are prepared one at a time."""
        if chars < LARGE_CHARS:
            return await _in_thread(work, *arguments)
        async with self._one_large:
            return await _in_thread(work, *arguments)


async def _in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Waits for the thread even if the caller is cancelled, because only the caller's lease keeps the model loaded."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def prompt_chars(job: Job) -> int:
    """About how many characters a prompt has: messages, calls, tools and variables for its template.

    A prompt of token ids counts one for each.
    """
    if job.messages is None:
        return len(job.prompt or ())
    tools = [(tool.name, tool.description, tool.parameters) for tool in job.tools]
    return _chars([job.messages, tools, job.template_kwargs])


def _chars(value: object) -> int:
    """Returns the characters in all strings of a body's value; other values count one.

    It calls itself for each level, which is safe because `MAX_JSON_DEPTH` limits the depth of bodies.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = chain(value.keys(), value.values())
    return sum(map(_chars, value)) if isinstance(value, list | tuple | chain) else 1
