"""Prompts in preparation: how much of it may go on at once, and in which thread.

Rendering, tokenising and compiling a grammar take time and memory before a request has a place in its engine's line, so
they need a bound of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from slipstream.errors import BusyError
from slipstream.server.serving.jobs import Job

T = TypeVar("T")
LARGE_CHARS = 1 << 16  # larger texts are prepared one at a time: each may take 300 bytes of memory for one of its own
MAX_CHARS = 1 << 26  # that wait at once: sixteen bodies of 4 MiB
_RETRY_AFTER_S = 5.0  # about what a text of 4 MiB takes


class Preparation:
    """What is being prepared for one model. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.count = 0
        self._chars = 0
        self._one_large = asyncio.Lock()

    async def run(self, chars: int, work: Callable[..., T], *arguments: object) -> T:
        """Does `work` on a text of so many characters in another thread; refuses it if too much waits already."""
        if self.count and self._chars + chars > MAX_CHARS:
            raise BusyError(f"{self.count} long prompts are being prepared already", retry_after_s=_RETRY_AFTER_S)
        self.count, self._chars = self.count + 1, self._chars + chars
        try:
            return await self.go_on(chars, work, *arguments)
        finally:
            self.count, self._chars = self.count - 1, self._chars - chars

    async def go_on(self, chars: int, work: Callable[..., T], *arguments: object) -> T:
        """Does more work on a text that was let in before; of large ones one at a time."""
        if chars < LARGE_CHARS:
            return await _in_thread(work, *arguments)
        async with self._one_large:
            return await _in_thread(work, *arguments)


async def _in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Waits for the thread even if it is cancelled meanwhile: the thread reads a model that a lease keeps in memory."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def prompt_chars(job: Job) -> int:
    """How many characters a prompt is made of, about: messages, calls, tools, and what its template is told."""
    if job.messages is None:
        return len(job.prompt or ())
    tools = [(tool.name, tool.description, tool.parameters) for tool in job.tools]
    return _chars([job.messages, tools, job.template_kwargs])


def _chars(value: object) -> int:
    count, todo = 0, [value]
    while todo:
        part = todo.pop()
        if isinstance(part, str):
            count += len(part)
        elif isinstance(part, Mapping):
            todo += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            todo += part
        else:
            count += 1
    return count
