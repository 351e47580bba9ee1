"""Measures several modes of decoding on the same prompts, interleaved in one run so that the machine treats all alike.

Every request runs alone and without the prompt cache, so that no mode profits from what another mode left behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.bench.intervals import Sample, ratio, ratio_interval
from slipstream.bench.workloads import Conversation
from slipstream.errors import RequestError, SlipstreamError
from slipstream.stats import RequestStats
from slipstream.types import FinishReason, Gate, GenEvent, Mode, Request, SamplingParams, StepRecord, TokenOut

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

Message = dict[str, str]
PLAIN, AUTO = "plain", "auto"
_WARM_UP = "Say hello."
_WARM_UP_TOKENS = 8


def parse_modes(names: str) -> tuple[str, ...]:
    """The modes of a comma-separated list, each once; plain decoding, the reference, is first."""
    found = [str(Mode.parse(name.strip())) for name in names.split(",")]
    return tuple(dict.fromkeys([PLAIN, *found]))


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is measured: how many tokens and turns, how tokens are chosen, and which modes take part."""

    max_tokens: int = 256
    all_turns: bool = False
    temperature: float = 0.0
    seed: int = 0
    modes: tuple[str, ...] = (PLAIN, AUTO)
    gate: str | None = None  # applies to the modes that are neither plain nor auto
    min_confidence: float | None = None  # applies to all modes but plain
    draft_lora: str | None = None  # the drafter's variant in all modes but plain

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise RequestError(f"max_tokens is {self.max_tokens}", "decoding speed needs at least 2 tokens")
        if set(self.modes) == {PLAIN}:
            raise RequestError("plain decoding is already the reference", "name a mode to compare with it")
        if self.gate is not None and set(self.modes) <= {PLAIN, AUTO}:
            raise RequestError(f"no mode takes the gate '{self.gate}'", "compare chain or tree:ROWS too")
        for mode in self.modes:
            # The engine would refuse bad settings too, but only after a model was loaded in vain.
            settings = self.settings(mode)
            gate = Gate.parse(str(settings.get("gate", "auto" if mode == AUTO else "off")))
            confidence = settings.get("min_confidence", 0.0)
            Request("check", (0,), mode=Mode.parse(mode), gate=gate, min_confidence=confidence)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, object]:
        return {
            "turns": "all" if self.all_turns else "first",
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "gate": self.gate,
            "min_confidence": self.min_confidence,
        }

    def settings(self, mode: str) -> dict[str, object]:
        """The settings of a request in this mode, which takes nothing from the prompt cache."""
        settings = {
            "temperature": self.temperature,
            "seed": self.seed,
            "cache_prompt": False,
            "mode": mode,
            "gate": None if mode in (PLAIN, AUTO) else self.gate,
            "min_confidence": None if mode == PLAIN else self.min_confidence,
            "draft_lora": None if mode == PLAIN else self.draft_lora,
        }
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AnswerEvents:
    """The events of one answer so far."""

    events: list[GenEvent] = field(default_factory=list)

    def follow(self, stream: Iterable[GenEvent]) -> Iterator[GenEvent]:
        """Keeps the events of a stream and passes them on; an engine's error is raised."""
        for event in stream:
            if event.error:
                raise SlipstreamError(event.error)
            self.events.append(event)
            yield event

    @property
    def tokens(self) -> list[TokenOut]:
        return [token for event in self.events for token in event.tokens]

    @property
    def texts(self) -> list[str]:
        """The characters that became certain with each token."""
        return [text for event in self.events for text in event.texts]

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def steps(self) -> list[StepRecord]:
        return [event.step for event in self.events if event.step]

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended; one whose stream was left early counts as cancelled."""
        return (self.events[-1].finish_reason if self.events else None) or "cancelled"

    @property
    def stats(self) -> RequestStats:
        """The numbers of a finished answer; zeros before its end."""
        return (self.events[-1].stats if self.events else None) or RequestStats()

    def to_json(self, **more: object) -> dict[str, object]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            **more,
            "stats": None if self.finish_reason == "cancelled" else self.stats.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Turn:
    """The answers of all modes to one turn of one conversation."""

    prompt: int  # the number of the conversation
    history: list[Message]
    answers: dict[str, AnswerEvents]

    @property
    def question(self) -> str:
        return self.history[-1]["content"]

    def same(self, mode: str) -> bool:
        return self.answers[mode].token_ids == self.answers[PLAIN].token_ids


@dataclass(slots=True)
class ModeRun:
    """The sums of one mode over all prompts."""

    stats: RequestStats = field(default_factory=RequestStats)
    token_ids: list[list[int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # per prompt: tokens and milliseconds of all its turns
    steps: list[Sample] = field(default_factory=list)  # per prompt: tokens and verify steps of all its turns
    same: int = 0
    near_ties: int = 0

    def add(self, prompt: int, stats: RequestStats, token_ids: list[int]) -> None:
        self.stats.add(stats)
        self.token_ids.append(token_ids)
        for samples, cost in ((self.samples, stats.decode_ms), (self.steps, stats.steps)):
            if prompt == len(samples):
                samples.append((0, 0.0))
            tokens, before = samples[prompt]
            samples[prompt] = (tokens + stats.committed, before + cost)

    @property
    def text_hash(self) -> str:
        """One hash over the token ids of all answers, with one line per answer."""
        lines = "".join(",".join(map(str, ids)) + "\n" for ids in self.token_ids)
        return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Ratio:
    """One measured value (speed, tau or speed-up) over another, with its 95 % interval if there are enough prompts."""

    over: str
    value: float
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, over: str, *sides: Sequence[Sample], least_prompts: int = 0) -> Ratio | None:
        """Compares sides as `intervals.ratio` does; None if nothing was decoded.

        The interval is left out if there are fewer than `least_prompts` prompts.
        """
        value = ratio(*sides)
        interval = ratio_interval(*sides) if len(sides[0]) >= least_prompts else None
        return None if value is None else cls(over, value, interval)

    @property
    def verdict(self) -> str:
        """Whether the difference is "real", because its interval does not contain equality, or "within noise"."""
        if self.interval is None:
            return "too few prompts"
        low, high = self.interval
        return "within noise" if low <= 1 <= high else "real"

    def to_json(self, over: str = "over") -> dict[str, object]:
        return {over: self.over, "ratio": round(self.value, 4), "interval": _rounded(self.interval)}


@dataclass(slots=True)
class Comparison:
    """The result of a measurement: one run per mode over the same questions."""

    modes: dict[str, ModeRun]
    answers: int = 0

    @property
    def plain(self) -> ModeRun:
        return self.modes[PLAIN]

    @property
    def speculative(self) -> dict[str, ModeRun]:
        return {name: run for name, run in self.modes.items() if name != PLAIN}

    def speedup(self, mode: str, over: str = PLAIN) -> Ratio | None:
        """Decoding speed of one mode over another's, without prefill; None if nothing was decoded."""
        return Ratio.of(over, self.modes[mode].samples, self.modes[over].samples)

    def best_fixed(self) -> str:
        """The fastest mode except auto; plain decoding takes part."""
        fixed = {name: run.stats.tokens_per_second for name, run in self.modes.items() if name != AUTO}
        return max(fixed, key=fixed.__getitem__)

    def auto_against_best(self) -> Ratio | None:
        return self.speedup(AUTO, self.best_fixed()) if AUTO in self.modes else None

    def to_json(self) -> dict[str, object]:
        return {"modes": {name: self._mode_json(name) for name in self.modes}}

    def _mode_json(self, name: str) -> dict[str, object]:
        run, speedup = self.modes[name], self.speedup(name)
        result: dict[str, object] = {
            **run.stats.to_json(),
            "speedup": None if speedup is None else round(speedup.value, 4),
            "speedup_interval": None if speedup is None else _rounded(speedup.interval),
            "identical": {"same": run.same, "of": self.answers, "near_ties": run.near_ties},
            "text_hash": run.text_hash,
        }
        if name == AUTO:
            against = self.auto_against_best()
            result["vs_best"] = None if against is None else against.to_json("mode")
        return result


def _rounded(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [round(end, 4) for end in interval]


def compare(
    llm: LLM,
    target: str,
    conversations: Sequence[Conversation],
    plan: BenchPlan,
    on_turn: Callable[[Turn], None] = lambda turn: None,
) -> Comparison:
    """Decodes every prompt in every mode; `on_turn` gets the answers of all modes to each turn as they come."""
    if not llm.speculates:
        raise RequestError(f"{target} has nothing to draft with", "name a drafter, or suffix, with --draft")
    result = Comparison({mode: ModeRun() for mode in plan.modes})
    for turn in play(llm, conversations, plan):
        result.answers += 1
        for mode, answer in turn.answers.items():
            run, same = result.modes[mode], turn.same(mode)
            run.add(turn.prompt, answer.stats, answer.token_ids)
            run.same += same
            run.near_ties += not same and _is_near_tie(llm, turn, mode, plan)
        on_turn(turn)
    return result


def turns_of(conversations: Sequence[Conversation], plan: BenchPlan) -> int:
    """How many turns each mode answers in a run."""
    return sum(len(conversation) if plan.all_turns else 1 for conversation in conversations)


def play(
    llm: LLM,
    conversations: Sequence[Conversation],
    plan: BenchPlan,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Turn]:
    """Decodes every turn in every mode, after a question that warms each mode up; `around(mode)` encloses each answer.

    Every mode continues with plain decoding's answer, so that prompts stay equal.
    """
    for mode in plan.modes:
        _answer(llm, [{"role": "user", "content": _WARM_UP}], plan, mode, _WARM_UP_TOKENS)
    for index, conversation in enumerate(conversations):
        # The first mode changes from prompt to prompt, because a machine that warms up or slows down favours a place.
        first = index % len(plan.modes)
        history: list[Message] = []
        for question in conversation if plan.all_turns else conversation[:1]:
            history.append({"role": "user", "content": question})
            answers = {}
            for mode in (*plan.modes[first:], *plan.modes[:first]):
                with around(mode):
                    answers[mode] = _answer(llm, history, plan, mode, plan.max_tokens)
            yield Turn(index, list(history), answers)
            history.append({"role": "assistant", "content": answers[PLAIN].text})


def _answer(llm: LLM, history: list[Message], plan: BenchPlan, mode: str, max_tokens: int) -> AnswerEvents:
    """Decodes one answer in one mode, alone and without the prompt cache; an engine's error is raised."""
    answer = AnswerEvents()
    for _ in answer.follow(llm.stream(history, chat=True, max_tokens=max_tokens, **plan.settings(mode))):
        pass
    return answer


def _is_near_tie(llm: LLM, turn: Turn, mode: str, plan: BenchPlan) -> bool:
    # The check is imported here, because texts hardly ever differ.
    from slipstream.tools.near_tie import explain_difference

    about = llm.describe()
    return explain_difference(
        llm.target_source.path,
        llm.prompt_ids(turn.history, chat=True),
        turn.answers[PLAIN].token_ids,
        turn.answers[mode].token_ids,
        SamplingParams(temperature=plan.temperature, seed=plan.seed),
        str(about["weight_format"]),
        bool(about["exact"]),
    ).is_near_tie
