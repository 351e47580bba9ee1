"""The whole loop against the authors' `dflash_generate`: the same tokens, and the same number of them per step."""

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
            weight_format="fp32", draft_window=0, cache_tokens=4096, prefill_chunk=chunk, threads=1,
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
            target = tiny_target(family, seed=21)
            changes = {} if kind == "full" else {
                "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            }  # fmt: skip
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
            ours = llm.run([llm.request(ids, max_tokens=TOKENS, ignore_eos=True)])[0]
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
            ours = llm.run([llm.request(ids, max_tokens=TOKENS, ignore_eos=True)])[0]
            assert_same(ours, pair.theirs(ids))
            sizes += full_block_steps(ours, TOKENS, 8)
    assert len(set(sizes)) >= 3 and min(sizes) < 4 < max(sizes), sizes  # steps of many sizes were compared


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_batch_commits_what_each_request_alone_commits(family: str, make_pair: MakePair) -> None:
    """Six requests in one batch, of which two start from a cached prefix; the authors run them one by one."""
    pair = make_pair(family)
    prompts = [prompt(length, seed=1) for length in (3, 20, 64, 130)]
    with pair.llm(chunk=64) as llm:
        llm.run([llm.request(prompts[3], max_tokens=2)])
        prompts += [prompts[3], prompts[3][:70] + prompt(9)]
        done = llm.run([llm.request(ids, max_tokens=TOKENS, ignore_eos=True) for ids in prompts])
    assert [ours.stats.cached_tokens for ours in done] == [0, 0, 0, 128, 128, 64]
    for ids, ours in zip(prompts, done, strict=True):
        assert_same(ours, pair.theirs(ids))
    assert max(size for ours in done for size in ours.step_sizes) > 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_stop_token_ends_the_step_where_the_authors_end_it(family: str, make_pair: MakePair) -> None:
    pair = make_pair(family)
    ends_inside = 0
    with pair.llm() as llm:
        for seed in range(4):
            ids = prompt(12, seed)
            whole = pair.theirs(ids)
            # a token that first appears inside a step of several
            begins, stop = 1, None
            for size in whole.step_sizes:
                for token in whole.token_ids[begins : begins + size - 1]:
                    if stop is None and size > 2 and token not in whole.token_ids[:begins]:
                        stop = token
                begins += size
            if stop is None:
                continue
            request = replace(llm.request(ids, max_tokens=TOKENS), stop_token_ids=frozenset({stop}))
            ours, theirs = llm.run([request])[0], pair.theirs(ids, stop=(stop,))
            assert ours.token_ids == theirs.token_ids and ours.step_sizes == theirs.step_sizes
            assert ours.finish_reason == "stop" and ours.token_ids[-1] == stop
            ends_inside += len(ours.token_ids) < TOKENS
    assert ends_inside


@pytest.mark.e2e
def test_the_real_pair_commits_what_the_authors_commit() -> None:
    result = compare_loop(prompts=3, tokens=48)
    assert (result.same, result.of) == (3, 3), result.differences
    assert result.tokens >= 100
    assert sum(result.step_sizes) / len(result.step_sizes) > 1.5, result.step_sizes
