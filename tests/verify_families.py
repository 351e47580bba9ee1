"""The section of the verification about target families.

Their logits are compared with those of transformers, their text under speculation with plain decoding, and the text
from the GGUF files we write with llama.cpp's.
"""

# mypy: disable-error-code="attr-defined, misc, unused-ignore"

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream import LLM
from slipstream.bench import rival
from slipstream.config import WeightFormat
from slipstream.kernels.cpu.native_library import library
from tests.families import (
    MODES,
    TOLERANCE,
    greedy_texts,
    load,
    logit_difference,
    open_pair,
    speculate,
    write_family_pair,
)
from tests.family_gguf import write_family_gguf
from tests.models import test_gemma4 as gemma4
from tests.models import test_laguna as laguna
from tests.models import test_qwen3_5 as qwen3_5
from tests.models import test_qwen3_moe as qwen3_moe
from tests.oracles import save_model
from tests.verify_report import Report

REQUESTS, TOKENS = 300, 20
ANSWERS, ANSWER_TOKENS = (1, 5, 17, 40, 64, 70, 100, 130), 24
EXACT: WeightFormat = "native" if library() is not None else "int8"
Section = Callable[[Report], None]
Build = Callable[[], PreTrainedModel]


def variants(
    family: str, build: Callable[..., PreTrainedModel], table: Mapping[str, dict[str, Any]]
) -> dict[str, Build]:
    return {f"{family}, {name}": partial(build, **changes) for name, changes in table.items()}


ALL: dict[str, Build] = {
    **variants("qwen3_moe", qwen3_moe.build, qwen3_moe.VARIANTS),
    **variants("laguna", laguna.build, laguna.VARIANTS),
    **variants("gemma4", gemma4.build, gemma4.VARIANTS),
    **{
        f"qwen3_5{'_moe' if moe else ''}, {name}": partial(qwen3_5.hybrid, name)
        for name, (moe, _) in qwen3_5.VARIANTS.items()
    },
}
SHORT = {"sliding_window": 4}  # tokens; so short that the window ends inside the trees
SPECULATING: dict[str, Build] = {
    "qwen3_moe": qwen3_moe.build,
    "laguna": lambda: laguna.build(**SHORT),
    "gemma4": lambda: gemma4.build(**SHORT),
    "gemma4, shared keys": lambda: gemma4.build(**gemma4.VARIANTS["shared-keys-wide"] | SHORT),
    "gemma4, experts": lambda: gemma4.build(**gemma4.VARIANTS["experts-tied"] | SHORT),
    "qwen3_5": lambda: qwen3_5.hybrid("pattern"),
    "qwen3_5, paths run again": lambda: qwen3_5.hybrid("pattern"),
    "qwen3_5_moe": lambda: qwen3_5.hybrid("experts"),
}
IN_LLAMA_CPP: dict[str, Build] = {
    "qwen3_moe": lambda: qwen3_moe.build(norm_topk_prob=True),
    "laguna": laguna.build,
    "laguna, per-element": lambda: laguna.build(gating="per-element"),
    **variants("gemma4", gemma4.build, {name: gemma4.VARIANTS[name] for name in gemma4.IN_GGUF}),
    "qwen3_5": lambda: qwen3_5.hybrid("dense"),
    "qwen3_5, pattern": lambda: qwen3_5.hybrid("pattern"),
    "qwen3_5_moe": lambda: qwen3_5.hybrid("experts"),
}


def families(report: Report) -> None:
    torch.set_num_threads(1)
    for name, build in ALL.items():
        with tempfile.TemporaryDirectory() as place:
            theirs = build()
            found = logit_difference(load(save_model(theirs, Path(place))), theirs)
        promise = f"{name}: logits as transformers has them, whole, in chunks of 1, 3, 7, 64 and in a batch"
        text = f"largest difference {found:.1e}, bound {TOLERANCE:.0e}"
        report.add(promise, text, found < TOLERANCE, difference=float(f"{found:.1e}"))
    for seed, (name, build) in enumerate(SPECULATING.items()):
        with tempfile.TemporaryDirectory() as place:
            llm = open_pair(write_family_pair(build(), Path(place)), EXACT)
            if name.endswith("run again"):
                tensors = llm.engine.executor.memory.state_tensors
                assert tensors is not None
                tensors.most_kept_rows = 0  # as for states that are too large to keep one for every row
            promise = f"{name}: {REQUESTS} requests, random and replayed drafts, chains and trees: text as plain"
            _add_speculated(report, promise, llm, seed)
    for name, build in IN_LLAMA_CPP.items():
        _add_llama_cpp(report, f"{name}: llama.cpp's greedy tokens from the GGUF file we wrote", build())


def _add_speculated(report: Report, promise: str, llm: LLM, seed: int) -> None:
    """Reports how many texts were the same, and how often a step accepted 0, 1, 2, ... of its replayed drafts."""
    seen = speculate(llm, REQUESTS, TOKENS, seed)
    runs = REQUESTS * len(seen.accepted)
    lengths = range(llm.proposals + 1)
    counts = "; ".join(f"{mode} {'/'.join(str(seen.accepted[mode][length]) for length in lengths)}" for mode in MODES)
    every = all(seen.accepted[mode][length] for mode in MODES for length in lengths)
    same = runs - len(seen.different)
    text = f"{same}/{runs} texts same; steps by accepted drafts from 0 on: {counts}"
    report.add(promise, text, llm.exact and not seen.different and every, same=same, of=runs)


def _add_llama_cpp(report: Report, promise: str, theirs: PreTrainedModel) -> None:
    if not rival.available():
        report.add(promise, "xllamacpp is not installed", False)
        return
    with tempfile.TemporaryDirectory() as place:
        answers, ours = greedy_texts(write_family_gguf(theirs, Path(place) / "t.gguf"), ANSWERS, ANSWER_TOKENS)
    same = sum(one == other for one, other in zip(answers, ours, strict=True))
    text = f"{same}/{len(ours)} texts of {ANSWER_TOKENS} tokens same, F32"
    report.add(promise, text, same == len(ours), same=same, of=len(ours))


SIDE_BY_SIDE: tuple[Section, ...] = (families,)
