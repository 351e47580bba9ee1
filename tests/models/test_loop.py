"""The whole loop against the authors' `dflash_generate`: the same tokens, and the same number of them per step."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from dflash.model import DFlashDraftModel
from transformers import PreTrainedModel

from slipstream import LLM
from slipstream.config import EngineConfig
from slipstream.engine.llm import Completion
from tests.oracles import (
    FOLDER_VOCAB,
    Loop,
    compare_loop,
    full_block_steps,
    predictable_target,
    save_model,
    save_tokenizer,
    their_loop,
    tiny_drafter,
    tiny_target,
    train_drafter,
)

TOKENS = 60
LENGTHS = (1, 6, 57, 64, 90)


@dataclass
class Pair:
    """A tiny pair in the authors' hands and in ours."""

    target: PreTrainedModel
    drafter: DFlashDraftModel
    folder: Path

    def llm(self, chunk: int = 256) -> LLM:
        config = EngineConfig(
            weight_format="fp32",
            draft_window=0,
            cache_tokens=4096,
            prefill_chunk=chunk,
            threads=1,
            check_integrity=True,
        )
        return LLM(str(self.folder / "target"), str(self.folder / "draft"), config=config)

    def theirs(self, ids: list[int], tokens: int = TOKENS, stop: tuple[int, ...] = ()) -> Loop:
        return their_loop(self.target, self.drafter, ids, tokens, stop)


MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    """Pairs are built (and their drafters trained) once per module."""
    made: dict[object, Pair] = {}

    def make(family: str, kind: str = "full", trained: bool = True) -> Pair:
        key = (family, kind, trained)
        if key not in made:
            target = predictable_target(family, seed=21) if trained else tiny_target(family, seed=21)
            changes = (
                {}
                if kind == "full"
                else {
                    "num_hidden_layers": 3,
                    "use_sliding_window": True,
                    "sliding_window": 12,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                }
            )
            drafter = tiny_drafter(seed=22, **changes)
            if trained:
                train_drafter(drafter, target)
            folder = tmp_path_factory.mktemp("pair")
            save_tokenizer(save_model(target, folder / "target"))
            save_model(drafter, folder / "draft")
            made[key] = Pair(target, drafter, folder)
        return made[key]

    return make


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(3, FOLDER_VOCAB, (length,), generator=generator).tolist()


def assert_same(ours: Completion, theirs: Loop, tokens: int = TOKENS, block: int = 8) -> None:
    assert ours.token_ids == theirs.token_ids
    assert full_block_steps(ours, tokens, block) == full_block_steps(theirs, tokens, block)
    assert sum(ours.step_sizes) == len(ours.token_ids) - 1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_random_drafter_commits_what_the_authors_commit(family: str, make_pair: MakePair) -> None:
    pair = make_pair(family, trained=False)
    with pair.llm() as llm:
        for length in LENGTHS:
            ids = prompt(length)
            ours = llm.run([llm.request(ids, max_tokens=TOKENS, ignore_eos=True, mode="chain")])[0]
            assert_same(ours, pair.theirs(ids))
            assert ours.stats.drafted > 0


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_trained_drafter_commits_what_the_authors_commit(family: str, kind: str, make_pair: MakePair) -> None:
    pair = make_pair(family, kind)
    sizes: list[int] = []
    with pair.llm(chunk=16) as llm:
        for length in LENGTHS:
            ids = prompt(length)
            ours = llm.run([llm.request(ids, max_tokens=TOKENS, ignore_eos=True, mode="chain")])[0]
            assert_same(ours, pair.theirs(ids))
            sizes += full_block_steps(ours, TOKENS, 8)
    assert len(set(sizes)) >= 3 and min(sizes) < 4 < max(sizes), sizes  # steps of many sizes were compared


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_batch_commits_what_each_request_alone_commits(family: str, make_pair: MakePair) -> None:
    """Six requests in one batch, of which two start from a cached prefix; the authors run them one by one."""
    pair = make_pair(family)
    prompts = [prompt(length, seed=1) for length in (3, 20, 64, 130)]
    with pair.llm(chunk=64) as llm:
        llm.run([llm.request(prompts[3], max_tokens=2, mode="chain")])
        prompts += [prompts[3], prompts[3][:70] + prompt(9)]
        done = llm.run([llm.request(ids, max_tokens=TOKENS, ignore_eos=True, mode="chain") for ids in prompts])
    assert [ours.stats.cached_tokens for ours in done] == [0, 0, 0, 128, 128, 64]
    for ids, ours in zip(prompts, done, strict=True):
        assert_same(ours, pair.theirs(ids))
    assert max(size for ours in done for size in ours.step_sizes) > 2


def drafted_first(loop: Loop) -> int | None:
    """A token whose first appearance is a drafted one, with more of the same step after it."""
    begins = 1
    for size in loop.step_sizes:
        for token in loop.token_ids[begins : begins + size - 1]:
            if token not in loop.token_ids[:begins]:
                return token
        begins += size
    return None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_stop_token_ends_the_step_where_the_authors_end_it(family: str, make_pair: MakePair) -> None:
    pair = make_pair(family)
    stopped = 0
    with pair.llm() as llm:
        for seed in range(40):
            ids = prompt(6, seed)
            whole = pair.theirs(ids)
            stop = drafted_first(whole)
            if stop is None:
                continue
            request = replace(llm.request(ids, max_tokens=TOKENS, mode="chain"), stop_token_ids=frozenset({stop}))
            ours, theirs = llm.run([request])[0], pair.theirs(ids, stop=(stop,))
            assert ours.token_ids == theirs.token_ids == whole.token_ids[: len(ours.token_ids)]
            assert ours.step_sizes == theirs.step_sizes
            assert ours.finish_reason == "stop" and ours.tokens[-1].id == stop and ours.tokens[-1].drafted
            stopped += 1
            if stopped == 3:
                break
    assert stopped == 3


@pytest.mark.e2e
def test_the_real_pair_commits_what_the_authors_commit() -> None:
    result = compare_loop(prompts=1, tokens=24)
    assert (result.same, result.of) == (1, 1), result.differences
    assert result.tokens >= 20
    assert sum(result.step_sizes) / len(result.step_sizes) > 1.5, result.step_sizes
