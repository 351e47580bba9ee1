"""A fake engine with the public API of the real one, so that the command line can be tested in milliseconds.

A token is a character. An answer repeats the question, so that a test can see what reached the engine.
"""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from slipstream.errors import RequestError
from slipstream.stats import Decision, RequestStats, novel_steps
from slipstream.types import Gate, GenEvent, Mode, Proposal, SamplingParams, StepRecord, TokenOut, Verdict

STEP = 4  # tokens that a speculative step of the fake commits
BLOCK = 16  # rows of the fake's chain; a tree has a second guess beside the first drafted token


@dataclass
class FakeCompletion:
    text: str
    token_ids: list[int]
    tokens: list[TokenOut]
    finish_reason: str
    stats: RequestStats
    steps: list[StepRecord]
    error: str | None = None


class FakeTokenizer:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def token_text(self, index: int) -> str:
        return chr(index)

    def token_bytes(self, index: int) -> bytes:
        return chr(index).encode()


@dataclass
class FakeLLM:
    """Keeps every instance and every request, so that tests can inspect them."""

    compiled: ClassVar[bool] = True
    kernels: ClassVar[str] = "torch's kernels: a test says so"

    target: str
    draft: str | None = "auto"
    draft_lora: Sequence[str] = ()
    config: Any = None
    progress: Any = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    made: ClassVar[list[FakeLLM]] = []
    spoil: ClassVar[str] = ""  # is appended to speculative answers to make them differ
    speculative_ms: ClassVar[float] = 2.0  # time of one speculative step; a plain step takes 1 ms
    mode_ms: ClassVar[dict[str, float]] = {}  # time of one step in certain modes, if it is another
    fail: ClassVar[str] = ""  # the error with which every request ends

    def __post_init__(self) -> None:
        FakeLLM.made.append(self)

    @property
    def has_draft(self) -> bool:
        return self.draft_source == "drafter"

    @property
    def draft_source(self) -> str | None:
        return None if self.draft is None else "suffix" if self.draft == "suffix" else "drafter"

    @property
    def speculates(self) -> bool:
        return self.draft is not None

    @property
    def draft_label(self) -> str | None:
        return self.draft

    @property
    def draft_variants(self) -> list[str]:
        return ["base", *(source.partition("=")[0] for source in self.draft_lora)] if self.has_draft else []

    @property
    def target_source(self) -> SimpleNamespace:
        return SimpleNamespace(path=Path(self.target), label=self.target)

    def describe(self) -> dict[str, object]:
        return {
            "target": self.target,
            "draft": self.draft,
            "weight_format": "int4",
            "exact": True,
            "threads": 2,
            "block_size": 16,
            "weight_bytes": 90_000_000,
            "floor_ms": 3.0,
            "bandwidth_gbs": 30.0,
            "format_choice": "int4 was fastest.",
        }

    def chat(self, messages: Sequence[dict[str, str]], **settings: Any) -> FakeCompletion:
        return self.complete(list(messages), settings)

    def stream(
        self, prompt: str | Sequence[dict[str, str]], *, chat: bool = False, **settings: Any
    ) -> Iterator[GenEvent]:
        messages = [{"role": "user" if chat else "raw", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        done = self.complete(messages, settings)  # type: ignore[arg-type]
        position = 0
        for step in [None, *done.steps]:
            size = len(step.verdict.tokens) if step else 1
            tokens = done.tokens[position : position + size]
            position += size
            last = position >= len(done.tokens)
            yield GenEvent(
                f"fake-{len(self.requests)}",
                tokens,
                "".join(chr(token.id) for token in tokens),
                done.finish_reason if last else None,
                done.stats if last else None,
                step=step,  # type: ignore[arg-type]
                texts=[chr(token.id) for token in tokens],
            )

    def prompt_ids(self, messages: Sequence[dict[str, str]], *, chat: bool) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def complete(self, messages: list[dict[str, str]], settings: dict[str, Any]) -> FakeCompletion:
        self.requests.append({"messages": [dict(message) for message in messages], **settings})
        if self.fail:
            raise RequestError(self.fail)
        mode = Mode.parse(settings.get("mode", "auto" if self.speculates else "plain"))
        if mode.kind != "plain" and not self.has_draft and not (mode.kind == "auto" and self.speculates):
            raise RequestError(f"mode {mode} needs a drafter")
        Gate.parse(settings.get("gate", "off"))
        SamplingParams(temperature=settings.get("temperature", 0.0))
        text = f"You said {messages[-1]['content']}, the {len(messages)}th message."
        if mode.kind != "plain" and not self.closed:
            text += self.spoil
        step_ms = self.mode_ms.get(str(mode), 1.0 if mode.kind == "plain" else self.speculative_ms)
        return _completion(text[: settings.get("max_tokens", 256)], mode, step_ms)


def _completion(text: str, mode: Mode, step_ms: float) -> FakeCompletion:
    ids = [ord(letter) for letter in text]
    stride = 1 if mode.kind == "plain" else STEP
    sizes = [min(stride, len(ids) - start) for start in range(1, len(ids), stride)]
    stats = RequestStats(prompt_tokens=7, completion_tokens=len(ids), ttft_ms=5.0)
    steps, position, drafted = [], 1, [False]
    for size in sizes:
        step = _step(ids, position, size, mode, step_ms)
        proposal, accepted = step.proposal, step.verdict.accepted
        stats.record_step(proposal.nodes, proposal.depth, accepted, size)
        stats.policy.record(step.decision, size)
        stats.decode_ms += step_ms
        steps.append(step)
        position += size
        drafted += [True] * (size - 1) + [False]
    stats.verify_ms = stats.decode_ms
    stats.novel_steps, stats.novel_committed = novel_steps(ids, sizes)
    tokens = [
        TokenOut(token_id, was_drafted, -0.5, ((token_id, -0.5),))
        for token_id, was_drafted in zip(ids, drafted, strict=True)
    ]
    return FakeCompletion(text, ids, tokens, "stop", stats, steps)


def _step(ids: list[int], position: int, size: int, mode: Mode, step_ms: float) -> StepRecord:
    """One step that commits `size` tokens: all drafts before the last token are right, and the last is the bonus."""
    anchor, committed = ids[position - 1], tuple(ids[position : position + size])
    if mode.kind == "plain":
        proposal = Proposal((anchor,), (-1,))
    else:
        wrong = ord("?")
        rows = (anchor, *committed[:-1], *[wrong] * (BLOCK - size))
        parents = tuple(range(-1, BLOCK - 1))
        proposal = Proposal((*rows, wrong), (*parents, 0)) if mode.kind == "tree" else Proposal(rows, parents)
    choice = f"chain:{BLOCK}" if mode.kind in ("chain", "auto") else str(mode)
    decision = Decision(choice, "the fake's choice", 3.5, step_ms) if mode.kind == "auto" else Decision(choice)
    return StepRecord(position, proposal, Verdict(tuple(range(size)), committed), decision, 0.0, step_ms)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Puts FakeLLM in the place of the engine that the command line imports."""
    engine = ModuleType("slipstream.engine.llm")
    engine.LLM, engine.Completion = FakeLLM, FakeCompletion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.engine.llm", engine)
    monkeypatch.setattr(FakeLLM, "made", [])
    for name, value in (("spoil", ""), ("speculative_ms", 2.0), ("mode_ms", {}), ("fail", "")):
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
