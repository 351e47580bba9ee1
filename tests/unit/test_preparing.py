"""Prompts in preparation: bounded in number and size, large ones one at a time, and refused before any work."""

# mypy: disable-error-code="arg-type, assignment, list-item, unused-ignore"

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.errors import BusyError
from slipstream.server.apis.anthropic_schemas import AnthropicUserMessage, TextBlock, to_messages
from slipstream.server.serving import generation, preparing
from slipstream.server.serving.jobs import Job, Tool
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.preparing import LARGE_CHARS, Preparation, prompt_chars
from slipstream.server.serving.router import ModelRouter
from tests.tiny import keep_threads, write_pair


class Work:
    """Notes how many pieces of it run at once; each waits until all that may run together do, or for a moment."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = self.most = 0

    def __call__(self, result: int) -> int:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        threading.Event().wait(0.05)
        with self.lock:
            self.running -= 1
        return result


@pytest.mark.parametrize(("chars", "alone"), [(10, False), (LARGE_CHARS, True)])
def test_of_large_texts_one_is_prepared_at_a_time(chars: int, alone: bool) -> None:
    async def main() -> None:
        work, preparation = Work(), Preparation()
        assert await asyncio.gather(*(preparation.run(chars, work, index) for index in range(4))) == [0, 1, 2, 3]
        assert (work.most == 1) == alone
        assert preparation.count == 0

    asyncio.run(main())


def test_what_waits_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_CHARS", 3 * LARGE_CHARS)

    async def main() -> None:
        work, preparation = Work(), Preparation()
        running = [asyncio.ensure_future(preparation.run(LARGE_CHARS, work, index)) for index in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="already preparing 3 texts"):
            await preparation.run(1, work, 9)
        running[1].cancel()
        await asyncio.wait(running)
        assert preparation.count == 0
        assert await preparation.run(9 * LARGE_CHARS, work, 9) == 9, "one alone is never too large"

    asyncio.run(main())


def test_a_full_queue_refuses_before_anything_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_pair(tmp_path)
    engine = EngineConfig(
        "fp32", max_context=512, max_sequences=1, max_waiting=1, cache_tokens=24 * PAGE_TOKENS, threads=1
    )
    prepared: list[object] = []
    build = generation.build_prompt
    monkeypatch.setattr(generation, "build_prompt", lambda *args: prepared.append(args) or build(*args))
    job = Job("tiny", prompt="hello", settings={"max_tokens": 400, "ignore_eos": True})

    async def main() -> None:
        router = ModelRouter([ModelSpec("tiny", str(target), str(draft), engine)])
        begun = []
        try:
            with pytest.raises(BusyError):
                for _ in range(3):
                    begun.append(await generation.start(await router.lease("tiny"), job))
            assert len(prepared) == len(begun) >= 1
            # those on their way count too: of four at once two can have places
            for one in begun:
                await one.aclose()
            prepared.clear()
            leases = [await router.lease("tiny") for _ in range(4)]
            both = await asyncio.gather(*(generation.start(lease, job) for lease in leases), return_exceptions=True)
            assert sum(isinstance(one, BusyError) for one in both) >= 2 and len(prepared) <= 2
            for one in both:
                if isinstance(one, generation.Generation):
                    await one.aclose()
            assert sum(info.users for info in router.describe()) == 0
        finally:
            await router.close(0.0)

    with keep_threads():
        asyncio.run(main())


def test_the_size_of_a_prompt() -> None:
    assert prompt_chars(Job("m", prompt="abc")) == 3
    assert prompt_chars(Job("m", prompt=[1, 2])) == 2
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": None, "reasoning_content": "de"}]
    plain = prompt_chars(Job("m", messages=messages))
    assert 18 <= plain < 60, "names of fields may count"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x" * 1000}}]}
    assert prompt_chars(Job("m", messages=[*messages, call])) > plain + 1000
    tool = Tool("f", "d" * 1000, {"properties": {"p" * 1000: {"enum": ["e" * 1000]}}})
    assert prompt_chars(Job("m", messages=messages, tools=[tool], template_kwargs={"k": "v" * 1000})) > plain + 4000


def test_content_in_many_blocks_is_joined_once() -> None:
    """Adding block to block copied 2,000 times the whole in 4,000 blocks; now each text is copied once."""
    blocks = [TextBlock(type="text", text="x" * 1000) for _ in range(4000)]
    seconds = []
    for count in (250, 4000):
        began = time.process_time()
        (told,) = to_messages(None, [AnthropicUserMessage(role="user", content=list(blocks[:count]))])
        seconds.append(time.process_time() - began)
        assert told["content"] == "\n\n".join(["x" * 1000] * count)
    assert seconds[1] < 100 * seconds[0] + 0.02, "16 times as many"
    empty = [AnthropicUserMessage(role="user", content=text) for text in ("", "a", "", "b")]
    assert to_messages("s", empty) == [{"role": "system", "content": "s"}, {"role": "user", "content": "a\n\nb"}]
