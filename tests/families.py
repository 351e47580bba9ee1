"""Checks that every target family must pass: its logits equal the oracle's, and speculation never changes its text.

Drafts come from a random drafter, of which hardly any is accepted, and from one that replays the plain text up to a
random depth per block, so that long accepted runs and rollbacks of every length happen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from slipstream import LLM
from slipstream.config import EngineConfig, WeightFormat
from slipstream.models.cpu import part_runs
from slipstream.models.decoder import Decoder
from slipstream.models.loading import load_target
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.draft import BlockDrafter, DraftJob
from slipstream.tools.quantize_recipes import RecipeName
from slipstream.types import Request
from tests.family_gguf import read_back, write_family_gguf
from tests.llama_cpp_greedy import llama_cpp_tokens
from tests.oracles import FOLDER_VOCAB, our_target, save_model, save_tokenizer, their_logits, their_taps, tiny_drafter
from tests.tiny import assert_idle

TOLERANCE = 2e-4
BLOCK = 6
CHUNKS = (1, 3, 7, 64)
MODES = ("chain", "tree:16")
_RANKS = 4  # candidates per slot of a replayed block


def ids_of(length: int, seed: int = 1) -> list[int]:
    return torch.randint(3, FOLDER_VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def family_settings(**changes: Any) -> dict[str, Any]:
    """The settings that tiny targets of all families share."""
    return {
        "vocab_size": FOLDER_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | changes


def randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Fills every tensor, also fused experts and persistent buffers, with random values that make mistakes visible."""
    generator = torch.Generator().manual_seed(seed)
    saved = set(model.state_dict())
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)  # the model multiplies embeddings by it
    tensors = [*model.named_parameters(), *((name, one) for name, one in model.named_buffers() if name in saved)]
    with torch.no_grad():
        for name, weight in tensors:
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise / (scale if "embed_tokens." in name else weight.shape[-1] ** 0.5))
            else:
                weight.copy_(0.3 * noise + (0.0 if "bias" in name else 1.0))
    return model.eval()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, for logits that are large enough for a tolerance to mean something."""
    assert ours.shape == theirs.shape
    assert float(theirs.std()) > 0.2
    return float((ours - theirs).abs().max())


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert difference(ours, theirs) < TOLERANCE


def load(path: Path) -> Decoder:
    return load_target(path, "fp32").model


def logit_difference(
    model: Decoder, theirs: PreTrainedModel, length: int = 70, chunks: Sequence[int] = CHUNKS
) -> float:
    """The largest difference in one prefill, in the same prefill in chunks, and in a batch of different lengths."""
    ids = ids_of(length)
    expected, found = their_logits(theirs, ids), []
    for chunk in (length, *chunks):
        ((ours, _),) = our_target(model, [ids], chunk)
        found.append(difference(ours, expected))
    prompts = [ids_of(count, count) for count in (1, 5, 64, 67)]
    for one, (ours, _) in zip(prompts, our_target(model, prompts, 33), strict=True):
        found.append(difference(ours, their_logits(theirs, one)))
    return max(found)


def check_logits(model: Decoder, theirs: PreTrainedModel, length: int = 70, chunks: Sequence[int] = CHUNKS) -> None:
    assert logit_difference(model, theirs, length, chunks) < TOLERANCE


def check_taps(model: Decoder, theirs: PreTrainedModel) -> None:
    """Checks the residual after every layer, the last one before the final norm; -1 is the embedding."""
    last, ids = model.config.layers - 1, ids_of(70)
    for layers in ((last,), (last, -1, *range(last))):
        ((_, ours),) = our_target(model, [ids], 16, taps=layers)
        assert_close(ours, their_taps(theirs, ids, layers))


def greedy_text(model: Decoder, ids: Sequence[int], tokens: int) -> list[int]:
    """The target's greedy continuation by whole forwards, without the end token 0, which llama.cpp ignores as well."""
    text = list(ids)
    for _ in range(tokens):
        ((logits, _),) = our_target(model, [text])
        text.append(int(logits[-1, 1:].argmax()) + 1)
    return text[len(ids) :]


def greedy_texts(path: Path, lengths: Sequence[int], tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """llama.cpp's greedy answers from a GGUF file, and ours from the same file with llama.cpp's GELU."""
    prompts = [ids_of(length, length) for length in lengths]
    with patch.dict(part_runs.ACTIVATIONS, gelu=_tabled_gelu):
        model = load(path)
        ours = [greedy_text(model, ids, tokens) for ids in prompts]
    return llama_cpp_tokens(path, prompts, tokens), ours


def _tabled_gelu(x: Tensor) -> Tensor:
    """GELU as llama.cpp computes it: from a table of 16-bit numbers, which can change a logit by 0.05."""
    return F.gelu(x.half().float(), approximate="tanh").half().float()


def check_llama_cpp(path: Path) -> None:
    theirs, ours = greedy_texts(path, (5, 40, 70), 12)
    assert theirs == ours


def check_gguf(theirs: PreTrainedModel, path: Path, recipe: RecipeName | None = None) -> None:
    """Checks that a converted file's logits equal those of the oracle with the values of that file converted back."""
    written = write_family_gguf(theirs, path, recipe)
    back = read_back(theirs, written)
    if recipe is None:
        for name, tensor in theirs.state_dict().items():
            torch.testing.assert_close(back.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)
    check_logits(load(written), back, chunks=())


def write_family_pair(target: PreTrainedModel, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Writes a target with a tokenizer, and a random drafter whose taps reach from the first layer to the last."""
    config = target.config.get_text_config()
    save_tokenizer(save_model(target, folder / "target"))
    settings = {"num_target_layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "block_size": BLOCK}
    drafter = tiny_drafter(7, taps=(0, config.num_hidden_layers - 1), **settings | changes)
    save_model(drafter, folder / "draft")
    return folder / "target", folder / "draft"


def open_pair(pair: tuple[Path, Path], weight_format: WeightFormat, **settings: Any) -> LLM:
    chosen: dict[str, Any] = {
        "weight_format": weight_format,
        "check_integrity": True,
        "max_context": 384,
        "cache_tokens": 2048,
        "max_sequences": 4,
        "prefill_chunk": 64,
        "threads": 1,
        **settings,
    }
    return LLM(str(pair[0]), str(pair[1]), config=EngineConfig(**chosen))


class Replay:
    """Replaces the drafter's block pass: it knows the texts, and is right up to a random depth."""

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary: int, seed: int) -> None:
        self._texts = [list(text) for text in texts]
        self._vocabulary = vocabulary
        self._rng = random.Random(seed)

    def __call__(self, jobs: Sequence[DraftJob]) -> list[BlockDrafts]:
        return [self.block(job) for job in jobs]

    def block(self, job: DraftJob) -> BlockDrafts:
        known = job.state.tokens
        coming = next(text for text in self._texts if text[: len(known)] == known)[len(known) :]
        right = min(self._rng.randint(0, job.slots), len(coming))
        ranks = min(job.candidates, _RANKS)
        tokens = np.empty((job.slots, ranks), np.int64)
        for slot in range(job.slots):
            avoided = coming[slot] if slot < len(coming) else -1
            others = [token for token in self._rng.sample(range(self._vocabulary), ranks + 1) if token != avoided]
            tokens[slot] = others[:ranks]
            if slot < right:
                tokens[slot, 0 if self._rng.random() < 0.85 else self._rng.randrange(ranks)] = avoided
        # The scores fall steeply, so that a tree of few nodes reaches its full depth along the first rank.
        scores = np.log(np.full(tokens.shape, 0.8) * 0.25 ** np.arange(ranks))
        return BlockDrafts(tokens, scores.astype(np.float32))


@contextmanager
def replaying(llm: LLM, texts: Sequence[Sequence[int]], seed: int) -> Iterator[None]:
    drafter = llm.engine.executor.variants.drafter
    assert isinstance(drafter, BlockDrafter)
    with patch.object(drafter, "draft", Replay(texts, llm.engine.executor.target.config.vocab_size, seed)):
        yield


@dataclass
class Speculated:
    """How often each number of drafted tokens was accepted, by mode, and which texts differed."""

    accepted: dict[str, Counter[int]] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)


def random_prompts(count: int, seed: int, longest: int) -> list[list[int]]:
    """Prompts of all lengths; every third begins like the one before it."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for index in range(count):
        own = ids_of(rng.randint(1, longest), rng.randrange(10**6))
        prompts.append(prompts[-1][: longest * 2 // 3] + own[:20] if index % 3 == 2 else own)
    return prompts


def speculate(
    llm: LLM, count: int, tokens: int = 20, seed: int = 0, longest: int = 100, modes: Sequence[str] = MODES
) -> Speculated:
    """Runs random requests plainly one by one, then together in every mode with both kinds of drafts."""
    rng, report = random.Random(seed), Speculated()
    prompts = random_prompts(count, seed, longest)
    settings = [
        {
            "max_tokens": rng.randint(tokens // 2, tokens),
            "ignore_eos": True,
            "seed": index,
            "temperature": rng.choice([0.0, 0.0, 0.9]),
        }
        for index in range(count)
    ]
    plain = [
        llm.run([llm.request(ids, mode="plain", cache_prompt=False, **chosen)])[0].token_ids
        for ids, chosen in zip(prompts, settings, strict=True)
    ]
    texts = [ids + text for ids, text in zip(prompts, plain, strict=True)]
    for mode in modes:
        requests = [llm.request(ids, mode=mode, **chosen) for ids, chosen in zip(prompts, settings, strict=True)]
        _compare(llm, f"{mode}, random drafts", requests, plain, report)
        requests = [llm.request(ids, mode=mode, **chosen) for ids, chosen in zip(prompts, settings, strict=True)]
        with replaying(llm, texts, seed):
            _compare(llm, mode, requests, plain, report)
    assert_idle(llm)
    return report


def _compare(
    llm: LLM, name: str, requests: Sequence[Request], plain: Sequence[Sequence[int]], report: Speculated
) -> None:
    seen = report.accepted.setdefault(name, Counter())
    for index, (done, text) in enumerate(zip(llm.run(list(requests)), plain, strict=True)):
        seen.update(size - 1 for size in done.step_sizes)
        if done.token_ids != list(text):
            report.different.append(f"{name}: request {index}")


def check_speculation(llm: LLM, count: int = 6, **settings: Any) -> None:
    """Checks that speculative text equals plain text, and that every number of accepted drafts occurred."""
    assert llm.exact
    report = speculate(llm, count, **settings)
    assert not report.different, report.different[:4]
    for mode in MODES:
        assert set(range(llm.proposals + 1)) <= set(report.accepted[mode]), report.accepted[mode]
