"""Runs two drafters or two targets on the same inputs and compares their logits and their choices.

The inputs are answers that the target itself wrote. The blocks of both drafters are computed wherever a step of either
drafter would begin. This also counts the steps that each drafter needs for the same text, which gives its tau.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slipstream.config import EngineConfig, WeightFormat
from slipstream.engine.block_scoring import OurBlocks, text_logits
from slipstream.engine.llm import LLM
from slipstream.errors import ConfigError, RequestError
from slipstream.models.dflash import load_drafter
from slipstream.models.loading import load_target
from slipstream.types import Progress, tracked

_CHUNK_TOKENS = 256  # tokens of a text that go through a target at a time; it bounds the memory for logits


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and the target's own greedy answer to it."""

    ids: tuple[int, ...]
    start: int  # where the answer begins; its first token is the first anchor


@dataclass(slots=True)
class LogitComparison:
    """Sums over all rows that both sides computed; a difference is the second side's from the first's."""

    first: str
    second: str
    kind: str
    weight_format: str
    rows: int = 0
    tokens: int = 0
    max_difference: float = 0.0
    differences: float = 0.0  # sum over rows of the mean absolute difference
    divergence: float = 0.0  # sum over rows of the KL divergence in nats
    max_divergence: float = 0.0
    same: int = 0  # rows on which both choose the same token
    non_finite: int = 0  # rows that are left out because the logits of a side are NaN or infinite
    taus: tuple[float | None, float | None] = (None, None)
    notes: list[str] = field(default_factory=list)

    def add(self, first: Tensor, second: Tensor, choices: tuple[Sequence[int], Sequence[int]]) -> None:
        """Takes in logits [rows, vocabulary] of both sides, and the tokens that each would choose."""
        # Rows with NaN or infinity are counted, because they cannot be subtracted.
        finite = torch.isfinite(first).all(-1) & torch.isfinite(second).all(-1)
        self.non_finite += int((~finite).sum())
        first, second = first[finite], second[finite]
        if not first.numel():
            return
        gap = (first - second).abs()
        one, two = torch.log_softmax(first.double(), -1), torch.log_softmax(second.double(), -1)
        divergence = (one.exp() * (one - two)).sum(-1).clamp_min(0.0)
        self.rows += len(first)
        self.max_difference = max(self.max_difference, float(gap.max()))
        self.differences += float(gap.mean(-1).double().sum())
        self.divergence += float(divergence.sum())
        self.max_divergence = max(self.max_divergence, float(divergence.max()))
        self.same += sum(a == b for a, b, kept in zip(*choices, finite.tolist(), strict=True) if kept)

    @property
    def mean_difference(self) -> float:
        return self.differences / self.rows if self.rows else 0.0

    @property
    def mean_divergence(self) -> float:
        return self.divergence / self.rows if self.rows else 0.0

    @property
    def agreement(self) -> float:
        return self.same / self.rows if self.rows else 1.0

    def to_json(self) -> dict[str, object]:
        return {
            "first": self.first,
            "second": self.second,
            "kind": self.kind,
            "weight_format": self.weight_format,
            "rows": self.rows,
            "answer_tokens": self.tokens,
            "max_difference": self.max_difference,
            "mean_difference": self.mean_difference,
            "mean_kl": self.mean_divergence,
            "max_kl": self.max_divergence,
            "top1_agreement": self.agreement,
            "non_finite_rows": self.non_finite,
            "tau_first": self.taus[0],
            "tau_second": self.taus[1],
            "notes": self.notes,
        }


class BlockSource(Protocol):
    """A drafter that computes the block after any position of a passage; positions must ascend."""

    label: str
    proposals: int

    def begin(self, ids: Sequence[int]) -> None: ...
    def block(self, position: int) -> tuple[Tensor, list[int]]: ...


def write_passages(
    target: str,
    draft: str | None,
    prompts: Sequence[str],
    config: EngineConfig,
    max_tokens: int,
    progress: Progress | None = None,
) -> tuple[list[Passage], float | None]:
    """The target's own greedy answers and, with a drafter, the tau of full chains on them."""
    with LLM(target, draft, config=config, progress=progress) as llm:
        chat = bool(llm.tokenizer.chat_template)
        mode = "chain" if llm.has_draft else "plain"
        passages: list[Passage] = []
        steps = committed = 0
        for prompt in tracked(prompts, "writing answers", progress):
            ids = llm.prompt_ids(prompt, chat=chat)
            answer = llm.run([llm.request(ids, max_tokens=max_tokens, mode=mode)])[0]
            if answer.finish_reason == "error":
                raise RequestError(f"{target} cannot answer: {answer.error}", "inspect it with --check")
            passages.append(Passage((*ids, *answer.token_ids), len(ids)))
            steps, committed = steps + len(answer.step_sizes), committed + sum(answer.step_sizes)
    return passages, committed / steps if steps and mode == "chain" else None


def compare_drafters(
    first: BlockSource,
    second: BlockSource,
    passages: Sequence[Passage],
    weight_format: str,
    progress: Progress | None = None,
) -> LogitComparison:
    """Compares both drafters wherever a step of either begins; their taus are those of full greedy chains."""
    result = LogitComparison(first.label, second.label, "drafter", weight_format)
    if first.proposals != second.proposals:
        fewer = min(first.proposals, second.proposals)
        result.notes.append(
            f"their blocks propose {first.proposals} and {second.proposals} tokens: only the first {fewer} count"
        )
    steps = [0, 0]
    for passage in tracked(passages, "comparing logits", progress):
        for source in (first, second):
            source.begin(passage.ids)
        found = _walk(first, second, passage, result)
        steps = [total + count for total, count in zip(steps, found, strict=True)]
        result.tokens += len(passage.ids) - passage.start
    # The first token of an answer comes with the prompt and needs no step.
    decoded = result.tokens - len(passages)
    one, two = (decoded / count if count else None for count in steps)
    result.taus = one, two
    return result


def _walk(first: BlockSource, second: BlockSource, passage: Passage, result: LogitComparison) -> list[int]:
    """Goes through one answer with both drafters, and returns the number of steps of each."""
    end, at, steps = len(passage.ids) - 1, [passage.start, passage.start], [0, 0]
    while (position := min(at)) < end:
        (one, chosen_one), (two, chosen_two) = first.block(position), second.block(position)
        shared = min(len(one), len(two))
        result.add(one[:shared], two[:shared], (chosen_one[:shared], chosen_two[:shared]))
        for side, chosen in enumerate((chosen_one, chosen_two)):
            if at[side] == position:
                at[side] = position + _agreeing(chosen, passage.ids[position + 1 :]) + 1
                steps[side] += 1
    return steps


def _agreeing(chosen: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    pairs = enumerate(zip(chosen, text, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(chosen), len(text)))


def load_blocks(target: Path, drafters: Sequence[tuple[str, Path]], weight_format: WeightFormat) -> list[OurBlocks]:
    """The drafters with one target, in the weight format in which the engine would run them."""
    model = load_target(target, weight_format).model
    own = "int8" if model.weight_format in ("int4", "int8") else model.weight_format
    return [OurBlocks(label, model, load_drafter(path, own)) for label, path in drafters]


def compare_targets(
    first: Path,
    second: Path,
    labels: tuple[str, str],
    passages: Sequence[Passage],
    weight_format: WeightFormat,
    progress: Progress | None = None,
) -> LogitComparison:
    """Compares both targets on the first one's answers, at every position that predicts a token of an answer."""
    one, two = (load_target(path, weight_format).model for path in (first, second))
    if one.config.vocab_size != two.config.vocab_size:
        raise ConfigError(
            f"{labels[0]} has {one.config.vocab_size} tokens and {labels[1]} {two.config.vocab_size}",
            "logits over different vocabularies cannot be compared",
        )
    result = LogitComparison(*labels, "target", one.weight_format)
    for passage in tracked(passages, "comparing logits", progress):
        ids, position = passage.ids[:-1], 0
        sides = text_logits(one, ids, _CHUNK_TOKENS), text_logits(two, ids, _CHUNK_TOKENS)
        for mine, theirs in zip(*sides, strict=True):
            skipped = max(0, passage.start - 1 - position)
            position += len(mine)
            mine, theirs = mine[skipped:], theirs[skipped:]
            result.add(mine, theirs, (mine.argmax(-1).tolist(), theirs.argmax(-1).tolist()))
        result.tokens += len(passage.ids) - passage.start
    return result
