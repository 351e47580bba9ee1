"""Drafters with heads, another block layout or convolutions in the whole engine: the text never depends on them."""

# mypy: disable-error-code="call-overload, unused-ignore"

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine.llm import LLM
from slipstream.errors import RequestError
from slipstream.kernels.cpu.native_library import availability, library
from slipstream.models.heads import HeadPass
from slipstream.types import Proposal
from tests.tiny import BLOCK, HIDDEN, VOCAB, tiny_llm, write_pair

pytestmark = pytest.mark.usefixtures("threads")
RANK, TAPS, GROUP = 8, 3, 4
KINDS = ("vanilla", "gated", "rnn", "anchor", "confidence", "dflash2")


def add_parts(draft: Path, kind: str) -> None:
    """Turns the tiny drafter in this folder into one of the other kinds."""
    source = torch.Generator().manual_seed(5)

    def weights(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=source)

    tensors = load_file(draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    nested = config["dflash_config"]
    if kind == "dflash2":
        config["architectures"] = ["DFlash2DraftModel"]
        nested |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 6}
        for index in range(config["num_hidden_layers"]):
            for name in ("attention_conv", "mlp_conv"):
                base = weights(2, TAPS, HIDDEN)
                base[:, 0] += 1.0
                tensors[f"layers.{index}.{name}.base_kernel"] = base
                projection = 0.1 * weights(2 * TAPS * HIDDEN // GROUP, HIDDEN)
                tensors[f"layers.{index}.{name}.kernel_projection.weight"] = projection
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = weights(VOCAB, RANK)
        tensors["candidate_selector.hidden_projection.weight"] = weights(RANK, HIDDEN)
    else:
        head = kind if kind in ("gated", "rnn") else "vanilla"
        nested |= {"markov_rank": RANK, "markov_head_type": head, "sample_from_anchor": kind == "anchor"}
        tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"] = (
            weights(VOCAB, RANK) for _ in range(2)
        )
        if kind == "gated":
            tensors["markov_head.gate_proj.weight"] = weights(RANK, HIDDEN + RANK)
        if kind == "rnn":
            tensors["markov_head.joint_proj.weight"] = weights(3 * RANK, 2 * RANK + HIDDEN)
        if kind == "confidence":
            nested |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
            tensors["confidence_head.proj.weight"] = weights(1, HIDDEN + RANK)
            tensors["confidence_head.proj.bias"] = weights(1)
    save_file(tensors, draft / "model.safetensors")
    (draft / "config.json").write_text(json.dumps(config))


def llm_of(folder: Path, kind: str) -> LLM:
    _, draft = write_pair(folder)
    add_parts(draft, kind)
    # int8 sums are exact, so texts must agree to the last token
    return tiny_llm(folder, weight_format="int8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_kind_of_drafter_writes_plain_text(tmp_path: Path, kind: str, temperature: float) -> None:
    llm = llm_of(tmp_path, kind)
    drafter = llm.engine.executor.variants.drafter
    assert drafter is not None and drafter.drafter.heads is not None
    assert drafter.proposals == BLOCK - (kind != "anchor")
    prompts = ["The quick brown fox", "abcabcabc", "1 2 3 4 5 6 7 8"]
    common = {"max_tokens": 40, "temperature": temperature, "seed": 3, "ignore_eos": True}
    plain = llm.generate(prompts, mode="plain", **common)
    for mode in ("chain", "chain:4", "tree:24", "tree:8:seed", "auto"):
        done = llm.generate(prompts, mode=mode, **common)
        assert [each.token_ids for each in done] == [each.token_ids for each in plain], mode
        if mode != "auto":
            assert sum(each.stats.drafted for each in done) > 0
        if mode == "tree:24":
            assert sum(each.stats.accepted for each in done) > 0
        if mode == "chain":
            assert max(len(each.stats.verified_at) for each in done) == drafter.proposals


def test_a_confidence_threshold_cuts_what_is_verified(tmp_path: Path) -> None:
    llm = llm_of(tmp_path, "confidence")

    def drafted(threshold: float) -> int:
        done = llm.generate("abcabc", mode="chain", max_tokens=40, ignore_eos=True, min_confidence=threshold)
        return done.stats.drafted

    everything, some, nothing = drafted(0.0), drafted(0.5), drafted(1.0)
    assert everything > some > nothing == 0


def test_a_confidence_threshold_without_the_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no confidence head"):
        llm_of(tmp_path, "vanilla").generate("abc", mode="chain", min_confidence=0.5)


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@pytest.mark.parametrize("mode", ["chain", "tree:16", "auto"])
def test_a_head_that_is_no_number_is_counted_and_changes_no_text(tmp_path: Path, mode: str, kind: str) -> None:
    plain = llm_of(tmp_path, kind).generate("abcabc", mode="plain", max_tokens=20, ignore_eos=True)
    weights = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(weights)
    tensors["markov_head.markov_w1.weight"][:] = float("nan")
    save_file(tensors, weights)
    done = tiny_llm(tmp_path, weight_format="int8").generate("abcabc", mode=mode, max_tokens=20, ignore_eos=True)
    assert done.token_ids == plain.token_ids
    assert sum(done.stats.drafter_verified_at) == 0 < done.stats.bad_drafts, "only the text itself may draft"


@pytest.mark.skipif(library() is None, reason=availability().reason)
@pytest.mark.parametrize("kind", ["vanilla", "confidence"])
@pytest.mark.parametrize("mode", ["chain", "tree:8", "tree:12:seed"])
def test_compiled_code_proposes_what_the_walk_would(
    tmp_path: Path, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(tmp_path, kind)

    def proposals() -> list[Proposal]:
        events = llm.stream("abcabc", mode=mode, max_tokens=30, ignore_eos=True)
        return [event.step.proposal for event in events if event.step is not None]

    compiled = proposals()
    corrected: list[int] = []
    correct = HeadPass.correct

    def counted(self: HeadPass, slot: int, previous: int, state: Any) -> Any:
        corrected.append(slot)
        return correct(self, slot, previous, state)

    monkeypatch.setattr(HeadPass, "correct", counted)
    assert proposals() == compiled and not corrected
    monkeypatch.setattr("slipstream.speculative.candidates.grower", lambda: None)
    walked = proposals()
    assert corrected
    assert [(each.tokens, each.parents) for each in walked] == [(each.tokens, each.parents) for each in compiled]
    assert max(each.nodes for each in walked) > 3
    for mine, theirs in zip(walked, compiled, strict=True):
        assert mine.claims == pytest.approx(theirs.claims, rel=1e-4)
