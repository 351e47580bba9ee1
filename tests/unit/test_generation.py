"""One answer from job to end on a real engine thread: its parts, its tokens, and every way it can end."""

from __future__ import annotations

import asyncio
import ctypes
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.errors import EngineFailedError, RequestError
from slipstream.grammar import notations as grammars
from slipstream.server.serving.generation import Generation, start
from slipstream.server.serving.jobs import Answer, AnswerDelta, DeadlineError, Job, Tool, ToolChoice
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.router import ModelRouter
from slipstream.text.tokenizer import Tokenizer
from tests.tiny import keep_threads, write_pair

THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}{# </think> #}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASK = [{"role": "user", "content": "abc"}]
ENGINE = EngineConfig(
    weight_format="fp32",
    check_integrity=True,
    max_context=1024,
    cache_tokens=64 * PAGE_TOKENS,
    max_sequences=2,
    prefill_chunk=64,
    step_rows=128,
    threads=1,
)


class Bench:
    """A router over the tiny pair and the loop it lives in."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.template = THINKING
        self.target, draft = write_pair(folder)
        spec = ModelSpec("tiny", str(self.target), str(draft), ENGINE, {"max_tokens": 40, "ignore_eos": True})
        self.router = runner.run(self._router(spec))

    async def _router(self, spec: ModelSpec) -> ModelRouter:
        return ModelRouter([spec])

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def body() -> Any:
            return await work()

        return self.runner.run(body())

    async def start(self, job: Job) -> Generation:
        lease = await self.router.lease("tiny")
        lease.llm.tokenizer.chat_template = self.template
        return await start(lease, job)

    def answer(self, job: Job) -> tuple[Answer, list[AnswerDelta], Generation]:
        async def work() -> tuple[Answer, list[AnswerDelta], Generation]:
            generation = await self.start(job)
            deltas = [delta async for delta in generation]
            return generation.answer, deltas, generation

        return self.run(work)

    def users(self) -> int:
        return sum(info.users for info in self.router.describe())


@pytest.fixture
def bench(shared_bench: Bench) -> Bench:
    shared_bench.template = THINKING
    return shared_bench


@pytest.fixture(scope="module")
def shared_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with keep_threads(), asyncio.Runner() as runner:
        made = Bench(tmp_path_factory.mktemp("pair"), runner)
        yield made
        runner.run(made.router.close())


def raw(**settings: object) -> Job:
    return Job("tiny", prompt=list(b"hello"), settings={"seed": 1, **settings})


def test_deltas_make_up_the_answer_and_tokens_go_with_their_text(bench: Bench) -> None:
    answer, deltas, generation = bench.answer(raw(logprobs=2, temperature=0.8))
    assert answer.finish_reason == "length" and answer.stats.completion_tokens == 40
    assert "".join(delta.text for delta in deltas) == answer.content
    assert [token for delta in deltas for token in delta.tokens] == answer.tokens
    assert [text for delta in deltas for text in delta.texts] == answer.token_texts
    assert len(answer.token_texts) == len(answer.tokens) and answer.content.startswith("".join(answer.token_texts))
    assert all(token.logprob is not None and len(token.top_logprobs) == 2 for token in answer.tokens)
    assert generation.prompt_tokens == 5 and answer.model == "tiny" and answer.draft == "draft"
    assert bench.users() == 0, "the model is given back when the answer is over"


def test_the_same_answer_with_and_without_speculation(bench: Bench) -> None:
    for temperature in (0.0, 0.9):
        plain, _, _ = bench.answer(raw(mode="plain", temperature=temperature))
        chain, _, _ = bench.answer(raw(mode="chain", temperature=temperature))
        assert plain.content == chain.content and chain.stats.drafted > 0
        assert (plain.draft, chain.draft) == (None, "draft") and (plain.mode, chain.mode) == ("plain", "chain")


def test_what_a_request_says_goes_before_what_its_model_says(bench: Bench) -> None:
    assert bench.answer(raw(max_tokens=3))[0].stats.completion_tokens == 3
    assert bench.answer(raw())[0].stats.completion_tokens == 40


def test_the_stop_string_is_named_and_its_tokens_are_not_content(bench: Bench) -> None:
    whole, _, _ = bench.answer(raw(logprobs=0))
    stop = whole.content[10:12]
    answer, _, _ = bench.answer(raw(logprobs=0, stop=("never there", stop)))
    assert answer.finish_reason == "stop" and answer.stop_sequence == stop
    assert answer.content == whole.content[: whole.content.index(stop)]
    assert len(answer.tokens) == len(answer.content.encode("utf-8", "surrogatepass")), "one token a byte in this pair"


def test_reasoning_is_split_off_and_ended_by_its_budget(bench: Bench) -> None:
    for mode in ("plain", "chain"):
        job = Job(
            "tiny",
            messages=ASK,
            settings={"seed": 3, "mode": mode},
            thinking_budget=6,
            template_kwargs={"enable_thinking": True},
        )
        answer, deltas, _ = bench.answer(job)
        # the tags of this pair are one token a letter
        assert answer.reasoning and answer.reasoning_tokens == 6 + len("</think>")
        assert answer.content and "think" not in answer.content
        assert [delta.kind for delta in deltas] == sorted((d.kind for d in deltas), reverse=True), "reasoning first"


def test_tool_calls_and_formats_hold_the_answer(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for mode in ("plain", "chain"):
        settings = {"seed": 5, "mode": mode, "max_tokens": 200, "ignore_eos": False}
        job = Job(
            "tiny",
            messages=ASK,
            settings=settings,
            tools=[Tool("pick", "", schema)],
            tool_choice=ToolChoice("required", "pick"),
        )
        answer, deltas, _ = bench.answer(job)
        assert (answer.finish_reason, answer.content) == ("stop", ""), answer
        assert [call.name for call in answer.calls] == ["pick"] and json.loads(answer.calls[0].arguments)["a"] in (1, 2)
        assert deltas[0].call_id == answer.calls[0].id and deltas[0].name == "pick" and not deltas[0].text
        assert "".join(delta.text for delta in deltas) == answer.calls[0].arguments
        formatted, _, _ = bench.answer(
            Job("tiny", messages=ASK, settings=settings, format=grammars.json_schema(schema))
        )
        assert json.loads(formatted.content)["a"] in (1, 2)


def test_with_a_format_an_answer_is_that_or_calls(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    both = Job(
        "tiny",
        messages=ASK,
        settings={"max_tokens": 400, "ignore_eos": False},
        tools=[Tool("pick", "", schema)],
        format=grammars.json_schema(schema),
        parallel_tools=False,
    )
    bench.template = PLAIN
    for calls, first in ((True, "<"), (False, "{")):
        bias = {Tokenizer.load(bench.target).encode(first)[0]: 100.0}
        answer, _, _ = bench.answer(replace(both, settings={**both.settings, "logit_bias": bias}))
        assert bool(answer.calls) == calls and bool(answer.content) != calls
        assert json.loads(answer.calls[0].arguments if calls else answer.content)["a"] in (1, 2)
    with pytest.raises(RequestError, match="grammar"):
        bench.run(lambda: bench.start(replace(both, format=grammars.lark("start: /a/"))))


def test_closing_early_cancels_and_frees(bench: Bench) -> None:
    async def work() -> Generation:
        generation = await bench.start(raw(max_tokens=400))
        await anext(generation)
        await generation.aclose()
        return generation

    generation = bench.run(work)
    assert generation.answer.finish_reason == "cancelled" and generation.failure is None
    assert 0 < generation.answer.stats.completion_tokens < 400 and bench.users() == 0


def test_a_slow_reader_holds_neither_the_engine_nor_the_model(bench: Bench) -> None:
    async def work() -> tuple[int, Answer, list[AnswerDelta]]:
        generation = await bench.start(raw(max_tokens=60))
        while not generation.over:
            await asyncio.sleep(0.01)
        return bench.users(), generation.answer, [delta async for delta in generation]

    users, answer, deltas = bench.run(work)
    assert users == 0 and "".join(delta.text for delta in deltas) == answer.content


def test_time_is_up(bench: Bench) -> None:
    async def work() -> Generation:
        generation = await bench.start(replace(raw(max_tokens=450, mode="plain"), deadline_s=0.05))
        with pytest.raises(DeadlineError):
            await generation.finish()
        return generation

    generation = bench.run(work)
    assert generation.answer.finish_reason == "error" and "time is up" in (generation.answer.error or "")
    assert generation.answer.stats.completion_tokens < 450 and bench.users() == 0


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (raw(colour="blue"), "colour"),
        (raw(max_tokens=0), "max_tokens"),
        (Job("tiny", prompt=[1] * 1100), "1100 tokens"),
        (Job("tiny", messages=ASK, tools=[Tool("a"), Tool("a")]), "same name"),
        (Job("tiny", messages=ASK, format=grammars.lark("start: (")), "grammar"),
    ],
)
def test_what_cannot_run_is_refused_and_the_model_given_back(bench: Bench, job: Job, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        bench.run(lambda: bench.start(job))
    assert bench.users() == 0


def test_an_engine_that_dies_ends_the_answer_with_its_reason(bench: Bench) -> None:
    async def work() -> Generation:
        generation = await bench.start(raw(max_tokens=450))
        await anext(generation)
        lease = await bench.router.lease("tiny")
        thread = lease.worker.thread
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        lease.release()
        with pytest.raises(EngineFailedError, match="ended"):
            await generation.finish()
        return generation

    generation = bench.run(work)
    assert generation.answer.finish_reason == "error" and bench.users() == 0
    assert bench.answer(raw())[0].finish_reason == "length", "the next request gets a new engine"
