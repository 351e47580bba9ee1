"""Qwen3.5 targets, dense and with experts, against `transformers` and llama.cpp; speculation never changes a text."""

# mypy: disable-error-code="attr-defined, operator, unused-ignore"

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from slipstream.bench import rival
from slipstream.cache.cpu.page_pools import KvPools, PoolShape
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS, WeightFormat
from slipstream.engine.cpu.cpu_executor import CpuExecutor
from slipstream.engine.executor import RowWork
from slipstream.errors import ConfigError, FormatError, SlipstreamError
from slipstream.formats.gguf_write import TensorPlan, entries, stored_metadata, write_gguf
from slipstream.formats.weight_files import open_weights
from slipstream.kernels.cpu.native_library import library
from slipstream.models.loading import load_target
from slipstream.tools.convert_plans import tensor_plan
from slipstream.types import Proposal
from tests.families import (
    assert_close,
    check_gguf,
    check_llama_cpp,
    check_logits,
    check_speculation,
    check_taps,
    ids_of,
    load,
    open_pair,
    randomise,
    write_family_pair,
)
from tests.family_gguf import write_family_gguf
from tests.oracles import FOLDER_VOCAB, edit_config, edit_tensors, our_target, save_model, their_logits
from tests.tiny import Driver, assert_idle, page_table

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
SETTINGS: dict[str, Any] = {
    "vocab_size": FOLDER_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": ROPE,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
LINEAR, FULL = "linear_attention", "full_attention"
EXACT: WeightFormat = "native" if library() is not None else "int8"
# name -> whether it has experts, and what differs from four layers of which the last attends
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "dense": (False, {}),
    "pattern": (False, {"num_hidden_layers": 5, "layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR]}),
    "one-key-head": (False, {"num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    "as-many-keys": (False, {"num_key_value_heads": 4, "linear_num_key_heads": 4, "tie_word_embeddings": True}),
    "odd-sizes": (False, {"linear_value_head_dim": 24, "linear_key_head_dim": 8, "linear_conv_kernel_dim": 3}),
    "half-rotary-bias": (False, {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "attention_bias": True}),
    "experts": (True, {}),
    "experts-tied": (True, {"num_experts_per_tok": 1, "tie_word_embeddings": True, "linear_num_value_heads": 2}),
}


def hybrid(variant: str, **changes: Any) -> PreTrainedModel:
    """A small random model whose norms are stored as what they differ from one by."""
    moe, own = VARIANTS[variant]
    kind, config = (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig) if moe else (Qwen3_5ForCausalLM, Qwen3_5TextConfig)
    return centred(randomise(kind(config(**SETTINGS | (EXPERTS if moe else {}) | own | changes)), seed=len(variant)))


def centred(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                weight.sub_(1.0)
            if name.endswith("A_log"):
                weight.sub_(3.0)  # states that remember hundreds of tokens: a wrong one shows for long
        if model.config.tie_word_embeddings:
            model.get_input_embeddings().weight.mul_(0.25)  # as a head it would make logits of twenty
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_however_the_rows_are_cut(variant: str, tmp_path: Path) -> None:
    theirs = hybrid(variant)
    check_logits(load(save_model(theirs, tmp_path)), theirs)


@pytest.mark.parametrize("variant", ["dense", "pattern", "experts"])
def test_taps_are_what_each_layer_leaves(variant: str, tmp_path: Path) -> None:
    theirs = hybrid(variant)
    check_taps(load(save_model(theirs, tmp_path)), theirs)


@pytest.mark.parametrize(("variant", "weight_format"), [("dense", "int8"), ("odd-sizes", EXACT), ("experts", EXACT)])
def test_speculation_keeps_the_text(variant: str, weight_format: WeightFormat, tmp_path: Path) -> None:
    pair = write_family_pair(hybrid(variant), tmp_path)
    check_speculation(open_pair(pair, weight_format))


def test_speculation_keeps_the_text_where_paths_are_run_again(tmp_path: Path) -> None:
    """As for models whose states are too large to keep one after every row."""
    llm = open_pair(write_family_pair(hybrid("pattern"), tmp_path), EXACT)
    tensors = llm.engine.executor.memory.state_tensors
    assert tensors is not None
    tensors.most_kept_rows = 0
    check_speculation(llm)


def test_random_operations_leak_no_state(tmp_path: Path) -> None:
    """Requests in every mode come, go, are cancelled and forked in a pool of few pages."""
    llm = open_pair(write_family_pair(hybrid("dense"), tmp_path), EXACT, check_integrity=False, cache_tokens=1024)
    report = Driver(llm.engine, random.Random(3)).run(120)
    assert report.hits and report.branched and report.done["fork"]
    states = llm.engine.executor.memory.states
    assert states is not None
    states.check([], page_table(llm.engine))
    assert states.checkpoints == []


def test_a_checkpoint_that_sees_loads_its_text_part(tmp_path: Path) -> None:
    """Its text config is nested, its tensors have a prefix, and its eyes and its own drafter are left alone."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=SETTINGS, vision_config=vision))
    theirs = centred(randomise(model, 3))
    save_model(theirs, tmp_path)
    edit_tensors(tmp_path, mtp__fc__weight=torch.zeros(4, 4))
    ids = ids_of(40)
    ((ours, _),) = our_target(load(tmp_path), [ids], 16)
    assert_close(ours, their_logits(theirs, ids))


# ---- states


class Bench:
    """One model in an exact format, and sequences that are moved by hand."""

    def __init__(self, folder: Path, kept_rows: int) -> None:
        self.model = load_target(folder, EXACT).model
        config = self.model.config
        self.table = PageTable(32)
        self.pools = KvPools(32, PAGE_TOKENS, PoolShape(config.kv_shapes, config.states), None)
        assert self.pools.state_tensors is not None
        self.pools.state_tensors.most_kept_rows = kept_rows
        self.executor = CpuExecutor(self.model, None, self.pools, 32, draft_window=0)

    def begin(self, tokens: Sequence[int]) -> SequenceState:
        state = SequenceState(self.table, PAGE_TOKENS, self.pools, False)
        state.start(tokens, [])
        state.reserve(len(tokens) + 32)
        return state

    @torch.inference_mode()
    def extend(self, state: SequenceState, chunk: int) -> Tensor:
        """Computes what is known of a sequence, `chunk` rows at a time; the logits after the last."""
        logits = torch.empty(0)
        while state.length < len(state.tokens):
            rows = state.tokens[state.length : state.length + chunk]
            logits = self.executor.forward([RowWork(state, state.length, rows, 1)]).logits[0]
            state.commit(range(len(rows)), [], 0)
        return logits

    def state(self, state: SequenceState) -> tuple[Tensor, Tensor]:
        tensors = self.pools.state_tensors
        assert tensors is not None and state.recurrent is not None and state.recurrent.slot is not None
        return tensors.windows[state.recurrent.slot], tensors.memories[state.recurrent.slot]


@pytest.mark.parametrize("kept_rows", [0, 10**6])
@pytest.mark.parametrize("variant", ["pattern", "experts"])
def test_a_committed_path_equals_computing_it_from_scratch(variant: str, kept_rows: int, tmp_path: Path) -> None:
    """Bit for bit: the state, and what the model says next; with the state after every row kept, and run again."""
    bench = Bench(save_model(hybrid(variant), tmp_path), kept_rows)
    prompt, draft, parents = ids_of(61), ids_of(12, 5), (-1, 0, 0, 1, 1, 3, 5, 2, 7, 8, 9, 10)
    tried, twin = bench.begin(prompt), bench.begin(prompt)
    for state in (tried, twin):
        bench.extend(state, 64)
    for path in ((0,), (0, 1, 3, 5, 6), (0, 2, 7, 8, 9, 10, 11), tuple(range(9))):
        shape = parents if path != tuple(range(9)) else tuple(range(-1, 11))
        with torch.inference_mode():
            bench.executor.forward([RowWork(tried, tried.length, draft, 12, Proposal(tuple(draft), shape))])
        kept = [draft[row] for row in path]
        tried.tokens += kept
        tried.commit(path, [], 0)
        twin.tokens += kept
        bench.extend(twin, 1)
        for ours, theirs in zip(bench.state(tried), bench.state(twin), strict=True):
            assert torch.equal(ours, theirs)
    forked = tried.fork()
    for state in (tried, twin):
        state.tokens.append(17)
    assert torch.equal(bench.extend(tried, 1), bench.extend(twin, 1))
    forked.tokens.append(17)
    forked.reserve(forked.length + 1)
    bench.extend(forked, 1)
    for ours, theirs in zip(bench.state(forked), bench.state(twin), strict=True):
        assert torch.equal(ours, theirs)


def test_a_cached_prefix_changes_nothing_but_the_work(tmp_path: Path) -> None:
    """Hits at a page's end, at the end of an answer, and where two prompts part; states are neither lost nor leaked."""
    llm = open_pair(write_family_pair(hybrid("dense"), tmp_path), EXACT)
    first = ids_of(150)
    answer = llm.run([llm.request(first, max_tokens=60, ignore_eos=True, mode="chain")])[0]
    prompts = [[*first, *answer.token_ids, 9, 9], [*first[:100], *ids_of(40, 2)], [*first[:70], *ids_of(40, 3)]]
    for mode in ("plain", "chain", "tree:16"):
        for prompt, least in zip(prompts, (192, 64, 64), strict=True):
            settings = {"max_tokens": 12, "ignore_eos": True, "mode": mode}
            cold = llm.run([llm.request(prompt, cache_prompt=False, **settings)])[0]
            warm = llm.run([llm.request(prompt, **settings)])[0]
            assert warm.token_ids == cold.token_ids
            assert (cold.stats.cached_tokens, warm.stats.cached_tokens >= least) == (0, True)
    assert_idle(llm)
    states = llm.engine.executor.memory.states
    assert states is not None and states.checkpoints == []


# ---- GGUF


@pytest.mark.parametrize("variant", ["dense", "as-many-keys", "experts"])
def test_logits_match_from_gguf(variant: str, tmp_path: Path) -> None:
    check_gguf(hybrid(variant), tmp_path / "model.gguf")


def test_a_drafter_of_the_models_own_is_left_alone(tmp_path: Path) -> None:
    """llama.cpp's files may have one more block, which only llama.cpp can use."""
    theirs = hybrid("dense")
    path = write_family_gguf(theirs, tmp_path / "model.gguf")
    ones = TensorPlan("blk.4.nextn.enorm.weight", "F32", (64,), lambda: [np.ones(64, "<f4").tobytes()])
    told = entries({"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1})
    with open_weights(path) as file:
        tensors = [tensor_plan(tensor.name, tensor, tensor.type_name) for tensor in map(file.tensor, file.names())]
        write_gguf(tmp_path / "more.gguf", stored_metadata(path) | told, [*tensors, ones])
    check_logits(load(tmp_path / "more.gguf"), theirs, chunks=())


@pytest.mark.skipif(not rival.available(), reason="xllamacpp is not installed")
@pytest.mark.parametrize("variant", ["dense", "pattern", "experts"])
def test_llama_cpp_reads_the_same_file_the_same_way(variant: str, tmp_path: Path) -> None:
    check_llama_cpp(write_family_gguf(hybrid(variant), tmp_path / "model.gguf"))


# ---- what is refused


def refusal(path: Path, kind: type[SlipstreamError]) -> str:
    with pytest.raises(kind) as caught:
        load_target(path, "fp32")
    return caught.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads evenly"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads"),
        ({"layer_types": [LINEAR] * 3}, "must name 4 layers"),
        ({"layer_types": [LINEAR, LINEAR, "sliding_attention", FULL]}, "each one of linear_attention"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"linear_conv_kernel_dim": 3}, "'model.layers.0.linear_attn.conv1d.weight' has shape [128, 1, 4]"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_model(hybrid("dense"), tmp_path)
    edit_config(tmp_path, **change)
    assert said in refusal(tmp_path, ConfigError)


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    save_model(hybrid("dense"), tmp_path)
    edit_tensors(tmp_path, model__layers__1__linear_attn__sinks=torch.zeros(4))
    assert "model.layers.1.linear_attn.sinks" in refusal(tmp_path, ConfigError)
    edit_tensors(tmp_path, ["model.layers.1.linear_attn.sinks", "model.layers.2.linear_attn.A_log"])
    assert "'model.layers.2.linear_attn.A_log'" in refusal(tmp_path, FormatError)
