"""Checks of the promises about trees, heads and the policy, at any size, like those in `checks`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from slipstream.bench.measure import BenchPlan, Comparison, compare
from slipstream.bench.workloads import PUBLIC, Conversation, read_prompts
from slipstream.config import EngineConfig, WeightFormat
from slipstream.engine.llm import LLM
from slipstream.kernels.cpu.linear import DenseMatrix, Int8Matrix, Matrix
from slipstream.speculative.costs import CostTable
from slipstream.stats import RequestStats
from slipstream.types import Source
from tests import checks

MODES = ("chain:2", "chain:4", "chain:8", "chain", "tree:8", "tree:16", "tree:32", "tree:64", "tree:32:seed", "auto")
CONTEXTS = (512, 1024, 2048, 4097, 7500)


@cache
def pair_with(draft: str, threads: int = 0, weight_format: WeightFormat = "auto") -> LLM:
    """The default target with one of the included drafters."""
    config = EngineConfig(weight_format=weight_format, threads=threads, check_integrity=True)
    return LLM("smollm2", draft, config=config)


def identity_by_mode(
    llm: LLM, prompts: Sequence[str], tokens: int, settings: dict[str, object], modes: Sequence[str], batch: int = 1
) -> dict[str, checks.Identity]:
    """Runs every prompt plainly and then in every mode, `batch` at a time and without the prompt cache."""
    ids = [llm.prompt_ids(prompt, chat=True) for prompt in prompts]
    common = {"max_tokens": tokens, "cache_prompt": False, **settings}
    requests = [llm.request(prompt, mode="plain", **common) for prompt in ids]
    plain = [llm.run([request])[0] for request in requests]
    reports = {}
    for mode in modes:
        done = []
        for start in range(0, len(ids), batch):
            group = [llm.request(prompt, mode=mode, **common) for prompt in ids[start : start + batch]]
            done += llm.run(group)
        reports[mode] = checks.compare_pairs(llm, zip(requests, plain, done, strict=True))
    return reports


def set_prompts(name: str, count: int) -> list[str]:
    return [turns[0] for turns in read_prompts(name, limit=count)]


def tau_by_mode(
    llm: LLM, name: str, count: int, tokens: int, modes: Sequence[str], **settings: object
) -> dict[str, RequestStats]:
    """The acceptance of every mode on the first prompts of one set."""
    prompts = set_prompts(name, count)
    return {mode: checks.total_tau(llm, prompts, tokens, mode=mode, **settings) for mode in modes}


def context_taus(llm: LLM, questions: Sequence[str], contexts: Sequence[int], tokens: int) -> dict[int, float]:
    """The acceptance on the same questions after documents of different lengths."""
    taus = {}
    for length in contexts:
        total = RequestStats()
        for question in questions:
            ids = checks.long_prompt(llm, length, question)
            # A shorter prompt is the beginning of a longer one, so most of it is computed only once.
            total.add(llm.run([llm.request(ids, max_tokens=tokens, mode="chain", ignore_eos=True)])[0].stats)
        taus[length] = total.tau
    return taus


@dataclass(frozen=True, slots=True)
class Conversations:
    """A conversation that ran with and without the prefix cache."""

    texts: tuple[list[str], list[str]]
    steps: tuple[list[list[int]], list[list[int]]]
    cached_tokens: int


def long_conversation(llm: LLM, document_tokens: int, tokens: int, mode: str = "chain") -> Conversations:
    """Runs three turns over a long document; both runs use the same histories, so they answer the same questions."""
    document = llm.tokenizer.decode(llm.tokenizer.encode(checks.document())[:document_tokens])
    questions = [f"{document}\n\nSummarise the first question above.", "Shorter, please.", "Now write it as code."]
    texts: tuple[list[str], list[str]] = ([], [])
    steps: tuple[list[list[int]], list[list[int]]] = ([], [])
    cached = 0
    for side, reuse in enumerate((False, True)):
        if llm.engine.prefix is not None:
            llm.engine.prefix.clear()
        history: list[dict[str, object]] = []
        for question in questions:
            history.append({"role": "user", "content": question})
            done = llm.chat(history, max_tokens=tokens, mode=mode, cache_prompt=reuse)
            history.append({"role": "assistant", "content": done.text})
            texts[side].append(done.text)
            steps[side].append(done.step_sizes)
            cached += done.stats.cached_tokens
    return Conversations(texts, steps, cached)


def random_word_prompts(count: int, words: int = 40) -> list[Conversation]:
    """Meaningless questions: words of the evaluation prompts in random order."""
    rng = random.Random(0)
    vocabulary = sorted({word for name in PUBLIC for turns in read_prompts(name) for word in turns[0].split()})
    return [(" ".join(rng.choice(vocabulary) for _ in range(words)),) for _ in range(count)]


def shuffled_pair() -> LLM:
    """The default target with a drafter whose weights are shuffled; every call builds a new engine."""
    llm = LLM("smollm2", config=EngineConfig(weight_format="int4", check_integrity=True))
    drafter = llm.engine.executor.variants.drafter
    assert drafter is not None
    source = torch.Generator().manual_seed(0)
    for layer in drafter.drafter.layers:
        for matrix in layer.matrices:
            _shuffle(matrix, source)
    _shuffle(drafter.drafter.fc, source)
    _shuffle(drafter.drafter.context_kv, source)
    return llm


def _shuffle(matrix: Matrix, source: torch.Generator) -> None:
    order = torch.randperm(matrix.out_features, generator=source)
    if isinstance(matrix, Int8Matrix):
        matrix.codes = matrix.codes[:, order].contiguous()
    else:
        assert isinstance(matrix, DenseMatrix)
        matrix.weight = matrix.weight[order].contiguous()


def speculative_tokens(llm: LLM, prompt: str, tokens: int, **settings: object) -> list[tuple[int, int]]:
    """(tokens written before the step, the drafter's rows verified in it) for every step of one answer in mode auto."""
    seen, written = [], 1
    for event in llm.stream(prompt, chat=True, mode="auto", max_tokens=tokens, ignore_eos=True, **settings):
        if event.step is not None:
            proposal = event.step.proposal
            seen.append((written, sum(proposal.source(row) != Source.TEXT for row in range(1, len(proposal.tokens)))))
            written += len(event.tokens)
    return seen


def rows_are_free() -> CostTable:
    """The costs of a machine on which 64 rows take as long as one, and drafting almost no time."""
    return CostTable({1: 10.0, 64: 10.5}, {3: 0.5, 15: 0.5})


def rows_are_dear() -> CostTable:
    """The costs of a machine on which every further row and every draft takes as long as another step."""
    return CostTable({1: 10.0, 2: 20.0, 64: 640.0}, {3: 30.0, 15: 30.0})


def auto_against_plain(llm: LLM, conversations: Sequence[Conversation], tokens: int, temperature: float) -> Comparison:
    plan = BenchPlan(max_tokens=tokens, temperature=temperature, seed=1, modes=("plain", "auto"))
    return compare(llm, "smollm2", conversations, plan)
