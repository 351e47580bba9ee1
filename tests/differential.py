"""Runs random requests among others and compares each with the same request alone, plain, on a separate engine.

    python -m tests.differential --seed 1 --texts 2000

A seed is one episode. It has some questions (a prompt and everything that decides its text), each of which is answered
once alone, and then asked several times of an engine with few pages, in any mode and with any draft variant, among
other requests that arrive, pause, lose their pages, resume and are cancelled meanwhile. Text, token ids and
log-probabilities must be equal to the bit, and a cancelled answer must be the beginning of its text. Costs and times
come from the seed too, so that an episode can be repeated.
"""

# mypy: disable-error-code="arg-type, operator, unused-ignore, var-annotated"

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import torch

from slipstream.engine.llm import Completion
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.costs import CostTable
from slipstream.speculative.draft import BlockDrafter, DraftJob
from slipstream.stats import RequestStats
from slipstream.types import BASE_VARIANT, Gate, GenEvent, Mode, Request, Thinking
from tests.differential_worlds import WORLDS, World, open_world, worlds_on
from tests.families import Replay
from tests.tiny import assert_engine_idle, keep_threads

ASKED = 3  # how often each question is asked
TEXT_MODES = ("plain", "tree:9:text", "auto", "auto")  # where only the text drafts
CHAINS = ("chain", "chain:2", "chain:4")
MODES = ("plain", *CHAINS, "tree:2", "tree:9", "tree:30", "tree:12:text", "tree:5:seed", "tree:24:seed", "auto")
GATES = ("off", "off", "auto", "ema", "ema:margin=0.2,warmup=0", "entropy", "entropy:floor=0.2,hard=0.1")
DRAFTS_CHECKED = 4  # requests of an episode whose drafts are compared as well
MOST_OPEN = 9  # requests at the same time, which are more than the engine has slots
MOST_STEPS = 20_000  # steps after which an episode has failed; it usually takes some hundred
WATCHED = (
    "accepted",
    "accepted from the text",
    "cached_tokens",
    "cancelled",
    "resumed",
    "pages lost",
    "yielded",
    "branching",
    "adapters",
)


@dataclass(slots=True)
class Question:
    """A prompt, the settings that decide its text, and that text."""

    prompt: tuple[int, ...]
    settings: dict[str, object]
    answer: Completion


@dataclass(slots=True, eq=False)
class Ask:
    """A question while the shared engine answers it."""

    question: Question
    request: Request
    cancel_at: int | None  # after this many tokens
    seen: Completion = field(default_factory=lambda: Completion("", [], [], "error", RequestStats(), []))
    paused: bool = False
    pauses: int = 0


@dataclass(slots=True)
class Report:
    """What was compared, and what happened meanwhile."""

    texts: int = 0
    cpu_seconds: float = 0.0  # processor time of its processes, which a busy machine does not change
    happened: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.texts += other.texts
        self.cpu_seconds += other.cpu_seconds
        self.happened += other.happened
        self.different += other.different

    @property
    def idle(self) -> list[str]:
        """The events that should have happened and did not; without them equal texts would prove little."""
        return [name for name in WATCHED if not self.happened[name]]

    @property
    def ok(self) -> bool:
        return self.texts > 0 and not self.different and self.happened["accepted"] > 0

    def row(self) -> str:
        events = ", ".join(f"{count} {name}" for name, count in sorted(self.happened.items()))
        rate = self.texts / max(self.cpu_seconds, 1e-9)
        return f"{self.texts} texts, {len(self.different)} different, {rate:.1f} a second of one core; {events}"


class Clock:
    """Replaces the machine's clock, so that gates and policy decide by the seed; every reading is later by chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._now = rng, 0.0

    def __call__(self) -> float:
        self._now += self._rng.choice((1e-5, 1e-4, 1e-3))
        return self._now


class Episode:
    """The run of one seed in one world."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.command = world, f"python -m tests.differential --world {world.name} --seed {seed} --texts 1"
        self.rng = random.Random(f"{world.name}/{seed}")
        self.report = Report()
        self.open: dict[str, Ask] = {}
        self._lost: set[tuple[str, int]] = set()
        self._yielded: set[str] = set()

    def run(self) -> Report:
        rng = self.rng
        with patch("time.perf_counter", Clock(random.Random(rng.random()))):
            dear = rng.random() < 0.3
            rows, draft = ({1: 1.0, 64: 8.0}, 0.5) if dear else ({1: 1.0, 64: 1.05}, 0.05)
            proposals = self.world.llm.proposals
            self.engine = self.world.fresh_engine(CostTable(rows, {1: draft, proposals: draft} if proposals else {}))
            asks = self._asks(self._questions())
            replayed = self.world.tiny and rng.random() < 0.6
            with self._knowing_drafters([ask.question for ask in asks]) if replayed else nullcontext():
                self._drive(list(asks))
            if not replayed:
                self._check_drafts(asks)
        assert_engine_idle(self.engine)
        return self.report

    def _check_drafts(self, asks: Sequence[Ask]) -> None:
        """Checks that the same drafts are accepted among others and alone, if neither clock nor gate has an influence.

        Texts alone would not show whether a cached or restored sequence has the right draft context.
        """
        assert self.engine.prefix is not None
        self.engine.prefix.clear()
        whole = [ask for ask in asks if ask.seen.finish_reason != "cancelled"]
        # Whether a grammar's masks come in time depends on the clock of their process, and drafts depend on that.
        free = [ask for ask in whole if ask.request.constraint is None and ask.request.gate.kind == "off"]
        fixed = [ask for ask in free if ask.request.mode.kind != "plain"]
        fixed.sort(key=lambda ask: -ask.seen.stats.cached_tokens)
        for ask in fixed[:DRAFTS_CHECKED]:
            alone = self._step_sizes(replace(ask.request, id="alone", cache_prompt=False))
            self.report.happened["drafts checked"] += 1
            if alone != ask.seen.step_sizes:
                self._note(ask, f"steps of {ask.seen.step_sizes} tokens, alone of {alone}")

    def _step_sizes(self, request: Request) -> list[int]:
        """How many tokens each step after the first adds to a request that runs alone."""
        self.engine.add(request)
        events = list[GenEvent]()
        while self.engine.has_work:
            events += self.engine.step()
        return [len(event.tokens) for event in events[1:]]

    def _questions(self) -> list[Question]:
        prompts = [self.world.prompt(self.rng) for _ in range(self.world.questions // 2)]
        questions = []
        for number in range(self.world.questions):
            # The second half are further questions about prompts that already exist.
            prompt, settings = prompts[number % len(prompts)], self._settings()
            alone = self.world.alone.request(prompt, mode="plain", cache_prompt=False, **settings)
            questions.append(Question(prompt, settings, self.world.alone.run([alone])[0]))
        return questions

    def _settings(self) -> dict[str, object]:
        """Everything except the prompt that decides a text."""
        rng, world = self.rng, self.world
        chosen: dict[str, object] = {
            "max_tokens": rng.randint(1, world.most_tokens),
            "seed": rng.randrange(2**40),
            "temperature": rng.choice((0.0, 0.0, 0.4, 0.9, 1.4)),
            "ignore_eos": rng.random() < 0.5,
        }
        now_and_then: dict[str, Callable[[], object]] = {
            "top_k": lambda: rng.choice((1, 4, 40)),
            "top_p": lambda: rng.choice((0.3, 0.8, 0.95)),
            "min_p": lambda: rng.choice((0.01, 0.2)),
            "repetition_penalty": lambda: rng.choice((0.9, 1.1, 1.5)),
            "presence_penalty": lambda: rng.choice((-0.5, 0.4, 2.0)),
            "logprobs": lambda: rng.choice((0, 1, 5)),
            "frequency_penalty": lambda: rng.choice((-0.3, 0.3, 1.0)),
            "stop": lambda: rng.choice(world.stops),
            "logit_bias": lambda: {token: rng.choice((-100.0, -3.0, 2.0, 6.0)) for token in world.some_tokens(rng)},
            "thinking": lambda: Thinking(rng.choice((0, 2, 7, None)), opened=rng.random() < 0.6),
        }
        if world.constraints:
            now_and_then["constraint"] = lambda: rng.choice(world.constraints)
        for name, choose in now_and_then.items():
            if rng.random() < 0.2:
                chosen[name] = choose()
        return chosen

    def _asks(self, questions: Sequence[Question]) -> list[Ask]:
        rng, asks = self.rng, []
        for number, question in enumerate(questions * ASKED):
            mode = Mode.parse(rng.choice(MODES if self.world.llm.has_draft else TEXT_MODES))
            gates = {"plain": ("off",), "auto": ("auto", "auto:explore=0.2")}.get(mode.kind, GATES)
            gate = Gate.parse(rng.choice(gates))
            if mode.seeded and gate.kind == "auto":
                gate = Gate("off")
            request = self.world.llm.request(
                question.prompt,
                mode=str(mode),
                gate=str(gate),
                share_noise=rng.random() < 0.8,
                cache_prompt=rng.random() < 0.85,
                draft_lora=rng.choice(self.world.llm.draft_variants or [BASE_VARIANT]),
                **question.settings,
            )
            request = replace(request, id=f"{number}", priority=rng.choice((0, 0, 0, 3, -3)))
            cancel_at = rng.randrange(self.world.most_tokens) if rng.random() < 0.12 else None
            asks.append(Ask(question, request, cancel_at))
        rng.shuffle(asks)
        return asks

    @contextmanager
    def _knowing_drafters(self, questions: Sequence[Question]) -> Iterator[None]:
        """Replaces some blocks of the random drafters by the right texts, because those are hardly ever right."""
        texts = [[*question.prompt, *question.answer.token_ids] for question in questions]
        replay = Replay(texts, self.world.vocabulary, self.rng.randrange(2**32))
        variants = self.engine.executor.variants

        def knowing(real: Callable[..., list[BlockDrafts | None]]) -> Callable[..., list[BlockDrafts | None]]:
            def draft(jobs: Sequence[DraftJob]) -> list[BlockDrafts | None]:
                return [
                    replay.block(job) if self.rng.random() < 0.6 and _is_known(job, texts) else block
                    for job, block in zip(jobs, real(jobs), strict=True)
                ]

            return draft

        with ExitStack() as stack:
            for name in variants.names:
                blocks = variants[name].drafter
                assert isinstance(blocks, BlockDrafter)
                stack.enter_context(patch.object(blocks, "draft", knowing(blocks.draft)))
            yield

    def _drive(self, coming: list[Ask]) -> None:
        for _ in range(MOST_STEPS):
            if not coming and not self.open:
                return
            while coming and len(self.open) < MOST_OPEN and self.rng.random() < 0.5:
                ask = coming.pop()
                self.engine.add(ask.request)
                self.open[ask.request.id] = ask
            self._disturb()
            for event in self.engine.step():
                self._take(event)
            self._look()
        raise AssertionError(f"{len(self.open)} requests never ended")

    def _disturb(self) -> None:
        """Pauses, resumes and cancels requests at random."""
        rng, engine = self.rng, self.engine
        paused = [ask for ask in self.open.values() if ask.paused]
        running = [ask for ask in self.open.values() if not ask.paused]
        if running and rng.random() < 0.15:
            ask = rng.choice(running)
            ask.paused, ask.pauses = engine.pause(ask.request.id), ask.pauses + 1
        if paused and (not running or rng.random() < 0.1):
            ask = rng.choice(paused)
            assert engine.resume(ask.request.id)
            ask.paused = False
            self.report.happened["resumed"] += 1
        for ask in self.open.values():
            if ask.cancel_at is not None and len(ask.seen.token_ids) >= ask.cancel_at:
                assert engine.cancel(ask.request.id)

    def _look(self) -> None:
        """Counts what has happened to the sequences, so that the report can show that it did."""
        scheduler = self.engine.scheduler
        lost = {(t.request.id, self.open[t.request.id].pauses) for t in scheduler.paused if t.phase == "paused-evicted"}
        yielded = {t.request.id for t in scheduler.waiting if t.phase == "yielded"}
        self.report.happened["pages lost"] += len(lost - self._lost)
        self.report.happened["yielded"] += len(yielded - self._yielded)
        self._lost, self._yielded = lost, yielded

    def _take(self, event: GenEvent) -> None:
        ask, happened = self.open[event.request_id], self.report.happened
        if ask.seen.tokens:
            ask.seen.step_sizes.append(len(event.tokens))
        ask.seen.text += event.text
        ask.seen.tokens += event.tokens
        ask.seen.token_ids += [token.id for token in event.tokens]
        happened["branching"] += event.step is not None and event.step.proposal.branching
        if event.finish_reason is None:
            return
        ask.seen.finish_reason, ask.seen.error = event.finish_reason, event.error
        del self.open[event.request_id]
        self.report.texts += 1
        happened[event.finish_reason] += 1
        if event.stats is not None:
            ask.seen.stats = event.stats
            happened["accepted"] += event.stats.accepted
            happened["accepted from the text"] += event.stats.accepted - event.stats.accepted_by_source["drafter"]
            happened["cached_tokens"] += event.stats.cached_tokens
            happened["adapters"] += ask.request.draft_lora != BASE_VARIANT and event.stats.drafted > 0
        found = difference(ask)
        if found is not None:
            self._note(ask, found)

    def _note(self, ask: Ask, found: str) -> None:
        self.report.different.append(f"{self.command}\n  {ask.request}\n  {found}")


def _is_known(job: DraftJob, texts: Sequence[Sequence[int]]) -> bool:
    return any(list(text[: len(job.state.tokens)]) == job.state.tokens for text in texts)


def difference(ask: Ask) -> str | None:
    """How an answer differs from the answer of the same question alone; None if it does not."""
    seen, alone = ask.seen, ask.question.answer
    if seen.finish_reason == "cancelled":
        length = len(seen.token_ids)
        if not alone.text.startswith(seen.text):
            return f"cancelled with {seen.text!r}, which does not begin {alone.text!r}"
        alone = replace(alone, token_ids=alone.token_ids[:length], tokens=alone.tokens[:length])
    elif (seen.text, seen.finish_reason, seen.error) != (alone.text, alone.finish_reason, alone.error):
        return f"ended as {_end(seen)}, alone as {_end(alone)}"
    if seen.token_ids != alone.token_ids:
        return f"tokens {seen.token_ids}, alone {alone.token_ids}"
    chances, expected = ([(token.logprob, token.top_logprobs) for token in one.tokens] for one in (seen, alone))
    return None if chances == expected else f"log-probabilities {chances}, alone {expected}"


def _end(seen: Completion) -> str:
    return f"{seen.finish_reason} {seen.text!r}" + (f" ({seen.error})" if seen.error else "")


def run_world(name: str, texts: int, seed: int, device: str = "cpu", processes: int = 1, part: int = 0) -> Report:
    """Runs episodes until there are `texts` texts; of several processes, each takes its own seeds."""
    report, began = Report(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, keep_threads():
        world = open_world(name, Path(folder), device)
        torch.set_num_threads(1)
        while report.texts < texts:
            episode = Episode(world, seed + part)
            try:
                episode.run()
            except Exception:  # a failing engine ends all its requests, and the next episode has a new engine
                episode.report.different.append(f"{episode.command}\n{traceback.format_exc()}")
                episode.report.texts += len(episode.open)
            report.add(episode.report)
            part += processes
    report.cpu_seconds = time.process_time() - began
    return report


def _part(shares: dict[str, int], seed: int, device: str, processes: int, part: int) -> dict[str, Report]:
    """Runs in its own process, which keeps to one core because native threads are pinned from the first core on."""
    cores = sorted(os.sched_getaffinity(0))
    if processes > 1:
        os.sched_setaffinity(0, {cores[part % len(cores)]})
    return {name: run_world(name, share, seed, device, processes, part) for name, share in shares.items()}


def run(worlds: Sequence[str], texts: int, seed: int, device: str, processes: int) -> dict[str, Report]:
    """Divides the texts among the worlds and the processes, each of which has one thread."""
    each = texts / processes / sum(WORLDS[name].share for name in worlds)
    shares = {name: max(1, round(each * WORLDS[name].share)) for name in worlds}
    works = [(shares, seed, device, processes, part) for part in range(processes)]
    reports = {name: Report() for name in worlds}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for found in pool.starmap(_part, works, chunksize=1):
            for name, report in found.items():
                reports[name].add(report)
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first episode; the others follow it")
    parser.add_argument("--texts", type=int, default=1000, help="at least so many in all")
    parser.add_argument("--world", choices=sorted(WORLDS), action="append", help="only these models (default: all)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    began = time.monotonic()
    reports = run(chosen.world or worlds_on(chosen.device), chosen.texts, chosen.seed, chosen.device, chosen.processes)
    print(f"{sum(report.texts for report in reports.values())} texts in {time.monotonic() - began:.0f} s")
    for name, report in reports.items():
        print(f"{name}: {report.row()}")
        for found in report.different[:5]:
            print(found)
        if not report.happened["accepted"]:
            print(f"{name}: no drafted token was accepted, so equal texts prove nothing")
    return 0 if all(report.ok for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
