"""Races plain decoding, speculation and llama.cpp on the same prompts, one side after the other for each prompt.

All sides get the same token ids and write as many tokens as our plain answer has, because text after a model's end
token is not what users decode. Prompt processing is left out of the decoding speeds on all sides and compared on its
own.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.bench.intervals import ratio_interval
from slipstream.bench.measure import PLAIN, BenchPlan, Comparison, ModeRun, Ratio
from slipstream.bench.rival import NAME, SETTLE_SECONDS, Rival, machine_seconds, process_seconds
from slipstream.bench.workloads import PUBLIC, Conversation, read_prompts
from slipstream.errors import RequestError, SlipstreamError
from slipstream.stats import RequestStats

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM, Completion

PREFILL_TOKENS = 512  # length of the prompt whose processing is compared
PREFILL_ROUNDS = 5  # how often it is processed by each side; a single slow round then does not move the median
_WARM_UP_TOKENS = 8
_LEAST_TOKENS = 2  # The first token comes with the prompt, so a shorter answer has no decoding speed.


def _both_sides() -> dict[str, float]:
    return {"ours": 0.0, NAME: 0.0}


@dataclass(slots=True)
class Watch:
    """Processor time that each side used during the other side's turns, and that other processes used all the time.

    Times that the system does not tell are NaN, and so are the shares that depend on them.
    """

    rival: Rival
    turns_s: dict[str, float] = field(default_factory=_both_sides)
    stolen_s: dict[str, float] = field(default_factory=_both_sides)
    others_s: float = 0.0

    @contextmanager
    def turn(self, whose: str) -> Iterator[None]:
        """Runs one side's turn, after a pause in which the other side's threads fall asleep."""
        time.sleep(SETTLE_SECONDS)
        before = self._clocks()
        yield
        wall, machine, *used = (now - then for now, then in zip(self._clocks(), before, strict=True))
        self.turns_s[whose] += wall
        self.stolen_s[_other(whose)] += used[whose == "ours"]
        self.others_s += machine - sum(used)

    def _clocks(self) -> tuple[float, float, float, float]:
        """Seconds so far: of the clock, and of processor time for the whole machine, for us and for the rival."""
        return time.perf_counter(), machine_seconds(), process_seconds(os.getpid()), self.rival.cpu_seconds()

    def share(self, side: str) -> float:
        """The share of a core that `side` kept busy during the other side's turns."""
        turns = self.turns_s[_other(side)]
        return self.stolen_s[side] / turns if turns else math.nan

    def others(self) -> float:
        """The cores that other processes kept busy meanwhile; above a tenth of a core, speeds mean little."""
        turns = sum(self.turns_s.values())
        # In this order `max` keeps NaN.
        return max(self.others_s / turns, 0.0) if turns else math.nan

    def to_json(self) -> dict[str, object]:
        shares = {"ours": self.share("ours"), NAME: self.share(NAME), "others": self.others()}
        return {side: None if math.isnan(share) else round(share, 5) for side, share in shares.items()}


def _other(side: str) -> str:
    return "ours" if side == NAME else NAME


@dataclass(slots=True)
class Race(Comparison):
    """A comparison in which llama.cpp takes part like one more mode."""

    watch: Watch | None = None
    same: int = 0  # prompts whose texts in all modes of ours equal plain decoding's

    def median_speed(self, side: str) -> float:
        """The median of the prompts' decoding speeds, in tokens per second."""
        speeds = [1000 * tokens / ms for tokens, ms in self.modes[side].samples if ms > 0]
        return statistics.median(speeds) if speeds else 0.0

    def tau(self, side: str) -> float | None:
        """Tau of a speculative mode; None for another side, or if nothing was decoded."""
        stats = self.modes[side].stats
        return stats.tau if side not in (PLAIN, NAME) and stats.steps else None

    def ratios(self) -> list[tuple[str, Ratio]]:
        """Every mode of ours over llama.cpp, and every speculative mode over plain decoding."""
        ours = [side for side in self.modes if side != NAME]
        pairs = [(side, NAME) for side in ours] + [(side, PLAIN) for side in ours if side != PLAIN]
        return [(side, found) for side, over in pairs if (found := self.speedup(side, over)) is not None]

    def to_json(self) -> dict[str, object]:
        return {
            "sides": {side: self._side_json(side) for side in self.modes},
            "ratios": [{"side": side, **found.to_json()} for side, found in self.ratios()],
            "same_texts": {"same": self.same, "of": self.answers},
            "idle_core_share": None if self.watch is None else self.watch.to_json(),
        }

    def _side_json(self, side: str) -> dict[str, object]:
        stats, tau = self.modes[side].stats, self.tau(side)
        return {
            "median_tokens_per_second": round(self.median_speed(side), 3),
            "tokens": stats.committed,
            "decode_ms": round(stats.decode_ms, 3),
            **({} if tau is None else {"tau": round(tau, 4)}),
        }


def race(
    llm: LLM,
    rival: Rival,
    conversations: Sequence[Conversation],
    plan: BenchPlan,
    on_prompt: Callable[[], None] = lambda: None,
) -> Race:
    """Runs the first turn of every conversation on every side; the side that goes first changes with each prompt."""
    sides = (*plan.modes, NAME)
    watch = Watch(rival)
    result = Race({side: ModeRun() for side in sides}, watch=watch)
    for side in sides:
        _run_side(llm, rival, side, llm.prompt_ids("Say hello.", chat=True), plan, _WARM_UP_TOKENS)
    for index, conversation in enumerate(conversations):
        ids = llm.prompt_ids(conversation[0], chat=True)
        length = max(_LEAST_TOKENS, len(_answer(llm, ids, plan, PLAIN, plan.max_tokens, ignore_eos=False).token_ids))
        for side in (*sides[index % len(sides) :], *sides[: index % len(sides)]):
            with watch.turn(NAME if side == NAME else "ours"):
                stats, text = _run_side(llm, rival, side, ids, plan, length)
            result.modes[side].add(index, stats, text)
        result.answers += 1
        result.same += len({tuple(result.modes[mode].token_ids[index]) for mode in plan.modes}) == 1
        on_prompt()
    return result


def _run_side(
    llm: LLM, rival: Rival, side: str, ids: Sequence[int], plan: BenchPlan, max_tokens: int
) -> tuple[RequestStats, list[int]]:
    """Runs one answer on one side; returns its numbers and its token ids, which are empty for llama.cpp."""
    if side == NAME:
        return rival.complete(ids, max_tokens, plan.temperature, plan.seed), []
    completion = _answer(llm, ids, plan, side, max_tokens, ignore_eos=True)
    return completion.stats, completion.token_ids


def _answer(llm: LLM, ids: Sequence[int], plan: BenchPlan, mode: str, max_tokens: int, ignore_eos: bool) -> Completion:
    request = llm.request(ids, max_tokens=max_tokens, ignore_eos=ignore_eos, **plan.settings(mode))
    completion = llm.run([request])[0]
    if completion.error:
        raise SlipstreamError(completion.error)
    return completion


def context_needed(llm: LLM, conversations: Sequence[Conversation], plan: BenchPlan) -> int:
    """Tokens that llama.cpp must hold for the longest answer and for the comparison of prompt speeds."""
    longest = max(len(llm.prompt_ids(conversation[0], chat=True)) for conversation in conversations)
    return max(longest + plan.max_tokens, PREFILL_TOKENS) + 64


@dataclass(frozen=True, slots=True)
class PrefillRace:
    """The milliseconds of both sides for the same prompt, per round."""

    tokens: int
    ours_ms: list[float]
    rival_ms: list[float]

    @property
    def ours_per_second(self) -> float:
        return 1000 * self.tokens / statistics.median(self.ours_ms)

    @property
    def rival_per_second(self) -> float:
        return 1000 * self.tokens / statistics.median(self.rival_ms)

    @property
    def against(self) -> Ratio:
        sides = ([(self.tokens, ms) for ms in times] for times in (self.ours_ms, self.rival_ms))
        return Ratio(NAME, self.ours_per_second / self.rival_per_second, ratio_interval(*sides))

    def to_json(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "ours_per_second": round(self.ours_per_second, 2),
            "rival_per_second": round(self.rival_per_second, 2),
            "side": "ours",
            **self.against.to_json(),
        }


def race_prefill(llm: LLM, rival: Rival, tokens: int = PREFILL_TOKENS, rounds: int = PREFILL_ROUNDS) -> PrefillRace:
    """Lets both sides process the same text; ours is timed to the first token, llama.cpp's by its own clock."""
    ids = prose_ids(llm, tokens)
    watch = Watch(rival)
    result = PrefillRace(tokens, [], [])
    for round_ in range(rounds + 1):
        request = llm.request(ids, max_tokens=1, temperature=0.0, ignore_eos=True, cache_prompt=False, mode=PLAIN)
        with watch.turn("ours"):
            mine = llm.run([request])[0].stats.ttft_ms
        with watch.turn(NAME):
            answer = rival.complete(ids, 1)
        if answer.prompt_tokens != tokens:
            raise SlipstreamError(f"{NAME} processed {answer.prompt_tokens} prompt tokens of {tokens}")
        if round_:  # the first round warms both up
            result.ours_ms.append(mine)
            result.rival_ms.append(answer.ttft_ms)
    return result


def prose_ids(llm: LLM, count: int) -> list[int]:
    """The first `count` tokens of the public prompts, joined by blank lines, set after set."""
    ids: list[int] = []
    for name in PUBLIC:
        text = "\n\n".join(turn for conversation in read_prompts(name) for turn in conversation)
        ids += llm.prompt_ids(text + "\n\n")
        if len(ids) >= count:
            return ids[:count]
    raise RequestError(f"the public prompts hold {len(ids)} tokens, not {count}", "ask for fewer")
