"""What some families' drafters have beyond the plain backbone: borrowed scale and softcap, norms, gates, own words."""

# mypy: disable-error-code="operator, unused-ignore"

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from slipstream.engine.block_scoring import OurBlocks
from slipstream.errors import ConfigError, PairError
from slipstream.models.dflash import DFlashDrafter, check_pair, load_drafter
from slipstream.models.dflash_names import canonical_name, gguf_spellings
from tests.families import assert_close, check_speculation, ids_of, load, open_pair, write_family_pair
from tests.models.test_gemma4 import build as build_gemma4
from tests.models.test_laguna import build as build_laguna
from tests.oracles import (
    MASK,
    OurDrafts,
    TheirDrafts,
    edit_config,
    randomised,
    save_model,
    their_taps,
    tiny_drafter,
    tiny_target,
)

TAPS = (0, 3)
CONTEXT = 40


# ---- Gemma: what the target lends


def gemma_blocks(folder: Path, **changes: Any) -> tuple[OurBlocks, Tensor]:
    """Our logits of a block after a text's first tokens, and the authors' with the target's embedding and softcap."""
    target, drafter = build_gemma4(), tiny_drafter(3, taps=TAPS, num_target_layers=4, **changes)
    save_model(target, folder / "target")
    save_model(drafter, folder / "draft")
    blocks = OurBlocks("ours", load(folder / "target"), load_drafter(folder / "draft", "fp32"))
    ids, config = ids_of(CONTEXT + 1), drafter.config.dflash_config
    table = target.model.embed_tokens.weight.detach()
    scale = config.get("input_embedding_scale", 64**0.5)
    hidden = TheirDrafts(drafter, table * scale).block(their_taps(target, ids[:CONTEXT], TAPS), ids[CONTEXT])
    cap = config.get("final_logit_softcapping", 30.0)
    with torch.inference_mode():
        theirs = torch.tanh(target.lm_head(hidden[1:]) / cap) * cap
    blocks.begin(ids)
    return blocks, theirs


@pytest.mark.parametrize("own", [{}, {"input_embedding_scale": 3.0}, {"final_logit_softcapping": 1.5}])
def test_a_gemma_drafter_borrows_scale_and_softcap(own: dict[str, float], tmp_path: Path) -> None:
    speculation = {"target_layer_ids": list(TAPS), "mask_token_id": MASK, **own}
    blocks, theirs = gemma_blocks(tmp_path, dflash_config=speculation)
    assert_close(blocks.block(CONTEXT)[0], theirs)


@pytest.mark.parametrize("fault", ["scale missing", "scale doubled", "softcap missing", "scale of the raw one"])
def test_the_comparison_would_notice(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"input_embedding_scale": 3.0} if fault == "scale of the raw one" else {}
    speculation = {"target_layer_ids": list(TAPS), "mask_token_id": MASK, **own}
    blocks, theirs = gemma_blocks(tmp_path, dflash_config=speculation)
    table = blocks.target.embed
    if fault == "softcap missing":
        blocks.drafter.borrow_softcap(0.0)
    else:
        # with the raw one's, as if the drafter's scale came on top of the target's
        factor = {"scale missing": 1.0, "scale doubled": table.scale**2, "scale of the raw one": table.scale}[fault]
        monkeypatch.setattr(blocks.drafter, "borrow", lambda *borrowed: lambda ids: table.raw(ids) * factor)
        blocks.begin(ids_of(CONTEXT + 1))
    with pytest.raises(AssertionError):
        assert_close(blocks.block(CONTEXT)[0], theirs)


# ---- Laguna: norms of taps and context, gates


def laguna_tensors(per_head: bool, fused: bool) -> dict[str, Tensor]:
    """The authors' drafter with the parts Laguna's have beside it."""
    plain = randomised(tiny_drafter(4, taps=TAPS), 4).state_dict()
    source = torch.Generator().manual_seed(9)
    tensors = {name: one.clone() for name, one in plain.items()}
    for tap in range(len(TAPS)):
        tensors[f"aux_hidden_norms.{tap}.weight"] = 1.0 + 0.3 * torch.randn(64, generator=source)
    for layer in range(2):
        prefix = f"layers.{layer}.self_attn."
        tensors[prefix + "g_proj.weight"] = torch.randn(4 if per_head else 64, 64, generator=source) / 8
        if fused:
            parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in ("q", "k", "v")]
            tensors[prefix + "qkv_proj.weight"] = torch.cat(parts)
    return tensors


def write_laguna_drafter(folder: Path, tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    save_model(tiny_drafter(4, taps=TAPS, num_target_layers=4), folder)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    kind = "sliding_attention"
    edit_config(
        folder,
        layer_types=[kind, kind],
        sliding_window=16,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        **changes,
    )
    return folder


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Half of every head's 16 dimensions turns."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    angles = (positions[:, None] * frequencies)[:, None]
    first, second, rest = x[..., :4], x[..., 4:8], x[..., 8:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def reference_block(tensors: Mapping[str, Tensor], taps: Tensor, embedded: Tensor, without: str = "") -> Tensor:
    """A Laguna drafter's block, written down once more: causal in the block, a window of 16."""
    rows, size = taps.shape[0], embedded.shape[0]
    parts = taps.split(64, dim=-1)
    if without != "tap norms":
        parts = tuple(norm(tap, tensors[f"aux_hidden_norms.{k}.weight"]) for k, tap in enumerate(parts))
    context = norm(torch.cat(parts, dim=-1) @ tensors["fc.weight"].t(), tensors["hidden_norm.weight"])
    positions, x = torch.arange(rows + size), embedded
    queries = positions[rows:, None]
    seen = (positions <= queries) & (queries - positions < 16)
    for layer in range(2):
        own = {name.removeprefix(f"layers.{layer}."): one for name, one in tensors.items()}
        y = norm(x, own["input_layernorm.weight"])
        c = context if without == "context norm" else norm(context, own["input_layernorm.weight"])
        both = torch.cat((c, y))
        q, k, v = (
            (side @ own[f"self_attn.{name}_proj.weight"].t()).view(-1, heads, 16)
            for side, name, heads in ((y, "q", 4), (both, "k", 2), (both, "v", 2))
        )
        q = turned(norm(q, own["self_attn.q_norm.weight"]), positions[rows:]).view(size, 2, 2, 16)
        k = turned(norm(k, own["self_attn.k_norm.weight"]), positions)
        scores = torch.einsum("qgsd,kgd->gsqk", q, k) / 4.0
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        mixed = torch.einsum("gsqk,kgd->qgsd", weights, v).reshape(size, 64)
        gate = F.softplus(y @ own["self_attn.g_proj.weight"].t())
        if without != "gate":
            mixed = (mixed.view(size, gate.shape[1], -1) * gate[..., None]).view(size, 64)
        x = x + mixed @ own["self_attn.o_proj.weight"].t()
        n = norm(x, own["post_attention_layernorm.weight"])
        up = F.silu(n @ own["mlp.gate_proj.weight"].t()) * (n @ own["mlp.up_proj.weight"].t())
        x = x + up @ own["mlp.down_proj.weight"].t()
    return norm(x, tensors["norm.weight"])


def our_block(drafter: DFlashDrafter, table: Tensor, taps: Tensor, anchor: int) -> Tensor:
    ours = OurDrafts(drafter, table)
    state = ours.sequence()
    ours.add(state, taps[:23])
    ours.add(state, taps[23:])
    return ours.blocks([state], [anchor])[0]


@pytest.fixture
def table() -> Tensor:
    return torch.randn(259, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def taps() -> Tensor:
    return torch.randn(CONTEXT, 128, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("weight_format", ["fp32", "native"])
def test_a_laguna_drafter_norms_taps_and_context_and_gates_its_heads(
    per_head: bool, weight_format: Any, table: Tensor, taps: Tensor, tmp_path: Path
) -> None:
    tensors = laguna_tensors(per_head, fused=False)
    path = write_laguna_drafter(tmp_path, laguna_tensors(per_head, fused=True))
    ours = our_block(load_drafter(path, weight_format), table, taps, 5)
    embedded = table[torch.tensor([5, *[MASK] * 7])]
    assert_close(ours, reference_block(tensors, taps, embedded))
    for fault in ("tap norms", "context norm", "gate"):
        with pytest.raises(AssertionError):
            assert_close(ours, reference_block(tensors, taps, embedded, without=fault))


def test_a_laguna_drafter_from_gguf_is_the_same(table: Tensor, taps: Tensor, tmp_path: Path) -> None:
    tensors = laguna_tensors(per_head=True, fused=False)
    twin = load_drafter(write_laguna_drafter(tmp_path / "hf", tensors), "fp32")
    path = write_drafter_gguf(
        tmp_path / "d.gguf", tensors, {"dflash.rope.dimension_count": 8, "dflash.attention.sliding_window": 16}
    )
    ours = load_drafter(path, "fp32")
    assert (ours.config.parts, ours.config.patterns) == (twin.config.parts, twin.config.patterns)
    assert torch.equal(our_block(ours, table, taps, 5), our_block(twin, table, taps, 5))


def write_drafter_gguf(path: Path, tensors: Mapping[str, Tensor], keys: Mapping[str, int | float | str]) -> Path:
    """A drafter under llama.cpp's names and keys; more keys may be given."""
    writer = gguf.GGUFWriter(path, "dflash")
    numbers: dict[str, Any] = {
        "dflash.context_length": 512,
        "dflash.embedding_length": 64,
        "dflash.block_count": 2,
        "dflash.feed_forward_length": 96,
        "dflash.attention.head_count": 4,
        "dflash.attention.head_count_kv": 2,
        "dflash.attention.key_length": 16,
        "dflash.attention.value_length": 16,
        "dflash.vocab_size": 259,
        "dflash.rope.freq_base": 10000.0,
        "dflash.attention.layer_norm_rms_epsilon": 1e-6,
        "dflash.block_size": 8,
        "tokenizer.ggml.mask_token_id": MASK,
        **keys,
    }
    for key, value in numbers.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    writer.add_array("dflash.target_layers", [layer + 1 for layer in TAPS])
    for name, tensor in tensors.items():
        writer.add_tensor(gguf_spellings(canonical_name(name))[0], tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- windows, rotations, biases


def test_a_window_without_a_pattern_is_every_layers(table: Tensor, taps: Tensor, tmp_path: Path) -> None:
    kind = "sliding_attention"
    model = tiny_drafter(5, taps=TAPS, layer_types=[kind, kind], use_sliding_window=True, sliding_window=11)
    save_model(model, tmp_path)
    edit_config(tmp_path, ["layer_types", "use_sliding_window"])
    ours = our_block(load_drafter(tmp_path, "fp32"), table, taps, 7)
    assert_close(ours, TheirDrafts(model, table).block(taps, 7))


def test_yarn_and_biases_of_a_gguf_drafter_are_read(table: Tensor, taps: Tensor, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    model = tiny_drafter(6, taps=TAPS, attention_bias=True, rope_parameters=yarn)
    path = write_drafter_gguf(
        tmp_path / "d.gguf",
        model.state_dict(),
        {
            "dflash.rope.scaling.type": "yarn",
            "dflash.rope.scaling.factor": 4.0,
            "dflash.rope.scaling.original_context_length": 128,
        },
    )
    assert_close(our_block(load_drafter(path, "fp32"), table, taps, 7), TheirDrafts(model, table).block(taps, 7))


def test_layers_that_turn_differently_are_refused(tmp_path: Path) -> None:
    save_model(tiny_drafter(5, taps=TAPS), tmp_path)
    kinds = ["sliding_attention", "full_attention"]
    ropes = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(kinds, (1e4, 1e5), strict=True)}
    edit_config(tmp_path, layer_types=kinds, sliding_window=16, rope_parameters=ropes)
    with pytest.raises(ConfigError, match="turn differently"):
        load_drafter(tmp_path, "fp32")


SLIDING_PAIR = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}


@pytest.mark.parametrize(("own", "causal"), [({}, False), ({"sliding_window_non_causal": False}, None)])
def test_a_checkpoint_of_the_speculators_format_is_the_same(
    own: dict[str, bool], causal: bool | None, table: Tensor, taps: Tensor, tmp_path: Path
) -> None:
    """Layer numbers in a section, taps counted from one, and no layer causal unless it says so."""
    model = tiny_drafter(5, taps=TAPS, use_sliding_window=True, is_causal=causal, **SLIDING_PAIR)
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    inner = {key: value for key, value in config.items() if key not in ("dflash_config", "block_size", "is_causal")}
    verifier = {"architectures": ["Qwen3MoeForCausalLM"], "name_or_path": "somebody/something"}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "speculators_model_type": "dflash",
                "transformer_layer_config": inner,
                "block_size": 8,
                "aux_hidden_state_layer_ids": [layer + 1 for layer in TAPS],
                "mask_token_id": MASK,
                "draft_vocab_size": 259,
                "speculators_config": {"verifier": verifier},
                **own,
            }
        )
    )
    drafter = load_drafter(tmp_path, "fp32")
    assert (drafter.config.target_layer_ids, drafter.config.target_family) == (TAPS, "qwen3_moe")
    assert_close(our_block(drafter, table, taps, 7), TheirDrafts(model, table).block(taps, 7))


# ---- a vocabulary of its own


def reduce_vocabulary(folder: Path, known: Tensor, *, as_offsets: bool = True) -> None:
    path = folder / "model.safetensors"
    head = torch.randn(len(known), 64, generator=torch.Generator().manual_seed(3)) / 4
    stored = known - torch.arange(len(known)) if as_offsets else known
    asked = torch.zeros(259, dtype=torch.bool).index_fill_(0, known.clamp(0, 258), True)
    save_file(load_file(path) | {"lm_head.weight": head, "d2t": stored, "t2d": asked}, path)
    edit_config(folder, draft_vocab_size=len(known))


def test_a_reduced_vocabulary_is_spread_over_the_targets(tmp_path: Path) -> None:
    known = torch.arange(4, 259, 3)
    save_model(tiny_drafter(8, taps=TAPS), tmp_path)
    reduce_vocabulary(tmp_path, known)
    drafter = load_drafter(tmp_path, "fp32")
    assert drafter.head is not None
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    logits = drafter.shape_logits(drafter.head(hidden))
    assert logits.shape == (3, 259)
    assert torch.equal(logits[:, known], drafter.head(hidden))
    assert int(logits.isfinite().sum()) == 3 * len(known)


def test_a_pair_with_a_reduced_vocabulary_speculates(tmp_path: Path) -> None:
    """Words the drafter does not know are never drafted, and the text is the same."""
    pair = write_family_pair(tiny_target("qwen3", 4), tmp_path)
    known = torch.arange(0, 259, 2)
    reduce_vocabulary(pair[1], known)
    llm = open_pair(pair, "native")
    drafter: Any = llm.engine.executor.variants.drafter
    drafted: set[int] = set()
    draft = drafter.draft

    def recording(jobs: Any) -> Any:
        found = draft(jobs)
        drafted.update(*(block.tokens.flatten().tolist() for block in found))
        return found

    drafter.draft = recording
    for mode in ("chain", "tree:16"):
        llm.run([llm.request(ids_of(20), mode=mode, max_tokens=12, ignore_eos=True)])
    assert len(drafted) > 10
    assert drafted <= set(known.tolist())
    drafter.draft = draft
    check_speculation(llm)


@pytest.mark.parametrize(
    ("known", "said"),
    [(torch.tensor([1, 5, 5]), "d2t"), (torch.tensor([1, 5, 259]), "d2t"), (torch.arange(300), "vocabulary of 259")],
)
def test_a_map_that_leads_nowhere_is_refused(known: Tensor, said: str, tmp_path: Path) -> None:
    save_model(tiny_drafter(8, taps=TAPS), tmp_path)
    reduce_vocabulary(tmp_path, known)
    with pytest.raises(ConfigError, match=said):
        load_drafter(tmp_path, "fp32")


# ---- pairs


def test_a_laguna_drafter_is_refused_by_another_family(tmp_path: Path) -> None:
    path = write_laguna_drafter(tmp_path / "draft", laguna_tensors(per_head=True, fused=False))
    drafter = load_drafter(path, "fp32")
    check_pair(load(save_model(build_laguna(), tmp_path / "laguna")).config, drafter)
    with pytest.raises(PairError, match="trained on a 'laguna' target, this one is 'gemma4'"):
        check_pair(load(save_model(build_gemma4(), tmp_path / "gemma")).config, drafter)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_model_type": "qwen3_moe"}, "trained on a 'qwen3_moe' target"),
        ({"num_target_layers": 5}, "a target of 5 layers"),
        ({"vocab_size": 300}, "vocabulary has 300 tokens"),
        ({"dflash_config": {"target_layer_ids": [0, 4], "mask_token_id": MASK}}, "taps layer 4"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 259}}, "mask token 259"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    pair = write_family_pair(build_gemma4(), tmp_path)
    edit_config(pair[1], **changes)
    with pytest.raises(PairError, match=said):
        open_pair(pair, "fp32")


def test_a_drafter_of_another_width_is_refused(tmp_path: Path) -> None:
    pair = write_family_pair(build_laguna(), tmp_path, hidden_size=32)
    with pytest.raises(PairError, match="32 wide"):
        open_pair(pair, "fp32")


def test_a_qwen_pair_behind_a_gemma_pair_behaves_as_if_alone(tmp_path: Path) -> None:
    qwen = write_family_pair(tiny_target("qwen3", 4), tmp_path / "qwen")
    gemma = write_family_pair(build_gemma4(), tmp_path / "gemma")

    def answer(pair: tuple[Path, Path]) -> tuple[list[int], list[int]]:
        llm = open_pair(pair, "native")
        done = llm.run([llm.request(ids_of(30), mode="tree:16", max_tokens=24, ignore_eos=True)])[0]
        return done.token_ids, done.step_sizes

    alone = answer(qwen)
    assert answer(gemma)[0] != alone[0]
    assert answer(qwen) == alone
