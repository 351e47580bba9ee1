"""Runs llama.cpp's own speculation with a DFlash drafter, in a separate process because its errors end the process.

echo '{"target": "t.gguf", ...}' | python -m tests.llama_cpp
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

START_SECONDS, PROMPT_SECONDS = 120, 60  # generous limits, because a machine that runs other work too is slow
SCORED_TOKENS = 40


@dataclass(frozen=True)
class Speculated:
    """One greedy answer: its text, how many drafted tokens were accepted, and how many tokens each step committed.

    The first token of an answer belongs to its prompt and to no step.
    """

    text: str
    drafted: int
    accepted: int
    step_sizes: list[int]


@dataclass(frozen=True)
class Scored:
    """The ids of the likeliest tokens after a prompt."""

    log_probabilities: dict[int, float]


def speculate(
    target: Path, drafter: Path, prompts: Sequence[Sequence[int]], tokens: int, drafts: int, heads: bool = False
) -> list[Speculated]:
    """Answers prompts with chains of `drafts` tokens; `heads` says whether the drafter is a DSpark drafter."""
    found = _ask(prompts, target=str(target), drafter=str(drafter), tokens=tokens, drafts=drafts, heads=heads)
    return [Speculated(**answer) for answer in found]


def greedy(model: Path, prompts: Sequence[Sequence[int]]) -> list[Scored]:
    """The likeliest tokens after each prompt, without speculation."""
    return [Scored(dict(answer)) for answer in _ask(prompts, target=str(model))]


def _ask(prompts: Sequence[Sequence[int]], **settings: object) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.llama_cpp"],
        input=json.dumps({"prompts": [list(ids) for ids in prompts], **settings}),
        timeout=START_SECONDS + PROMPT_SECONDS * len(prompts),
        check=False,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"llama.cpp ended with {done.returncode}: {done.stderr[-2000:]}"
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def gather(chunks: Sequence[Mapping[str, Any]]) -> Speculated:
    """An answer from its streamed tokens, each of which reports how much was drafted and accepted so far."""
    drafted = accepted = written = 0
    text, steps = "", list[int]()
    for chunk in chunks:
        timings = chunk["timings"]
        text += chunk["choices"][0]["text"]
        fresh = timings["predicted_n"] - written
        written += fresh
        if timings.get("draft_n", 0) > drafted:
            steps.append(0)
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        if steps:
            steps[-1] += fresh
    return Speculated(text, drafted, accepted, steps)


def main() -> None:
    import xllamacpp

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what llama.cpp prints must not end up in the reply
    asked = json.loads(sys.stdin.read())
    settings = xllamacpp.CommonParams()
    settings.model.path = asked["target"]
    if "drafter" in asked:
        kinds = xllamacpp.common_speculative_type
        settings.speculative.draft.mparams.path = asked["drafter"]
        settings.speculative.types = [
            kinds.COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK if asked["heads"] else kinds.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH
        ]
        settings.speculative.draft.n_max, settings.speculative.draft.p_min = asked["drafts"], 0.0
    for parameters in (settings, settings.speculative.draft):
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        # With 16-bit keys, or with fused attention, only three digits of llama.cpp's logits are right.
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.n_ctx, settings.n_parallel = 1024, 1
    settings.cache_prompt, settings.cache_ram_mib = False, 0
    settings.verbosity = 0
    server = xllamacpp.Server(settings)
    answer = _speculated if "drafter" in asked else _scored
    print(json.dumps([answer(server, ids, asked) for ids in asked["prompts"]]), file=replies, flush=True)


def _speculated(server: Any, prompt: list[int], asked: Mapping[str, Any]) -> dict[str, Any]:
    chunks: list[dict[str, Any]] = []
    server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": asked["tokens"],
            "cache_prompt": False,
            "stream": True,
            "timings_per_token": True,
            "samplers": ["top_k"],
            "top_k": 1,
            "temperature": 1.0,
        },
        chunks.append,
    )
    return asdict(gather(chunks))


def _scored(server: Any, prompt: list[int], asked: Mapping[str, Any]) -> list[tuple[int, float]]:
    reply = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": 1,
            "cache_prompt": False,
            "stream": False,
            "logprobs": SCORED_TOKENS,
            "samplers": ["top_k"],
            "top_k": 1,
            "temperature": 1.0,
        }
    )
    best = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [(token["id"], token["logprob"]) for token in best]


if __name__ == "__main__":
    main()
