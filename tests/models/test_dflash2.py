"""DFlash 2 against the authors' own model: hidden rows through the in-block convolutions, and the greedy proposals."""

# mypy: disable-error-code="arg-type, call-arg, unused-ignore"

from __future__ import annotations

from pathlib import Path
from typing import Any

import dflash.model as authors
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from slipstream.config import PAGE_TOKENS
from slipstream.errors import ConfigError, FormatError
from slipstream.kernels.rows import RowBatch, RowPlaces, make_group
from slipstream.models.dflash import DFlashDrafter, load_drafter
from tests.oracles import FOLDER_VOCAB, MASK, TOLERANCE, TheirDrafts, edit_config, edit_tensors, randomised, save_model

SLIDING, FULL = "sliding_attention", "full_attention"
PARTS = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
# changes of the speculation keys, then of the others
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one-tap": ({"conv_kernel_size": 1}, {}),
    "a-group-per-channel": ({"conv_kernel_size": 4, "conv_group_size": 1}, {}),
    "one-group": ({"conv_group_size": 64}, {}),
    "kernel-as-wide-as-the-block": ({"conv_kernel_size": 4}, {"block_size": 4}),
    "sliding": ({}, {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 5}),
    "shaped-logits": (
        {"input_embedding_scale": 0.5, "output_multiplier": 0.7, "final_logit_softcapping": 3.0, "selector_top_k": 9},
        {},
    ),
}


def tiny_dflash2(nested: dict[str, Any], top: dict[str, Any], seed: int = 0) -> authors.DFlash2DraftModel:
    settings: dict[str, Any] = {
        "vocab_size": FOLDER_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "block_size": 8,
        "num_target_layers": 3,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK, **PARTS, **nested},
    } | top
    model = randomised(authors.DFlash2DraftModel(Qwen3Config(**settings)), seed)
    with torch.no_grad():
        # large enough for the selector to overrule the drafter's own favourite now and then
        model.candidate_selector.hidden_projection.weight.mul_(3.0)
    return model


class OurBlocks:
    """Our drafter over pools of its own: sequences with context of different lengths, their blocks in one pass."""

    def __init__(self, drafter: DFlashDrafter, table: Tensor) -> None:
        config = drafter.config
        self.drafter = drafter
        self._table = table
        shape = (config.layers, 16, config.kv_heads, PAGE_TOKENS, config.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)

    @torch.inference_mode()
    def run(self, contexts: list[Tensor], anchors: list[int]) -> list[Tensor]:
        config, size = self.drafter.config, self.drafter.config.block_size
        pages = [[4 * index + 3, 4 * index + 1] for index in range(len(contexts))]
        rows: list[tuple[int, int, int, int]] = []  # token, position, page, offset
        for own, taps, anchor in zip(pages, contexts, anchors, strict=True):
            length = len(taps)
            places = [(own[position // PAGE_TOKENS], position % PAGE_TOKENS) for position in range(length + size)]
            context = RowPlaces(range(length), *zip(*places[:length], strict=True), length)
            self.drafter.write_context(taps, context, self._keys, self._values)
            for slot, place in enumerate(places[length:]):
                rows.append((anchor if slot == 0 else MASK, length + slot, *place))
        columns = torch.tensor(rows).t()
        groups = {
            pattern: [
                make_group(index * size, range(len(taps), len(taps) + size), pages[index], PAGE_TOKENS, pattern)
                for index, taps in enumerate(contexts)
            ]
            for pattern in dict.fromkeys(config.patterns)
        }
        batch = RowBatch(columns[0], columns[1], columns[2], columns[3], int(columns[1].max()) + 1, groups)
        hidden, _ = self.drafter.forward_logits(self._table[columns[0]], batch, self._keys, self._values)
        return list(hidden.split(size))


def greedy_proposals(drafter: DFlashDrafter, hidden: Tensor, head: nn.Linear, anchor: int) -> list[int]:
    heads = drafter.heads
    assert heads is not None and heads.candidate_limit is not None
    hidden = hidden[drafter.config.first_slot :]
    unary, candidates = torch.topk(drafter.shape_logits(head(hidden)), heads.candidate_limit, dim=-1)
    walk, previous, chosen = heads.begin(hidden, candidates), anchor, []
    state = None
    for slot in range(drafter.config.proposals):
        added, state = walk.correct(slot, previous, state)
        previous = int(candidates[slot, int(np.argmax(unary[slot].numpy() + added))])
        chosen.append(previous)
    return chosen


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_rows_and_proposals_match(variant: str, tmp_path: Path) -> None:
    nested, top = VARIANTS[variant]
    generator = torch.Generator().manual_seed(len(variant))
    table = torch.randn(FOLDER_VOCAB, 64, generator=generator)
    head = nn.Linear(64, FOLDER_VOCAB, bias=False)
    head.weight.copy_(torch.randn(FOLDER_VOCAB, 64, generator=generator) / 8)
    model = tiny_dflash2(nested, top, seed=len(variant))
    drafter = load_drafter(save_model(model, tmp_path), "fp32")
    assert (drafter.config.first_slot, drafter.config.proposals) == (1, model.block_size - 1)
    contexts = [torch.randn(length, 128, generator=generator) for length in (1, 40, 62, 9)]
    anchors = [20, 21, 22, 20]
    ours = OurBlocks(drafter, table).run(contexts, anchors)
    scale = nested.get("input_embedding_scale", 1.0)
    overruled = 0
    for hidden, taps, anchor in zip(ours, contexts, anchors, strict=True):
        theirs = TheirDrafts(model, table * scale).block(taps, anchor)
        assert float(theirs.std()) > 0.2
        assert float((hidden - theirs).abs().max()) < TOLERANCE
        path, _, _ = model.propose(theirs[None, 1:], torch.tensor([anchor]), head, 0.0)
        assert greedy_proposals(drafter, hidden, head, anchor) == path[0].tolist()
        overruled += int((head(theirs[1:]).argmax(dim=-1) != path[0]).sum())
    assert overruled > 0


@torch.inference_mode()
def test_every_row_proposes_when_the_block_starts_at_the_anchor(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(FOLDER_VOCAB, 64, generator=generator)
    head = nn.Linear(64, FOLDER_VOCAB, bias=False)
    model = tiny_dflash2({"sample_from_anchor": True}, {})
    drafter = load_drafter(save_model(model, tmp_path), "fp32")
    assert (drafter.config.first_slot, drafter.config.proposals) == (0, 8)
    taps = torch.randn(30, 128, generator=generator)
    (hidden,) = OurBlocks(drafter, table).run([taps], [25])
    path, _, _ = model.propose(TheirDrafts(model, table).block(taps, 25)[None], torch.tensor([25]), head, 0.0)
    assert greedy_proposals(drafter, hidden, head, 25) == path[0].tolist()


@torch.inference_mode()
def test_blocks_in_one_pass_do_not_reach_into_each_other(tmp_path: Path) -> None:
    """The first row of a block stands right after the last row of its neighbour in the batch."""
    drafter = load_drafter(save_model(tiny_dflash2({}, {}), tmp_path), "fp32")
    table = torch.randn(FOLDER_VOCAB, 64, generator=torch.Generator().manual_seed(1))
    taps = torch.randn(30, 128, generator=torch.Generator().manual_seed(2))
    together = OurBlocks(drafter, table).run([taps[:7], taps], [9, 25])
    (alone,) = OurBlocks(drafter, table).run([taps], [25])
    assert float((together[1] - alone).abs().max()) < TOLERANCE


def test_codebooks_may_be_bare_parameters(tmp_path: Path) -> None:
    """As the published checkpoints have them; the package's own `save_pretrained` appends `.weight`."""
    model = tiny_dflash2({}, {})
    save_model(model, tmp_path)
    names = [f"candidate_selector.{kind}_codebook" for kind in ("predecessor", "successor")]
    state = model.state_dict()
    edit_tensors(tmp_path, [f"{name}.weight" for name in names], **{name: state[f"{name}.weight"] for name in names})
    heads = load_drafter(tmp_path, "fp32").heads
    assert heads is not None and heads.candidate_limit == 4


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("conv_kernel_size", 2, "'conv_kernel_size' is 2 but the weights say 3"),
        ("conv_group_size", 16, "'conv_group_size' is 16 but the weights say 8"),
        ("selector_rank", 5, "'selector_rank' is 5 but the weights say 6"),
        ("selector_top_k", None, "selector_top_k"),
        ("selector_top_k", 0, "selector_top_k"),
    ],
)
def test_keys_at_odds_with_the_weights_are_refused(key: str, value: object, said: str, tmp_path: Path) -> None:
    model = tiny_dflash2({}, {})
    save_model(model, tmp_path)
    edit_config(tmp_path, dflash_config={**model.config.dflash_config, key: value})
    with pytest.raises(ConfigError, match=said):
        load_drafter(tmp_path, "fp32")


def test_shapes_stand_in_for_missing_keys(tmp_path: Path) -> None:
    model = tiny_dflash2({}, {})
    save_model(model, tmp_path)
    nested = model.config.dflash_config
    edit_config(
        tmp_path, dflash_config={key: nested[key] for key in ("target_layer_ids", "mask_token_id", "selector_top_k")}
    )
    parts = load_drafter(tmp_path, "fp32").config.parts
    assert {key: getattr(parts, key) for key in PARTS} == PARTS


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.mlp_conv.base_kernel",
        "layers.1.attention_conv.kernel_projection.weight",
        "candidate_selector.successor_codebook.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    save_model(tiny_dflash2({}, {}), tmp_path)
    edit_tensors(tmp_path, [name])
    with pytest.raises(FormatError, match=name.replace(".", r"\.")):
        load_drafter(tmp_path, "fp32")
