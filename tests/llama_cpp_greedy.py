"""Runs llama.cpp's greedy decoding on prompts of tokens that spell their own ids (see `family_gguf`).

echo '{"model": "t.gguf", "prompts": [[5, 6]], "tokens": 8}' | python -m tests.llama_cpp_greedy
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SECONDS = 120


def llama_cpp_tokens(path: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """llama.cpp's greedy answers, from a separate process because its errors end the process."""
    request = json.dumps({"model": str(path), "prompts": [list(ids) for ids in prompts], "tokens": tokens})
    done = subprocess.run(
        [sys.executable, "-m", "tests.llama_cpp_greedy"],
        input=request,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, f"llama.cpp ended with {done.returncode}: {done.stderr[-2000:]}"
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def main() -> None:
    import xllamacpp

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what llama.cpp prints must not end up in the reply
    asked = json.loads(sys.stdin.read())
    settings = xllamacpp.CommonParams()
    settings.model.path = asked["model"]
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    # With 16-bit keys, or with fused attention, only three digits of llama.cpp's logits are right.
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.n_ctx, settings.n_parallel = 512, 1
    settings.cache_prompt, settings.cache_ram_mib = False, 0
    settings.warmup, settings.verbosity = False, 0
    server = xllamacpp.Server(settings)
    answers = []
    for prompt in asked["prompts"]:
        reply = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": asked["tokens"],
                "cache_prompt": False,
                "stream": False,
                "ignore_eos": True,
                "samplers": ["top_k"],
                "top_k": 1,
                "temperature": 1.0,
            }
        )
        answers.append([int(token) for token in re.findall(r"\d+", reply["choices"][0]["text"])])
    print(json.dumps(answers), file=replies, flush=True)


if __name__ == "__main__":
    main()
