"""llama.cpp's own speculation with a DFlash drafter, in a process of its own because its mistakes end the process.

    echo '{"target": "t.gguf", ...}' | python -m tests.llama_cpp
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS = 300


@dataclass(frozen=True)
class Speculated:
    """One greedy answer: its text, and how many of the drafted tokens were accepted."""

    text: str
    tokens: int
    drafted: int
    accepted: int


def total_tau(answers: Sequence[Speculated]) -> float:
    """Tokens per verify step: whatever was not an accepted draft came with a step of its own.

    The first token of an answer belongs to its prompt.
    """
    tokens, accepted = sum(one.tokens - 1 for one in answers), sum(one.accepted for one in answers)
    return tokens / (tokens - accepted)


def speculate(
    target: Path, drafter: Path, prompts: Sequence[Sequence[int]], tokens: int, drafts: int, heads: bool = False
) -> list[Speculated]:
    """Answers prompts with chains of `drafts` tokens; `heads` says that the drafter is a DSpark one."""
    request = {
        "target": str(target), "drafter": str(drafter), "prompts": [list(ids) for ids in prompts], "tokens": tokens,
        "drafts": drafts, "heads": heads,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.llama_cpp"], input=json.dumps(request), capture_output=True, text=True,
        timeout=SECONDS, check=False, cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, f"llama.cpp ended with {done.returncode}: {done.stderr[-2000:]}"
    return [Speculated(**answer) for answer in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    import xllamacpp

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever llama.cpp prints must not end up in the reply
    asked = json.loads(sys.stdin.read())
    kinds = xllamacpp.common_speculative_type
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.speculative.draft.mparams.path = asked["target"], asked["drafter"]
    settings.speculative.types = [
        kinds.COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK if asked["heads"] else kinds.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH
    ]
    settings.speculative.draft.n_max, settings.speculative.draft.p_min = asked["drafts"], 0.0
    for parameters in (settings, settings.speculative.draft):
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        # with 16-bit keys, or its fused attention, llama.cpp's logits are good to three digits only
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.n_ctx, settings.n_parallel = 1024, 1
    settings.cache_prompt, settings.cache_ram_mib = False, 0
    settings.verbosity = 0
    server = xllamacpp.Server(settings)
    answers = []
    for prompt in asked["prompts"]:
        reply = server.handle_completions({
            "prompt": prompt, "n_predict": asked["tokens"], "cache_prompt": False, "stream": False,
            "samplers": ["top_k"], "top_k": 1, "temperature": 1.0,
        })
        timings = reply["timings"]
        answers.append(asdict(Speculated(
            reply["choices"][0]["text"], timings["predicted_n"], timings["draft_n"], timings["draft_n_accepted"],
        )))
    print(json.dumps(answers), file=replies, flush=True)


if __name__ == "__main__":
    main()
