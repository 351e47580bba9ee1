"""A recurrent target as a GPU runs it, with torch's kernels: states move with everything else, whatever happens."""

# mypy: disable-error-code="assignment, union-attr, unused-ignore"

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from slipstream.config import PAGE_TOKENS
from slipstream.engine import devices
from slipstream.engine.gpu.block_draft import BlockDraft
from slipstream.engine.gpu.gpu_executor import GpuExecutor
from slipstream.engine.llm import LLM
from tests.families import open_pair, random_prompts, replaying, write_family_pair
from tests.kernels.test_gpu_engine import DEVICE
from tests.models.test_qwen3_5 import hybrid
from tests.tiny import Driver, assert_idle, keep_threads, prompt

MODES = ("chain", "tree:16")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_family_pair(hybrid("pattern"), tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "gpu_device", lambda: DEVICE)
    with keep_threads():
        yield


def gpu_llm(pair: tuple[Path, Path], **settings: Any) -> LLM:
    llm = open_pair(pair, "bf16", device="cuda", kernels="reference", **settings)
    assert isinstance(llm.engine.executor, GpuExecutor) and llm.engine.executor.memory.states is not None
    return llm


@contextmanager
def knowing(llm: LLM, texts: Sequence[Sequence[int]], seed: int) -> Iterator[None]:
    """Drafts of device steps are right as far as they like to be."""
    rng, run, state = random.Random(seed), BlockDraft.run, llm.engine.executor.device_steps.state

    def know(draft: BlockDraft) -> None:
        run(draft)
        tokens, scores = draft.candidates.tokens, draft.candidates.scores
        lengths, anchors = (each[: len(tokens)].tolist() for each in (state.length, state.wishes.anchors))
        for column, (length, anchor) in enumerate(zip(lengths, anchors, strict=True)):
            text = next((text for text in texts if length < len(text) and text[length] == anchor), None)
            right = text[length + 1 :][: rng.randint(0, tokens.shape[1])] if text is not None else ()
            # steep, so that a tree of few nodes reaches its full depth along the first rank
            scores[column] = torch.log(0.8 * 0.25 ** torch.arange(scores.shape[-1]))
            for slot, token in enumerate(right):
                rank = 0 if rng.random() < 0.7 else rng.randrange(3)
                tokens[column, slot, rank] = token

    with patch.object(BlockDraft, "run", know):
        yield


def answers(llm: LLM, prompts: Sequence[Sequence[int]], mode: str, **settings: Any) -> tuple[list[list[int]], set[int]]:
    """Texts of requests that run together, and how many drafted tokens steps kept."""
    requests = [
        llm.request(
            ids,
            mode=mode,
            max_tokens=18,
            ignore_eos=True,
            seed=index,
            gate="off",
            temperature=0.9 * (index % 3 == 2),
            **settings,
        )
        for index, ids in enumerate(prompts)
    ]
    done = llm.run(requests)
    assert all(answer.error is None for answer in done), [answer.error for answer in done]
    return [answer.token_ids for answer in done], {size - 1 for answer in done for size in answer.step_sizes}


def test_speculation_keeps_the_text(pair: tuple[Path, Path]) -> None:
    """Random drafts and drafts that know the text, in device steps and in proposals that the host lays out."""
    llm = gpu_llm(pair)
    prompts = random_prompts(5, 3, 100)
    plain, _ = answers(llm, prompts, "plain", cache_prompt=False)
    texts = [ids + text for ids, text in zip(prompts, plain, strict=True)]
    assert len({tuple(text) for text in plain}) == len(plain)
    by_device: set[int] = set()
    by_host: set[int] = set()
    for mode in MODES:
        assert answers(llm, prompts, mode)[0] == plain, mode
        with knowing(llm, texts, 5):
            found, kept = answers(llm, prompts, mode)
        assert found == plain, mode
        by_device |= kept
        with replaying(llm, texts, 7):
            found, kept = answers(llm, prompts, mode, logprobs=1)
        assert found == plain, mode
        by_host |= kept
    assert by_device == by_host == set(range(llm.proposals + 1))
    assert_idle(llm)


def test_a_prefix_brings_its_state(pair: tuple[Path, Path]) -> None:
    llm = gpu_llm(pair)
    shared = prompt(2 * PAGE_TOKENS + 5, 3)
    ends = [shared, [*shared, *prompt(9, 4)], [*shared[: PAGE_TOKENS + 3], *prompt(70, 5)]]
    alone = [answers(llm, [ids], "plain", cache_prompt=False)[0] for ids in ends]
    for mode in ("plain", "tree:16"):
        assert [answers(llm, [ids], mode)[0] for ids in ends] == alone, mode
    assert llm.engine.prefix is not None and llm.engine.prefix.hits >= 4
    assert_idle(llm)


@pytest.mark.parametrize("pages", [24, 7])
def test_a_paused_request_goes_on_where_it_stood(pair: tuple[Path, Path], pages: int) -> None:
    """The step in flight for it is dropped; with few pages it even loses its own and is computed again."""
    llm = gpu_llm(pair, cache_tokens=pages * PAGE_TOKENS, prefix_cache=False)
    prompts = [prompt(n, n) for n in (9, 33, 20)]
    alone = [answers(llm, [ids], "plain")[0][0] for ids in prompts]
    settings = {"max_tokens": 18, "mode": "tree:16", "gate": "off", "ignore_eos": True, "temperature": 0.0, "seed": 0}
    requests = [llm.request(ids, **settings) for ids in prompts]
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    llm.engine.add(requests[0])
    llm.engine.add(requests[1])
    with knowing(llm, [[*ids, *text] for ids, text in zip(prompts, alone, strict=True)], 3):
        for step in range(90):
            if step == 4:
                assert llm.engine.pause(requests[1].id)
            if step == 5:
                llm.engine.add(requests[2])
            if step == (6 if pages > 7 else 40):
                assert llm.engine.resume(requests[1].id)
            for event in llm.engine.step():
                found[event.request_id] += [token.id for token in event.tokens]
    assert [found[request.id] for request in requests] == alone
    assert_idle(llm)


def test_random_operations_leak_no_state(pair: tuple[Path, Path]) -> None:
    """Requests come, go, are cancelled and forked in a pool of few pages."""
    llm = gpu_llm(pair, check_integrity=False, cache_tokens=24 * PAGE_TOKENS)
    seen = Driver(llm.engine, random.Random(3)).run(60)
    assert seen.free == seen.total and seen.done["fork"]
    states = llm.engine.executor.memory.states
    assert states is not None
    states.check([], llm.engine.table)
    assert states.checkpoints == []


def test_a_fork_has_a_state_of_its_own(pair: tuple[Path, Path]) -> None:
    """Both go on from where they parted, and from what a truncated one computes again."""
    llm = gpu_llm(pair, check_integrity=False)  # which knows of no sequence that no request has
    ids = prompt(2 * PAGE_TOKENS + 9, 6)
    request = llm.request(ids, mode="plain", max_tokens=30, ignore_eos=True)
    llm.engine.add(request)
    for _ in range(8):
        llm.engine.step()
    state = llm.engine.sequences[request.id].state
    assert state.recurrent is not None and state.recurrent.slot is not None
    twin = state.fork()
    tensors = llm.engine.executor.memory.states.memory
    kept = tensors.memories[twin.recurrent.slot].clone()
    for _ in range(3):
        llm.engine.step()
    assert torch.equal(tensors.memories[twin.recurrent.slot], kept)
    assert not torch.equal(tensors.memories[state.recurrent.slot], kept)
    length = twin.length
    twin.truncate(length - 1)
    assert twin.length == 2 * PAGE_TOKENS and twin.recurrent.length == twin.length
    twin.release()
    while llm.engine.busy:
        llm.engine.step()
    assert_idle(llm)
