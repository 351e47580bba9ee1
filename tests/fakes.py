"""A stand-in for the engine with its public API, so that the command line can be tested in milliseconds.

A token is a character. Answers say what was asked, so that a test can see what reached the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from slipstream.errors import RequestError
from slipstream.speculative.novel import novel_steps
from slipstream.types import GenEvent, Mode, RequestStats, SamplingParams, TokenOut

STEP = 4  # tokens a speculative step of the fake commits


@dataclass
class FakeCompletion:
    text: str
    token_ids: list[int]
    tokens: list[TokenOut]
    finish_reason: str
    stats: RequestStats
    step_sizes: list[int]


class FakeTokenizer:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class FakeDetokenizer:
    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.tokenizer = tokenizer

    def push(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


@dataclass
class FakeLLM:
    """Keeps every instance and every request for the tests to look at."""

    target: str
    draft: str | None = "auto"
    config: Any = None
    progress: Any = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    made: ClassVar[list[FakeLLM]] = []
    spoil: ClassVar[str] = ""  # appended to speculative answers, to make them differ
    speculative_ms: ClassVar[float] = 2.0  # of one speculative step; a plain step takes 1 ms
    fail: ClassVar[str] = ""  # an error every request ends with

    def __post_init__(self) -> None:
        FakeLLM.made.append(self)

    @property
    def has_draft(self) -> bool:
        return self.draft is not None

    @property
    def target_source(self) -> SimpleNamespace:
        return SimpleNamespace(path=Path(self.target), label=self.target)

    def describe(self) -> dict[str, object]:
        return {
            "target": self.target, "draft": self.draft, "weight_format": "int4", "exact": True, "threads": 2,
            "block_size": 16,
            "weight_bytes": 90_000_000, "floor_ms": 3.0, "bandwidth_gbs": 30.0, "format_choice": "int4 was fastest.",
        }

    def chat(self, messages: Sequence[dict[str, str]], **settings: Any) -> FakeCompletion:
        return self._complete(list(messages), settings)

    def stream(
        self, prompt: str | Sequence[dict[str, str]], *, chat: bool = False, **settings: Any
    ) -> Iterator[GenEvent]:
        messages = [{"role": "user" if chat else "raw", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        done = self._complete(messages, settings)  # type: ignore[arg-type]
        position = 0
        for size in [1, *done.step_sizes]:
            tokens = done.tokens[position : position + size]
            position += size
            last = position >= len(done.tokens)
            yield GenEvent(
                "fake", tokens, "".join(chr(token.id) for token in tokens),
                done.finish_reason if last else None, done.stats if last else None,  # type: ignore[arg-type]
            )

    def prompt_ids(self, messages: Sequence[dict[str, str]], *, chat: bool) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    def close(self) -> None:
        self.closed = True

    def _complete(self, messages: list[dict[str, str]], settings: dict[str, Any]) -> FakeCompletion:
        self.requests.append({"messages": [dict(message) for message in messages], **settings})
        if self.fail:
            raise RequestError(self.fail)
        mode = Mode.parse(settings.get("mode", "chain" if self.has_draft else "plain"))
        if mode.kind == "chain" and not self.has_draft:
            raise RequestError("mode chain needs a drafter")
        SamplingParams(temperature=settings.get("temperature", 0.0))
        text = f"You said {messages[-1]['content']}, the {len(messages)}th message."
        if mode.kind == "chain" and not self.closed:
            text += self.spoil
        return _completion(text[: settings.get("max_tokens", 256)], mode, self.speculative_ms)


def _completion(text: str, mode: Mode, speculative_ms: float) -> FakeCompletion:
    ids = [ord(letter) for letter in text]
    step = STEP if mode.kind == "chain" else 1
    sizes = [min(step, len(ids) - start) for start in range(1, len(ids), step)]
    stats = RequestStats(prompt_tokens=7, completion_tokens=len(ids), ttft_ms=5.0)
    drafted = [False]
    for size in sizes:
        stats.record_step(15 if step > 1 else 0, size - 1, size)
        stats.decode_ms += speculative_ms if step > 1 else 1.0
        drafted += [True] * (size - 1) + [False]
    stats.verify_ms = stats.decode_ms
    stats.novel_steps, stats.novel_committed = novel_steps(ids, sizes)
    tokens = [
        TokenOut(token_id, was_drafted, -0.5, ((token_id, -0.5),))
        for token_id, was_drafted in zip(ids, drafted, strict=True)
    ]
    return FakeCompletion(text, ids, tokens, "stop", stats, sizes)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Puts FakeLLM where the command line looks for the engine."""
    engine = ModuleType("slipstream.engine.llm")
    engine.LLM, engine.Completion = FakeLLM, FakeCompletion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.engine.llm", engine)
    text = ModuleType("slipstream.text.detokenize")
    text.IncrementalDetokenizer = FakeDetokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.text.detokenize", text)
    monkeypatch.setattr(FakeLLM, "made", [])
    for name, value in (("spoil", ""), ("speculative_ms", 2.0), ("fail", "")):
        monkeypatch.setattr(FakeLLM, name, value)
    return FakeLLM


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line in this process."""

    def run(*arguments: str, stdin: str | None = None) -> Outcome:
        import io

        from slipstream.cli.main import run as main

        monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as exit_:
            main()
        seen = capsys.readouterr()
        return Outcome(int(exit_.value.code or 0), seen.out, seen.err)

    return run
