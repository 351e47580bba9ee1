"""The independent implementations with which our models are compared, and small harnesses that run ours beside them.

`transformers` is the oracle of the targets; the authors' `dflash` package is that of the drafter and of the whole loop.
"""

# mypy: disable-error-code="assignment, call-arg, index, operator, unused-ignore"

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import dflash.model as authors
import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from slipstream import LLM
from slipstream.bench.workloads import PUBLIC
from slipstream.cache.cpu.page_pools import KvPools, PoolShape
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.cpu.cpu_blocks import CpuBlocks
from slipstream.engine.cpu.cpu_executor import CpuExecutor
from slipstream.engine.executor import RowWork
from slipstream.engine.llm import Completion
from slipstream.kernels.rows import RowPlaces
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.draft import DraftJob
from slipstream.speculative.sampling import RowSampler
from slipstream.types import Mode, SamplingParams
from tests.helpers_models import byte_alphabet, smollm2_path

logging.disable_progress_bar()

_Model = TypeVar("_Model", bound=nn.Module)
TOLERANCE = 1e-4
PROMPTS = Path(__file__).parents[1] / "src" / "slipstream" / "data" / "prompts"
SHIPPED_DRAFTER = PROMPTS.parent / "smollm2-135m-dflash.Q8_0.gguf"
FOLDER_VOCAB = 259  # three special tokens and 256 bytes
MASK = 2


# ---- tiny targets


def tiny_target(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A small random llama or qwen3 in which every weight matters, because norms and biases are random too."""
    settings: dict[str, Any] = {
        "vocab_size": FOLDER_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
    } | changes
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[family]
    return randomised(model(config(**settings)), seed)


def randomised(model: _Model, seed: int) -> _Model:
    """Fills a model with random weights of a size that makes wrong arithmetic visible: outputs of order 1 to 10."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 2:
                weight.copy_(noise if "embed_tokens" in name else noise / math.sqrt(weight.shape[1]))
            else:
                weight.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
    return model.eval()


def save_model(model: PreTrainedModel, folder: Path, shard_size: str = "5GB") -> Path:
    """Saves the model as a Hugging Face folder of safetensors."""
    model.save_pretrained(folder, safe_serialization=True, max_shard_size=shard_size)
    return folder


def edit_config(folder: Path, drop: Sequence[str] = (), **changes: Any) -> None:
    """Changes or removes top-level keys of a folder's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))


def edit_tensors(folder: Path, drop: Sequence[str] = (), **changes: Tensor) -> None:
    """Changes or removes tensors of a folder's model.safetensors; `__` in a name means a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value.contiguous() for name, value in tensors.items() if name not in drop}, path)


def write_target_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: str = "F32",
    *,
    drop: Sequence[str] = (),
    without_theta: bool = False,
    rotary_dim: int | None = None,
    extra: Sequence[str] = (),
) -> None:
    """Writes a target like llama.cpp's converter, and sets the values of `model` to those that the file then holds."""
    config = model.config
    arch, layers = config.model_type, config.num_hidden_layers
    rope = config.rope_parameters
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(rotary_dim or config.head_dim)
    if not without_theta:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", np.asarray(_llama3_factors(rope, config.head_dim), np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], layers)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stored = gguf.GGMLQuantizationType[kind if weight.dim() == 2 else "F32"]
        raw = gguf.quants.quantize(weight.numpy().copy(), stored)
        values = np.asarray(gguf.quants.dequantize(raw, stored), np.float32).reshape(weight.shape)
        weight.copy_(torch.from_numpy(values))
        if arch == "llama" and ".self_attn.q_proj." in name:
            raw = _interleave(raw, config.num_attention_heads)
        if arch == "llama" and ".self_attn.k_proj." in name:
            raw = _interleave(raw, config.num_key_value_heads)
        file_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert file_name is not None, name
        if file_name not in drop:
            writer.add_tensor(file_name, raw, raw_dtype=None if stored.name == "F32" else stored)
    for name in extra:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores the rows of a llama's query and key projections."""
    return np.ascontiguousarray(
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def _llama3_factors(rope: dict[str, Any], dim: int) -> list[float]:
    """The divisors that llama.cpp's converter writes for llama3 scaling."""
    factors = []
    for index in range(0, dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (index / dim))
        if turns > rope["high_freq_factor"]:
            factors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


@torch.inference_mode()
def their_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """The logits of transformers at every position, [tokens, vocabulary]."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


@torch.inference_mode()
def their_taps(model: PreTrainedModel, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The residual stream after each layer, read by forward hooks; -1 is the embedding."""
    seen: dict[int, Tensor] = {}

    def record(index: int) -> Any:
        def hook(_: nn.Module, __: object, output: Any) -> None:
            seen[index] = (output[0] if isinstance(output, tuple) else output)[0].clone()

        return hook

    modules = {-1: model.model.embed_tokens} | dict(enumerate(model.model.layers))
    handles = [module.register_forward_hook(record(index)) for index, module in modules.items()]
    model(torch.tensor([list(ids)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.cat([seen[layer] for layer in layers], dim=-1)


@torch.inference_mode()
def our_target(
    model: Decoder, prompts: Sequence[Sequence[int]], chunk: int = 10**6, taps: Sequence[int] = ()
) -> list[tuple[Tensor, Tensor]]:
    """Runs prompts together through the runner, `chunk` rows of each per forward; returns logits and taps of every row.

    Pages are taken when they are needed, so that the pages of one prompt lie between those of the others.
    """
    shape = model.config
    pages = sum(-(-len(ids) // PAGE_TOKENS) for ids in prompts)
    table = PageTable(pages)
    pools = KvPools(pages, PAGE_TOKENS, PoolShape(shape.kv_shapes, shape.states), None)
    executor = CpuExecutor(model, None, pools, pages, draft_window=0)
    executor.tapped_layers = tuple(taps)
    states = [SequenceState(table, PAGE_TOKENS, pools, bool(taps)) for _ in prompts]
    for state, ids in zip(states, prompts, strict=True):
        state.start(ids, [])
    logits: list[list[Tensor]] = [[] for _ in prompts]
    recorded: list[list[Tensor]] = [[] for _ in prompts]
    while running := [index for index, state in enumerate(states) if state.length < len(state.tokens)]:
        works = []
        for index in running:
            state = states[index]
            known = state.tokens[state.length : state.length + chunk]
            state.reserve(state.length + len(known))
            works.append(RowWork(state, state.length, known, len(known)))
        result = executor.forward(works)
        for item, index in enumerate(running):
            rows = works[item].rows
            logits[index].append(result.logits[item])
            if result.taps is not None:
                recorded[index].append(result.taps[result.starts[item] : result.starts[item] + rows])
            states[index].commit(range(rows), [], rows if taps else 0)
    none = torch.empty(0)
    return [(torch.cat(a), torch.cat(b) if b else none) for a, b in zip(logits, recorded, strict=True)]


# ---- tiny drafters


def tiny_drafter(seed: int = 0, *, taps: Sequence[int] = (0, 1), **changes: Any) -> authors.DFlashDraftModel:
    """The authors' drafter for the tiny targets, with random weights."""
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
        "dflash_config": {"target_layer_ids": list(taps), "mask_token_id": MASK},
    } | changes
    return randomised(authors.DFlashDraftModel(Qwen3Config(**settings)), seed)


def drafter_from_gguf(path: Path) -> authors.DFlashDraftModel:
    """The authors' drafter with the weights of a GGUF file, which the `gguf` package reads and dequantises."""
    reader = gguf.GGUFReader(path)
    keys = {name: item.contents() for name, item in reader.fields.items() if not name.startswith("GGUF.")}
    config = Qwen3Config(
        vocab_size=keys["dflash.vocab_size"],
        hidden_size=keys["dflash.embedding_length"],
        intermediate_size=keys["dflash.feed_forward_length"],
        num_hidden_layers=keys["dflash.block_count"],
        num_attention_heads=keys["dflash.attention.head_count"],
        num_key_value_heads=keys["dflash.attention.head_count_kv"],
        head_dim=keys["dflash.attention.key_length"],
        rms_norm_eps=keys["dflash.attention.layer_norm_rms_epsilon"],
        rope_theta=keys["dflash.rope.freq_base"],
        block_size=keys["dflash.block_size"],
        num_target_layers=keys["slipstream.num_target_layers"],
        dflash_config={
            "target_layer_ids": [layer - 1 for layer in keys["dflash.target_layers"]],
            "mask_token_id": keys["tokenizer.ggml.mask_token_id"],
        },
    )
    assert config.rope_parameters["rope_theta"] == keys["dflash.rope.freq_base"]
    model = authors.DFlashDraftModel(config)
    state = {
        _drafter_name(tensor.name): torch.from_numpy(
            np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).copy()
        )
        for tensor in reader.tensors
    }
    model.load_state_dict(state, strict=True)
    return model.eval()


def _drafter_name(name: str) -> str:
    whole = {
        "fc.weight": "fc.weight",
        "enc.output_norm.weight": "hidden_norm.weight",
        "output_norm.weight": "norm.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, module, kind = name.split(".")
    modules = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    return f"layers.{layer}.{modules[module]}.{kind}"


class TheirDrafts:
    """One sequence in the authors' drafter: context is added in parts, and the cache is cropped as they crop it."""

    def __init__(self, model: authors.DFlashDraftModel, embedding: Tensor) -> None:
        self.model = model
        self._embedding = embedding
        self._cache: DynamicCache = authors._make_cache(model.config)
        self._length = 0

    @torch.inference_mode()
    def block(self, taps: Tensor, anchor: int) -> Tensor:
        """Adds the taps of the next positions to the context, and returns the hidden rows of a block after it."""
        size, start = self.model.block_size, self._length + taps.shape[0]
        ids = torch.tensor([anchor, *[self.model.mask_token_id] * (size - 1)])
        hidden = self.model(
            target_hidden=taps[None],
            noise_embedding=self._embedding[ids][None],
            position_ids=torch.arange(self._length, start + size)[None],
            past_key_values=self._cache,
            use_cache=True,
        )
        authors._crop_to(self._cache, start)
        self._length = start
        return hidden[0]

    @torch.inference_mode()
    def windowed_block(self, taps: Tensor, anchor: int, window: int) -> Tensor:
        """The block after all of `taps` if only the last `window` positions are visible; it uses no cache."""
        size, start = self.model.block_size, taps.shape[0]
        first = max(0, start - window)
        ids = torch.tensor([anchor, *[self.model.mask_token_id] * (size - 1)])
        return self.model(
            target_hidden=taps[None, first:],
            noise_embedding=self._embedding[ids][None],
            position_ids=torch.arange(first, start + size)[None],
        )[0]


class _Table:
    """An embedding that a drafter can borrow, with the scale that a test needs."""

    def __init__(self, rows: Tensor, scale: float = 1.0) -> None:
        self._rows = rows
        self._scale = scale

    def __call__(self, ids: Tensor) -> Tensor:
        return self._rows[ids] * self._scale

    def raw(self, ids: Tensor) -> Tensor:
        return self._rows[ids]


class OurDrafts:
    """Any number of sequences in our drafter, laid out by the engine's own block drafter."""

    def __init__(self, drafter: DFlashDrafter, embedding: Tensor, window: int = 0, pages: int = 64) -> None:
        config = drafter.config
        shape = PoolShape.alike(config.layers, config.kv_heads, config.head_dim)
        self.pools = KvPools(pages, PAGE_TOKENS, PoolShape.alike(0, 1, 1), shape)
        self._table = PageTable(pages)
        target: Any = SimpleNamespace(
            embed=_Table(embedding), draft_head=lambda hidden: hidden, config=SimpleNamespace(softcap=0.0)
        )
        self._blocks = CpuBlocks(target, drafter, self.pools, window)
        self._size, self._slots = config.block_size, config.proposals
        self._seen: list[Tensor] = []
        forward = drafter.forward_logits

        def recording(*arguments: Any) -> tuple[Tensor, Tensor]:
            found = forward(*arguments)
            self._seen.append(found[0])
            return found

        drafter.forward_logits = recording  # type: ignore[method-assign]

    def sequence(self) -> SequenceState:
        return SequenceState(self._table, PAGE_TOKENS, self.pools, True)

    @torch.inference_mode()
    def add(self, state: SequenceState, taps: Tensor) -> None:
        """Writes the draft context of the next positions."""
        start, stop = state.length, state.length + taps.shape[0]
        state.reserve(stop + self._size)
        pages, offsets = zip(*[state.place(position) for position in range(start, stop)], strict=True)
        places = RowPlaces(range(start, stop), pages, offsets, stop)
        self._blocks.drafter.write_context(taps, places, self.pools.draft_keys, self.pools.draft_values)
        state.commit(range(stop - start), [0] * (stop - start), stop - start)

    @torch.inference_mode()
    def blocks(self, states: Sequence[SequenceState], anchors: Sequence[int]) -> list[Tensor]:
        """The hidden rows of one block after each sequence, computed in one pass."""
        jobs = []
        for state, anchor in zip(states, anchors, strict=True):
            state.tokens = [*state.tokens[: state.length], anchor]
            jobs.append(DraftJob(state, RowSampler(SamplingParams(), 8, [], True), self._slots, candidates=1))
        self._blocks.draft(jobs)
        for state in states:
            del state.tokens[state.length :]
        return list(self._seen[-1].split(self._size))


# ---- the loop


def save_tokenizer(folder: Path) -> None:
    """Saves a byte-level tokenizer of FOLDER_VOCAB tokens beside a tiny model."""
    tokens = ["<|endoftext|>", "<|im_end|>", "<|mask|>", *byte_alphabet()]
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


@contextmanager
def _clock_without_a_gpu() -> Iterator[None]:
    with patch.object(authors, "_cuda_time", time.perf_counter):
        yield


@dataclass(frozen=True)
class Loop:
    """The tokens that a loop wrote after the prompt, and how many each verify step committed."""

    token_ids: list[int]
    step_sizes: list[int]


def their_loop(
    target: PreTrainedModel,
    drafter: authors.DFlashDraftModel,
    ids: Sequence[int],
    tokens: int,
    stop: Sequence[int] = (),
) -> Loop:
    """Runs the authors' own greedy generation."""
    with _clock_without_a_gpu():
        done = authors.dflash_generate(
            drafter, target, torch.tensor([list(ids)]), tokens, list(stop) or None, return_stats=True
        )
    return Loop(done.output_ids[0, len(ids) :].tolist(), list(done.acceptance_lengths))


def full_block_steps(loop: Loop | Completion, tokens: int, block: int) -> list[int]:
    """The sizes of the steps that began where a whole block still fitted before the limit of `tokens`.

    Nearer to the limit the authors shorten the draft block itself, so that its rows see fewer masks than ours.
    """
    sizes, generated = [], 1
    for size in loop.step_sizes:
        if generated > tokens - block + 1:
            break
        sizes.append(size)
        generated += size
    return sizes


def predictable_target(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny target of few words whose next word depends mostly on the last, so that a drafter can learn some of it."""
    target = tiny_target(family, seed)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
            layer.mlp.down_proj.weight.mul_(0.5)
        target.lm_head.weight[3:23].mul_(3.0)
    return target


def train_drafter(
    drafter: authors.DFlashDraftModel, target: PreTrainedModel, seed: int = 0, steps: int = 120
) -> authors.DFlashDraftModel:
    """Trains a drafter for a few seconds on the target's greedy text, so that some drafts are right and some wrong."""
    torch.manual_seed(seed)
    prompts = torch.randint(3, FOLDER_VOCAB, (64, 6))
    with torch.no_grad():
        text = target.generate(prompts, max_new_tokens=34, do_sample=False, pad_token_id=0)
        states = target(text, output_hidden_states=True).hidden_states
        taps = authors.extract_context_feature(states, drafter.target_layer_ids)
        table, head = target.get_input_embeddings().weight, target.lm_head
    block = drafter.block_size
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    drafter.train()
    for _ in range(steps):
        start = int(torch.randint(6, text.shape[1] - block, ()))
        ids = torch.full((len(text), block), drafter.mask_token_id)
        ids[:, 0] = text[:, start]
        hidden = drafter(
            target_hidden=taps[:, :start],
            noise_embedding=table[ids].detach(),
            position_ids=torch.arange(start + block)[None],
        )
        loss = nn.functional.cross_entropy(
            head(hidden[:, 1:]).flatten(0, 1), text[:, start + 1 : start + block].flatten()
        )
        drafter.zero_grad()
        target.zero_grad()
        loss.backward()
        optimizer.step()
    target.zero_grad()
    return drafter.eval()


# ---- the real pair


@cache
def smollm2_oracle() -> PreTrainedModel:
    """SmolLM2 as transformers loads it from the same GGUF file, in fp32."""
    path = smollm2_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@cache
def smollm2_fp32() -> LLM:
    """The real pair in our engine, in fp32 and with a draft window as long as the authors'."""
    config = EngineConfig(
        weight_format="fp32", draft_window=0, cache_tokens=4096, max_context=2048, threads=torch.get_num_threads()
    )
    return LLM("smollm2", "smollm2-dflash", config=config)


def real_prompts(count: int) -> list[str]:
    """First turns of the public evaluation prompts, taken from each file in turn."""
    files = [path.read_text().splitlines() for path in (PROMPTS / f"{name}.jsonl" for name in sorted(PUBLIC))]
    return [json.loads(files[index % len(files)][index // len(files)])["turns"][0] for index in range(count)]


@dataclass(frozen=True)
class Difference:
    """The first token at which two texts differ, and the difference of the oracle's logits of the two tokens."""

    prompt: int
    position: int
    gap: float


@dataclass
class Comparison:
    """How many texts (and, for the loop, how many lists of step sizes) were equal."""

    of: int = 0
    same: int = 0
    tokens: int = 0
    step_sizes: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


@torch.inference_mode()
def _difference(prompt: int, ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> Difference:
    length = min(len(ours), len(theirs))
    at = next((index for index in range(length) if ours[index] != theirs[index]), length)
    if at == length:
        return Difference(prompt, at, math.inf)
    row = their_logits(smollm2_oracle(), [*ids, *theirs[:at]])[-1].double()
    return Difference(prompt, at, float(row[theirs[at]] - row[ours[at]]))


@torch.inference_mode()
def their_greedy(ids: Sequence[int], tokens: int, stop: Sequence[int]) -> list[int]:
    """The greedy text of SmolLM2 in transformers, with the stop token."""
    done = smollm2_oracle().generate(
        torch.tensor([list(ids)]), max_new_tokens=tokens, do_sample=False, eos_token_id=list(stop), pad_token_id=stop[0]
    )
    return done[0, len(ids) :].tolist()


def compare_greedy(prompts: int, tokens: int) -> Comparison:
    """Compares SmolLM2's plain greedy text in fp32: ours with that of transformers on the same file."""
    llm, result = smollm2_fp32(), Comparison()
    for index, prompt in enumerate(real_prompts(prompts)):
        ids = llm.prompt_ids(prompt, chat=True)
        ours = llm.run([llm.request(ids, max_tokens=tokens, mode="plain")])[0].token_ids
        theirs = their_greedy(ids, tokens, sorted(llm.tokenizer.eos_ids))
        result.of += 1
        result.tokens += len(ours)
        if ours == theirs:
            result.same += 1
        else:
            result.differences.append(_difference(index, ids, ours, theirs))
    return result


def compare_loop(prompts: int, tokens: int) -> Comparison:
    """Compares the real pair's whole loop in fp32: our tokens and tokens per step with the authors' generation."""
    llm, result = smollm2_fp32(), Comparison()
    drafter = drafter_from_gguf(SHIPPED_DRAFTER)
    for index, prompt in enumerate(real_prompts(prompts)):
        ids = llm.prompt_ids(prompt, chat=True)
        ours = llm.run([llm.request(ids, max_tokens=tokens, mode=str(Mode("chain")))])[0]
        theirs = their_loop(smollm2_oracle(), drafter, ids, tokens, sorted(llm.tokenizer.eos_ids))
        steps = full_block_steps(ours, tokens, drafter.block_size)
        result.of += 1
        result.tokens += len(ours.token_ids)
        result.step_sizes += steps
        if ours.token_ids == theirs.token_ids and steps == full_block_steps(theirs, tokens, drafter.block_size):
            result.same += 1
        else:
            result.differences.append(_difference(index, ids, ours.token_ids, theirs.token_ids))
    return result
