"""Checks of the promises about written files, at any size: acceptance by weight type, and in llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slipstream.bench.intervals import Sample
from slipstream.bench.measure import Ratio
from slipstream.bench.sweep_columns import QuantFiles, Side
from slipstream.bench.workloads import read_prompts
from slipstream.config import EngineConfig, WeightFormat
from slipstream.engine.llm import LLM
from slipstream.formats.sources import resolve
from slipstream.tools.conversion import convert
from tests.helpers_models import smollm2_path
from tests.llama_cpp import speculate
from tests.oracles import Loop, full_block_steps, real_prompts

BATCH = 8


# ---- weight types


@dataclass(frozen=True)
class TypeTau:
    """Tau of one weight type on one set, and its ratio to the first type's tau."""

    name: str
    tau: float
    against: Ratio | None

    def __str__(self) -> str:
        if self.against is None:
            return f"{self.name} {self.tau:.3f}"
        low, high = self.against.interval or (self.against.value, self.against.value)
        return (
            f"{self.name} {self.tau:.3f}, {self.against.value - 1:+.1%} [{low - 1:+.1%}, {high - 1:+.1%}] "
            f"{self.against.verdict}"
        )


def taus_by_type(
    side: Side, types: Sequence[str], sets: Sequence[str], prompts: int, tokens: int, folder: Path, threads: int = 0
) -> dict[str, list[TypeTau]]:
    """Tau of full greedy chains of the default pair with one side in each type, per set."""
    config = EngineConfig(threads=threads)
    files = QuantFiles("smollm2", "auto", folder, config, tokens, partial(LLM, config=config))
    seen: dict[str, dict[str, list[Sample]]] = {name: {} for name in sets}
    for kind, column in zip(types, files.columns({side: types}), strict=True):
        with column.load() as (llm, _):
            for name in sets:
                texts = [conversation[0] for conversation in read_prompts(name, prompts)]
                seen[name][kind] = chain_samples(llm, texts, tokens)
    return {name: _against_first(found) for name, found in seen.items()}


def chain_samples(llm: LLM, prompts: Sequence[str], tokens: int) -> list[Sample]:
    """Tokens and verify steps of each prompt; neither depends on the other prompts of its batch."""
    samples: list[Sample] = []
    for start in range(0, len(prompts), BATCH):
        requests = [
            llm.request(llm.prompt_ids(prompt, chat=True), max_tokens=tokens, mode="chain", cache_prompt=False)
            for prompt in prompts[start : start + BATCH]
        ]
        samples += [(done.stats.committed, done.stats.steps) for done in llm.run(requests)]
    return samples


def _against_first(found: Mapping[str, list[Sample]]) -> list[TypeTau]:
    reference = next(iter(found))
    return [
        TypeTau(name, _tau(samples), None if name == reference else compared(reference, samples, found[reference]))
        for name, samples in found.items()
    ]


def _tau(samples: Sequence[Sample]) -> float:
    return sum(tokens for tokens, _ in samples) / sum(steps for _, steps in samples)


def compared(over: str, mine: Sequence[Sample], theirs: Sequence[Sample]) -> Ratio:
    found = Ratio.of(over, mine, theirs)
    assert found is not None, "nothing was decoded"
    return found


# ---- llama.cpp


@dataclass(frozen=True)
class BothTaus:
    """The same prompts in this engine and in llama.cpp: tokens and steps of each, and how many texts are equal."""

    ours: list[Sample]
    theirs: list[Sample]
    same_texts: int
    same_steps: int

    @property
    def taus(self) -> tuple[float, float]:
        return _tau(self.ours), _tau(self.theirs)

    @property
    def against(self) -> Ratio:
        return compared("llama.cpp", self.ours, self.theirs)

    def row(self) -> str:
        here, there = self.taus
        low, high = self.against.interval or (self.against.value, self.against.value)
        prompts = "; ".join(
            f"{mine[0]}/{mine[1]:g} {theirs[0]}/{theirs[1]:g}"
            for mine, theirs in zip(self.ours, self.theirs, strict=True)
        )
        return (
            f"tau {here:.3f} here, {there:.3f} there, {self.against.value - 1:+.1%} [{low - 1:+.1%}, {high - 1:+.1%}], "
            f"{self.same_texts} of {len(self.ours)} texts the same, {self.same_steps} step by step; tokens/steps of "
            f"every prompt here and there: {prompts}"
        )


def write_real_drafter(name: str, folder: Path) -> Path:
    """Writes an included drafter in F32; it goes through a folder, and llama.cpp needs the target's tokenizer in it."""
    convert(resolve(name).path, folder / name, target=smollm2_path())
    convert(folder / name, folder / f"{name}.gguf", target=smollm2_path())
    return folder / f"{name}.gguf"


def write_exact_target(folder: Path) -> Path:
    """Writes the default target in F32; it goes through a folder."""
    convert(smollm2_path(), folder / "target")
    convert(folder / "target", folder / "target.gguf")
    return folder / "target.gguf"


def both_taus(
    target: Path,
    drafter: Path,
    prompts: int,
    tokens: int,
    weight_format: WeightFormat = "auto",
    threads: int = 0,
    heads: bool = False,
) -> BothTaus:
    """Runs whole greedy chains over chat prompts, each side on the text that it writes itself.

    Only steps that began with room for a whole block count, because near the limit llama.cpp shortens the draft block.
    """
    config = EngineConfig(weight_format=weight_format, draft_window=0, threads=threads)
    with closing(LLM(str(target), str(drafter), config=config)) as llm:
        size = llm.proposals
        texts = [llm.prompt_ids(prompt, chat=True) for prompt in real_prompts(prompts)]
        ours = [llm.run([llm.request(ids, max_tokens=tokens, mode="chain")])[0] for ids in texts]
    theirs = speculate(target, drafter, texts, tokens, size, heads)

    def whole(step_sizes: list[int]) -> list[int]:
        # Near the limit llama.cpp reserves room for the bonus token when it drafts, and the authors do not; hence one
        # token less.
        return full_block_steps(Loop([], step_sizes), tokens - 1, size + 1)

    pairs = [(whole(mine.step_sizes), whole(other.step_sizes)) for mine, other in zip(ours, theirs, strict=True)]
    return BothTaus(
        [(sum(mine), len(mine)) for mine, _ in pairs],
        [(sum(other), len(other)) for _, other in pairs],
        sum(mine.text == other.text for mine, other in zip(ours, theirs, strict=True)),
        sum(mine == other for mine, other in pairs),
    )
