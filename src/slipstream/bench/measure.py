"""Plain decoding against speculation on the same prompts, interleaved in one run so that both meet the same machine.

Every request runs alone and without the prompt cache: neither side may profit from what the other left behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.bench.workloads import Conversation
from slipstream.errors import RequestError, SlipstreamError
from slipstream.types import Mode, RequestStats, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM, Completion

Message = dict[str, str]
_WARM_UP = "Say hello."
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: how many tokens, which turns, how tokens are chosen, and how speculation runs."""

    max_tokens: int = 256
    all_turns: bool = False
    temperature: float = 0.0
    seed: int = 0
    mode: str = "chain"

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise RequestError(f"max_tokens is {self.max_tokens}", "decoding speed needs at least 2 tokens")
        if Mode.parse(self.mode).kind == "plain":
            raise RequestError("plain decoding is one side already", "choose how the other side speculates")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed)


@dataclass(slots=True)
class Side:
    """One way of decoding, summed over all prompts."""

    stats: RequestStats = field(default_factory=RequestStats)
    texts: list[list[int]] = field(default_factory=list)

    def add(self, done: Completion) -> None:
        self.stats.add(done.stats)
        self.texts.append(done.token_ids)

    @property
    def text_hash(self) -> str:
        """One hash over the token ids of all answers, a line each."""
        lines = "".join(",".join(map(str, ids)) + "\n" for ids in self.texts)
        return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Pair:
    """Both answers to one turn of one conversation."""

    question: str
    plain: Completion
    speculative: Completion

    @property
    def same(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids


@dataclass(slots=True)
class Comparison:
    """The result of a run."""

    plain: Side = field(default_factory=Side)
    speculative: Side = field(default_factory=Side)
    answers: int = 0
    same: int = 0
    near_ties: int = 0

    @property
    def speedup(self) -> float | None:
        """Decoding speed of speculation over plain decoding, prefill left out; None if nothing was decoded."""
        plain, speculative = self.plain.stats.tokens_per_second, self.speculative.stats.tokens_per_second
        return speculative / plain if plain and speculative else None

    def to_json(self) -> dict[str, object]:
        return {
            "plain": self.plain.stats.to_json(),
            "speculative": self.speculative.stats.to_json(),
            "speedup": None if self.speedup is None else round(self.speedup, 4),
            "identical": {"same": self.same, "of": self.answers, "near_ties": self.near_ties},
            "text_hash": {"plain": self.plain.text_hash, "speculative": self.speculative.text_hash},
        }


def compare(
    llm: LLM,
    target: str,
    conversations: Sequence[Conversation],
    plan: Plan,
    on_pair: Callable[[Pair], None] = lambda pair: None,
) -> Comparison:
    """Decodes every prompt both ways; `on_pair` sees each pair of answers as it comes."""
    if not llm.has_draft:
        raise RequestError(f"{target} has no drafter to measure", "name one with --draft")
    for mode in ("plain", plan.mode):
        # The first request of a kind pays for one-off work that is no part of decoding.
        _answer(llm, [_user(_WARM_UP)], Plan(max_tokens=_WARM_UP_TOKENS, mode=plan.mode), mode)
    result = Comparison()
    for index, conversation in enumerate(conversations):
        # Taking turns at going first cancels what a warming or throttling machine does to whoever comes second.
        for history, pair in _play(llm, conversation, plan, plain_first=index % 2 == 0):
            result.plain.add(pair.plain)
            result.speculative.add(pair.speculative)
            result.answers += 1
            result.same += pair.same
            result.near_ties += not pair.same and _is_near_tie(llm, history, pair, plan)
            on_pair(pair)
    return result


def fastest_mode(llm: LLM, conversation: Conversation, modes: Sequence[str], max_tokens: int) -> str:
    """The mode that decodes this prompt fastest here: which verify width pays is a property of the machine."""
    _answer(llm, [_user(_WARM_UP)], Plan(max_tokens=_WARM_UP_TOKENS), modes[0])
    plan = Plan(max_tokens=max_tokens)
    speeds = {mode: _answer(llm, [_user(conversation[0])], plan, mode).stats.tokens_per_second for mode in modes}
    return max(speeds, key=speeds.__getitem__)


def turns_of(conversations: Sequence[Conversation], plan: Plan) -> int:
    """How many pairs of answers a run makes."""
    return sum(len(conversation) if plan.all_turns else 1 for conversation in conversations)


def _play(
    llm: LLM, conversation: Conversation, plan: Plan, plain_first: bool
) -> Iterator[tuple[list[Message], Pair]]:
    """Each turn's history and both answers. Plain decoding's answer goes on in both histories: prompts stay equal."""
    history: list[Message] = []
    for question in conversation if plan.all_turns else conversation[:1]:
        history.append(_user(question))
        modes = ("plain", plan.mode) if plain_first else (plan.mode, "plain")
        answers = {mode: _answer(llm, history, plan, mode) for mode in modes}
        yield list(history), Pair(question, answers["plain"], answers[plan.mode])
        history.append({"role": "assistant", "content": answers["plain"].text})


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(llm: LLM, history: list[Message], plan: Plan, mode: str) -> Completion:
    done = llm.chat(
        history, max_tokens=plan.max_tokens, temperature=plan.temperature, seed=plan.seed, mode=mode, cache_prompt=False
    )
    if done.finish_reason == "error":
        raise SlipstreamError(f"the engine ended a request in mode {mode} with an error")
    return done


def _is_near_tie(llm: LLM, history: list[Message], pair: Pair, plan: Plan) -> bool:
    # Imported here: texts hardly ever differ.
    from slipstream.tools.near_tie import explain_difference

    about = llm.describe()
    tie = explain_difference(
        llm.target_source.path,
        llm.prompt_ids(history, chat=True),
        pair.plain.token_ids,
        pair.speculative.token_ids,
        plan.sampling,
        str(about["weight_format"]),
        bool(about["exact"]),
    )
    return tie.is_near_tie
