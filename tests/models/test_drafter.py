"""The drafter against the authors' own model: hidden rows of a block, whatever the context and however it came in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from torch import Tensor

from slipstream.models.dflash import load_drafter
from tests.oracles import (
    FOLDER_VOCAB,
    MASK,
    SHIPPED_DRAFTER,
    TOLERANCE,
    OurDrafts,
    TheirDrafts,
    drafter_from_gguf,
    edit_config,
    save_model,
    tiny_drafter,
)

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def kinds(*layers: str, window: int = 20, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(layers),
        "layer_types": list(layers),
        "use_sliding_window": True,
        "sliding_window": window,
        **more,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": kinds(SLIDING, SLIDING),
    "mixed": kinds(SLIDING, FULL, SLIDING),
    "window-inside-the-block": kinds(SLIDING, FULL, window=5),
    "window-of-a-page": kinds(FULL, SLIDING, window=64),
    "full-causal": {"is_causal": True},
    "sliding-both-sides": kinds(SLIDING, FULL, is_causal=False),
    "narrow-both-sides": kinds(SLIDING, SLIDING, window=4, is_causal=False),
    "bias": {"attention_bias": True},
    "bias-mixed": kinds(SLIDING, FULL, attention_bias=True),
    "mqa-wide-heads": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 96},
    "yarn": {"rope_parameters": YARN},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
    "three-taps": {"block_size": 5, "dflash_config": {"target_layer_ids": [2, -1, 0], "mask_token_id": MASK}},
}
# how many positions of context come in before each block
INSTALMENTS = {
    "at-once": (30,),
    "step-by-step": (17, 1, 4, 8, 1),
    "across-a-page": (60, 3, 1, 2, 5),
    "onto-a-page": (56, 8, 8),
    "long": (130, 7, 70),
    "one": (1, 1),
}


def table(width: int, vocab: int = FOLDER_VOCAB) -> Tensor:
    return torch.randn(vocab, width, generator=torch.Generator().manual_seed(5))


def taps(model: DFlashDraftModel, count: int, seed: int = 9) -> Tensor:
    """Taps of uneven size, as those of real targets are."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, model.fc.in_features, generator=generator)
    return rows * torch.rand(count, 1, generator=generator).mul(6).exp()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float(theirs.std()) > 0.2
    assert float((ours - theirs).abs().max()) < TOLERANCE


@pytest.mark.parametrize("instalments", INSTALMENTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_rows_match(variant: str, instalments: str, tmp_path: Path) -> None:
    model = tiny_drafter(seed=len(variant), **VARIANTS[variant])
    embedding = table(model.config.hidden_size)
    ours = OurDrafts(load_drafter(save_model(model, tmp_path), "fp32"), embedding)
    theirs = TheirDrafts(model, embedding)
    state, other = ours.sequence(), ours.sequence()
    every = taps(model, sum(INSTALMENTS[instalments]))
    for step, count in enumerate(INSTALMENTS[instalments]):
        rows = every[state.length : state.length + count]
        ours.add(state, rows)
        other.reserve(state.capacity)  # takes the next page, so that the sequence's own pages are no neighbours
        (hidden,) = ours.blocks([state], [step + 7])
        assert_close(hidden, theirs.block(rows, step + 7))


@pytest.mark.parametrize("variant", ["full", "mixed", "full-causal"])
def test_hidden_rows_match_without_any_cache(variant: str, tmp_path: Path) -> None:
    """The authors' model without a cache sees the whole context anew; ours keeps it from block to block."""
    model = tiny_drafter(seed=3, **VARIANTS[variant])
    embedding = table(model.config.hidden_size)
    ours = OurDrafts(load_drafter(save_model(model, tmp_path), "fp32"), embedding)
    state, every = ours.sequence(), taps(model, 90)
    for stop in (1, 50, 63, 64, 90):
        ours.add(state, every[state.length : stop])
        (hidden,) = ours.blocks([state], [11])
        assert_close(hidden, TheirDrafts(model, embedding).windowed_block(every[:stop], 11, window=1000))


@pytest.mark.parametrize("variant", ["full", "mixed", "sliding", "full-causal"])
@pytest.mark.parametrize("window", [1, 10, 64, 100])
def test_a_draft_window_hides_all_earlier_context(variant: str, window: int, tmp_path: Path) -> None:
    model = tiny_drafter(seed=4, **VARIANTS[variant])
    embedding = table(model.config.hidden_size)
    ours = OurDrafts(load_drafter(save_model(model, tmp_path), "fp32"), embedding, window=window)
    theirs = TheirDrafts(model, embedding)
    state, every = ours.sequence(), taps(model, 200)
    for stop in (8, 66, 128, 200):
        ours.add(state, every[state.length : stop])
        (hidden,) = ours.blocks([state], [11])
        assert_close(hidden, theirs.windowed_block(every[:stop], 11, window))


@pytest.mark.parametrize("variant", ["full", "mixed", "bias"])
def test_sequences_in_one_pass_do_not_touch_each_other(variant: str, tmp_path: Path) -> None:
    model = tiny_drafter(seed=6, **VARIANTS[variant])
    embedding = table(model.config.hidden_size)
    ours = OurDrafts(load_drafter(save_model(model, tmp_path), "fp32"), embedding)
    states = [ours.sequence() for _ in range(4)]
    theirs = [TheirDrafts(model, embedding) for _ in states]
    contexts = [taps(model, 140, seed=seed) for seed in range(4)]
    for counts in ((1, 40, 61, 64), (5, 30, 2, 1), (58, 1, 8, 3)):
        fresh = []
        for state, context, count in zip(states, contexts, counts, strict=True):
            fresh.append(context[state.length : state.length + count])
            ours.add(state, fresh[-1])
        hidden = ours.blocks(states, [20, 21, 22, 23])
        for index, rows in enumerate(hidden):
            assert_close(rows, theirs[index].block(fresh[index], 20 + index))


def test_swa_flags_mean_sliding_on_both_sides(tmp_path: Path) -> None:
    """`use_swa` without `layer_types` is what the authors' model computes for non-causal sliding layers."""
    model = tiny_drafter(seed=8, **kinds(SLIDING, SLIDING, window=6, is_causal=False))
    save_model(model, tmp_path)
    nested = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    edit_config(
        tmp_path,
        ["layer_types", "is_causal", "sliding_window", "use_sliding_window"],
        dflash_config=nested | {"use_swa": True, "swa_window_size": 6},
    )
    embedding = table(64)
    ours, theirs = OurDrafts(load_drafter(tmp_path, "fp32"), embedding), TheirDrafts(model, embedding)
    state, every = ours.sequence(), taps(model, 30)
    for start, stop in ((0, 25), (25, 30)):
        ours.add(state, every[start:stop])
        (hidden,) = ours.blocks([state], [4])
        assert_close(hidden, theirs.block(every[start:stop], 4))


def test_the_shipped_drafter_matches(tmp_path: Path) -> None:
    """Our GGUF, read by us and by the `gguf` package into the authors' model."""
    model = drafter_from_gguf(SHIPPED_DRAFTER)
    embedding = 0.1 * table(576, 64)
    ours, theirs = OurDrafts(load_drafter(SHIPPED_DRAFTER, "fp32"), embedding), TheirDrafts(model, embedding)
    state, every = ours.sequence(), 0.05 * taps(model, 90)
    for start, stop in ((0, 50), (50, 57), (57, 90)):
        ours.add(state, every[start:stop])
        (hidden,) = ours.blocks([state], [33])
        assert_close(hidden, theirs.block(every[start:stop], 33))
