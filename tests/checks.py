"""Checks of the promises about text and acceptance at any size: `make test` runs a sample, `make verify` runs all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from slipstream.bench.workloads import PUBLIC, read_prompts
from slipstream.config import PAGE_TOKENS, EngineConfig, WeightFormat
from slipstream.engine.llm import LLM, Completion
from slipstream.stats import RequestStats
from slipstream.tools.near_tie import explain_difference
from slipstream.types import Request

GREEDY: dict[str, object] = {}
SAMPLED: dict[str, object] = {"temperature": 0.8, "seed": 7}
EVERYTHING: dict[str, object] = {
    "temperature": 0.8,
    "seed": 11,
    "top_p": 0.95,
    "top_k": 200,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logprobs": 3,
}
GREEDY_PENALISED: dict[str, object] = {"repetition_penalty": 1.2, "frequency_penalty": 0.1}


@cache
def real_pair(
    weight_format: WeightFormat = "auto", prefill_chunk: int = 256, threads: int = 0, draft: str = "auto"
) -> LLM:
    """The default pair, loaded once per setting; its engine checks itself after every step."""
    return LLM(
        "smollm2",
        draft,
        config=EngineConfig(
            weight_format=weight_format, prefill_chunk=prefill_chunk, threads=threads, check_integrity=True
        ),
    )


def eval_prompts(count: int) -> list[str]:
    """First turns of the evaluation sets, taken from each set in turn, so that any count has some of each."""
    sets = [[turns[0] for turns in read_prompts(name)] for name in PUBLIC]
    mixed = [group[i] for i in range(max(map(len, sets))) for group in sets if i < len(group)]
    return mixed[:count]


@dataclass(slots=True)
class Identity:
    """Texts compared with and without speculation, and the statistics of speculation."""

    same: int = 0
    of: int = 0
    near_ties: int = 0
    tokens: int = 0
    plain: RequestStats = field(default_factory=RequestStats)
    speculative: RequestStats = field(default_factory=RequestStats)

    @property
    def ok(self) -> bool:
        """Whether all texts are equal except for proven near-ties (under one in 20,000 tokens), and drafts accepted."""
        allowed = self.tokens / 20_000
        explained = self.same + self.near_ties == self.of
        return explained and self.near_ties <= allowed and self.speculative.accepted > 0.5 * self.of

    def row(self) -> str:
        return (
            f"{self.same}/{self.of} same, {self.near_ties} near-ties, {self.tokens} tokens, "
            f"drafted {self.speculative.drafted}, accepted {self.speculative.accepted}, tau {self.speculative.tau:.2f}"
        )


def compare_pairs(llm: LLM, pairs: Iterable[tuple[Request, Completion, Completion]]) -> Identity:
    """Counts equal texts (with their log-probabilities if requested), and checks whether the others are near-ties."""
    result = Identity()
    for request, plain, speculative in pairs:
        result.of += 1
        result.tokens += len(plain.token_ids)
        result.plain.add(plain.stats)
        result.speculative.add(speculative.stats)
        if plain.token_ids == speculative.token_ids:
            ours = [(t.logprob, t.top_logprobs) for t in plain.tokens]
            same_logprobs = not llm.exact or ours == [(t.logprob, t.top_logprobs) for t in speculative.tokens]
            result.same += plain.text == speculative.text and same_logprobs
        else:
            tie = explain_difference(
                llm.target_source.path,
                request.prompt_ids,
                plain.token_ids,
                speculative.token_ids,
                request.sampling,
                str(llm.describe()["weight_format"]),
                llm.exact,
            )
            result.near_ties += tie.is_near_tie
    return result


def identity(
    llm: LLM, prompts: Sequence[str], tokens: int, settings: dict[str, object], mode: str = "chain", batch: int = 1
) -> Identity:
    """Runs every prompt with and without speculation, `batch` at a time and without the prompt cache."""
    ids = [llm.prompt_ids(prompt, chat=True) for prompt in prompts]
    return ids_identity(llm, ids, {"max_tokens": tokens, **settings}, mode, batch)


MIXED: tuple[tuple[str, dict[str, object]], ...] = (
    ("auto", {"max_tokens": 1.0}),
    ("tree:32", {"max_tokens": 0.75, "temperature": 0.8, "seed": 3}),
    ("chain:8", {"max_tokens": 1.0, "temperature": 1.0, "seed": 5, "top_p": 0.9}),
    ("plain", {"max_tokens": 0.5}),
    ("tree:8", {"max_tokens": 0.25, "repetition_penalty": 1.2}),
    ("tree:16:seed", {"max_tokens": 1.0, "temperature": 0.6, "seed": 9, "logprobs": 2}),
    ("auto", {"max_tokens": 0.6, "temperature": 0.9, "seed": 4, "min_p": 0.05}),
    ("chain", {"max_tokens": 0.4, "stop": ("\n\n",)}),
)


def mixed_batches(llm: LLM, prompts: Sequence[str], tokens: int) -> Identity:
    """Runs eight requests with different settings at once, and compares each with the same request alone and plain."""
    pairs: list[tuple[Request, Completion, Completion]] = []
    for start in range(0, len(prompts), len(MIXED)):
        alone, together = [], []
        for prompt, (mode, changes) in zip(prompts[start : start + len(MIXED)], MIXED, strict=False):
            settings = {**changes, "max_tokens": max(2, int(tokens * float(str(changes["max_tokens"]))))}
            ids = llm.prompt_ids(prompt, chat=True)
            alone.append(llm.request(ids, mode="plain", cache_prompt=False, **settings))
            together.append(llm.request(ids, mode=mode, cache_prompt=False, **settings))
        plain = [llm.run([request])[0] for request in alone]
        pairs += zip(alone, plain, llm.run(together), strict=True)
    return compare_pairs(llm, pairs)


@dataclass(slots=True)
class HitReport:
    """The same prompts without cache and after a prefix hit, both speculative, and the plain text beside them."""

    texts: Identity
    cold: RequestStats
    warm: RequestStats
    cached_share: float

    @property
    def tau_ratio(self) -> float:
        return self.warm.tau / self.cold.tau


def prefix_hits(
    llm: LLM, prompts: Sequence[str], tokens: int, settings: dict[str, object], batch: int = 1
) -> HitReport:
    """Runs each prompt twice with the prompt cache; the second run must hit the cache and accept as much."""
    assert llm.engine.prefix is not None
    cold, warm = RequestStats(), RequestStats()
    pairs: list[tuple[Request, Completion, Completion]] = []
    for start in range(0, len(prompts), batch):
        llm.engine.prefix.clear()
        group = [_padded(llm, prompt) for prompt in prompts[start : start + batch]]
        plain = [llm.request(ids, mode="plain", max_tokens=tokens, cache_prompt=False, **settings) for ids in group]
        texts = llm.run(plain)
        first, second = (
            llm.run([llm.request(ids, mode="chain", max_tokens=tokens, **settings) for ids in group]) for _ in range(2)
        )
        for done in first:
            cold.add(done.stats)
        for done in second:
            warm.add(done.stats)
        pairs += zip(plain, texts, second, strict=True)
    share = warm.cached_tokens / warm.prompt_tokens
    return HitReport(compare_pairs(llm, pairs), cold, warm, share)


def _padded(llm: LLM, prompt: str) -> list[int]:
    """A prompt that fills at least two pages, so that there is something to hit."""
    text = prompt
    while len(ids := llm.prompt_ids(text, chat=True)) < 2 * PAGE_TOKENS + 5:
        text = f"{text}\n\n{prompt}"
    return ids


def document() -> str:
    """All evaluation prompts joined, which are tens of thousands of tokens."""
    return "\n\n".join(turn for name in PUBLIC for turns in read_prompts(name) for turn in turns)


def long_prompt(llm: LLM, length: int, question: str) -> list[int]:
    """A chat prompt of `length` tokens: as much of a long document as fits, then a question."""
    ids = llm.prompt_ids(question, chat=True)
    start = llm.prompt_ids("", chat=True)[:-4]
    filler = llm.tokenizer.encode(document())[: length - len(ids) - len(start)]
    return [*start, *filler, *ids]


def page_edge_prompts(llm: LLM, prompts: Sequence[str]) -> list[list[int]]:
    """Prompts whose length is a multiple of a page, one token less and one token more."""
    edges = []
    for index, prompt in enumerate(prompts):
        ids = _padded(llm, prompt)
        edges.append(ids[: 2 * PAGE_TOKENS + (index % 3 - 1)])
    return edges


def ids_identity(
    llm: LLM, prompt_ids: Sequence[Sequence[int]], settings: dict[str, object], mode: str = "chain", batch: int = 1
) -> Identity:
    """Runs given token ids with and without speculation, `batch` at a time and without the prompt cache."""
    pairs: list[tuple[Request, Completion, Completion]] = []
    for start in range(0, len(prompt_ids), batch):
        group = prompt_ids[start : start + batch]
        plain = [llm.request(ids, mode="plain", cache_prompt=False, **settings) for ids in group]
        fast = [llm.request(ids, mode=mode, cache_prompt=False, **settings) for ids in group]
        pairs += zip(plain, llm.run(plain), llm.run(fast), strict=True)
    return compare_pairs(llm, pairs)


def total_tau(llm: LLM, prompts: Sequence[str], tokens: int, **settings: object) -> RequestStats:
    """The statistics over all prompts, each of which runs alone."""
    total = RequestStats()
    for prompt in prompts:
        chosen = {"max_tokens": tokens, "cache_prompt": False, "mode": "chain", **settings}
        total.add(llm.generate(prompt, chat=True, **chosen).stats)
    return total
