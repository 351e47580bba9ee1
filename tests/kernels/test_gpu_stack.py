"""Every family's layers as a GPU runs them, with torch's kernels on the CPU: the rows are those of the CPU's own model.

Weights are rounded to bf16 in the file, so that both compute with the same ones; what is left is the rounding of rows.
"""

# mypy: disable-error-code="arg-type, assignment, union-attr, unused-ignore"

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.cache.cpu.page_pools import PoolShape
from slipstream.cache.gpu.device_pools import GpuPools
from slipstream.cache.gpu.device_states import gpu_state_pool
from slipstream.cache.pages import PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS, EngineConfig, WeightFormat
from slipstream.engine import devices
from slipstream.engine.block_scoring import OurBlocks
from slipstream.engine.executor import RowWork
from slipstream.engine.gpu.gpu_costs import expert_bytes
from slipstream.engine.gpu.gpu_device import GpuDevice
from slipstream.engine.gpu.graphs import Graphs
from slipstream.engine.gpu.row_forward import forward_rows
from slipstream.engine.gpu.row_passes import GpuBlocks, Passes
from slipstream.engine.variants import DraftVariants
from slipstream.errors import ConfigError
from slipstream.formats.weight_files import open_weights
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.kernel_set import gpu_kernels
from slipstream.kernels.gpu.packing import KINDS
from slipstream.kernels.gpu.paged_attention import DEEPEST_ROW
from slipstream.kernels.rows import RowPlaces
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter, load_drafter, read_drafter_config
from slipstream.models.dflash_names import names_in
from slipstream.models.gpu.device_models import GpuDrafter, GpuTarget
from slipstream.models.loading import load_target
from slipstream.speculative.draft import DraftJob
from slipstream.speculative.sampling import RowSampler
from slipstream.types import SamplingParams
from tests.families import ids_of, load, open_pair, write_family_pair
from tests.family_gguf import write_family_gguf
from tests.models import test_dflash2, test_family_drafters, test_gemma4, test_laguna, test_qwen3_5, test_qwen3_moe
from tests.oracles import FOLDER_VOCAB, MASK, our_target, save_model, tiny_drafter, tiny_target
from tests.tiny import assert_idle, keep_threads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES = 4
POSITIONS = PAGES * PAGE_TOKENS + 64


def family(name: str, **changes: Any) -> PreTrainedModel:
    """A tiny target: a family and, after a colon, one of its test's variants."""
    kind, _, variant = name.partition(":")
    if kind == "gemma4":
        return test_gemma4.build(**test_gemma4.VARIANTS[variant] | changes)
    if kind == "laguna":
        return test_laguna.build(**test_laguna.VARIANTS[variant] | changes)
    if kind == "qwen3_moe":
        return test_qwen3_moe.build(**test_qwen3_moe.VARIANTS[variant])
    if kind == "qwen3_5":
        return test_qwen3_5.hybrid(variant)
    return tiny_target(kind, 4)


FAMILIES = [
    "qwen3",
    *(f"gemma4:{name}" for name in test_gemma4.VARIANTS),
    *(f"laguna:{name}" for name in test_laguna.VARIANTS),
    "qwen3_moe:plain",
    "qwen3_moe:every-second",
    "qwen3_5:dense",
    "qwen3_5:experts",
]


class _Tapped(GpuBlocks):
    """In a drafter's place: keeps the taps that would become its context."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.gpu: Any = Mock(taps=tuple(layers), context=Mock(write=self._keep))

    def _keep(self, taps: Tensor, *_: Tensor) -> None:
        self.last = taps.clone()


@dataclass
class OnDevice:
    """A target as a GPU has it, with pools of its own and a runner around it; perhaps a drafter for it."""

    model: Decoder
    passes: Passes
    variants: DraftVariants
    pools: GpuPools
    blocks: GpuBlocks | None
    tapped: _Tapped | None

    @classmethod
    def load(
        cls,
        path: Path,
        kernels: Any = "reference",
        taps: Sequence[int] = (),
        draft: Path | None = None,
        weight_format: WeightFormat = "bf16",
    ) -> OnDevice:
        backend = GpuDevice(DEVICE, EngineConfig(kernels=kernels, graphs=False))
        model = load_target(path, weight_format, None, backend.weights).model
        shape, drafter, draft_shape = model.config, None, None
        if draft is not None:
            file = open_weights(draft)
            config = read_drafter_config(draft, file)
            drafter = DFlashDrafter(config, backend.weights(file, "bf16", names_in(file)))
            draft_shape = PoolShape.alike(config.layers, config.kv_heads, config.head_dim)
        states = gpu_state_pool(4, shape.states, 0, DEVICE) if shape.states is not None else None
        pools = GpuPools(PAGES, PAGE_TOKENS, PoolShape(shape.kv_shapes, shape.states), draft_shape, DEVICE, states)
        target = GpuTarget(gpu_kernels(kernels), model, POSITIONS, DEVICE)
        passes = Passes(target, pools, PAGES, 16, Graphs(DEVICE, False))
        blocks = None
        if drafter is not None:
            gpu_drafter = GpuDrafter(gpu_kernels(kernels), drafter, model, 0, POSITIONS, DEVICE)
            blocks = GpuBlocks(passes, gpu_drafter, 0)
        tapped = _Tapped(taps) if taps else None
        return cls(model, passes, DraftVariants(tapped), pools, blocks, tapped)

    @torch.inference_mode()
    def rows(self, ids: Sequence[int], chunk: int) -> tuple[Tensor, Tensor]:
        """Logits and taps of every row of a text, `chunk` rows at a time."""
        state = SequenceState(PageTable(PAGES), PAGE_TOKENS, self.pools, self.tapped is not None)
        state.start(list(ids), [])
        logits, taps = [], []
        while state.length < len(ids):
            known = state.tokens[state.length : state.length + chunk]
            state.reserve(state.length + len(known))
            result = forward_rows(self.passes, self.variants, [RowWork(state, state.length, known, len(known))])
            logits.append(result.logits[0])
            if self.tapped is not None:
                taps.append(self.tapped.last[: len(known)])
            state.commit(range(len(known)), [], len(known) if taps else 0)
        state.release()
        return torch.cat(logits), torch.cat(taps) if taps else torch.empty(0)

    @torch.inference_mode()
    def block(self, ids: Sequence[int], taps: Tensor) -> Tensor:
        """Logits of the block after the last token of a text, whose other tokens have these taps."""
        assert self.blocks is not None
        count = taps.shape[0]
        state = SequenceState(PageTable(PAGES), PAGE_TOKENS, self.pools, drafting=True)
        state.recurrent = None
        state.start(list(ids), [])
        state.reserve(count + self.blocks.block_size)
        pages, offsets = zip(*[state.place(position) for position in range(count)], strict=True)
        self.blocks.write_context(taps.to(torch.bfloat16), RowPlaces(range(count), pages, offsets, count))
        state.commit(range(count), [], count)
        sampler = RowSampler(SamplingParams(), self.model.config.vocab_size, [], True)
        return self.blocks.logits([DraftJob(state, sampler, self.blocks.proposals, 1)])[1]


def far_apart(found: Tensor, expected: Tensor) -> Tensor:
    """How far each row is from what it should be, in parts of its own size."""
    return (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)


def decided(model: PreTrainedModel) -> PreTrainedModel:
    """With routers that hardly ever find two experts alike, which rounding would take for each other."""
    for name, weight in model.named_parameters():
        # Laguna's sigmoids would be 1 for many experts, and are far enough apart as they are
        if name.endswith(("router.proj.weight", "mlp.gate.weight")) and model.config.model_type != "laguna":
            weight.data.mul_(30)
    return model


def check_rows(name: str, found: Tensor, expected: Tensor) -> None:
    """Rounding moves all rows a little."""
    apart = far_apart(found, expected)
    assert float(apart.median()) < (0.08 if name == "gemma4:experts-tied" else 0.03)
    assert float(apart.max()) < 0.2


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_and_taps_are_the_cpus(name: str, tmp_path: Path) -> None:
    path = save_model(decided(family(name)).to(torch.bfloat16), tmp_path)
    theirs = load(path)
    taps = (-1, *range(theirs.config.layers))
    ours = OnDevice.load(path, taps=taps)
    ids = ids_of(40, 3)
    logits, residuals = ours.rows(ids, 16)
    ((expected, expected_taps),) = our_target(theirs, [ids], taps=taps)
    check_rows(name, logits, expected)
    for found, right in zip(residuals.chunk(len(taps), -1), expected_taps.chunk(len(taps), -1), strict=True):
        check_rows(name, found, right)
    # where the CPU is sure of a token, the device has the same
    sure = expected.topk(2).values.diff().abs().flatten() > 0.2 * expected.std()
    assert int(sure.sum()) > (15 if theirs.config.softcap != 2.0 else 0)  # so low a cap makes all of them alike
    alike = logits.argmax(-1)[sure] == expected.argmax(-1)[sure]
    assert bool(alike.all())


@pytest.mark.parametrize(
    ("name", "recipe"), [("gemma4:experts-tied", "q4_0"), ("laguna:per-head", "q8_0"), ("qwen3_5:dense", "q8_0")]
)
def test_quantised_files_run_as_they_are(name: str, recipe: Any, tmp_path: Path) -> None:
    path = write_family_gguf(decided(family(name)), tmp_path / "t.gguf", recipe)
    ids = ids_of(24, 3)
    ours = OnDevice.load(path, weight_format="auto")
    model: Any = ours.model
    assert all(layer.parts[0].output.planes.kind is KINDS[recipe.upper()] for layer in model.layers)
    check_rows(name, ours.rows(ids, 16)[0], our_target(load(path), [ids])[0][0])


def test_the_interpreter_runs_the_same_layers(tmp_path: Path) -> None:
    """Two layers of different heads, experts beside the MLP, and embeddings of the layers' own."""
    kinds = [test_gemma4.SLIDING, test_gemma4.FULL]
    target = test_gemma4.build(num_hidden_layers=2, layer_types=kinds, **test_gemma4.EXPERTS)
    path = save_model(target.to(torch.bfloat16), tmp_path)
    (expected, residuals), (logits, taps) = (
        OnDevice.load(path, kernels, taps=(0, 1)).rows(ids_of(3, 3), 16) for kernels in ("reference", "triton")
    )
    assert float(far_apart(logits, expected).max()) < 0.1
    assert float(far_apart(taps, residuals.float()).max()) < 0.1


def test_rows_do_not_depend_on_how_they_are_cut(tmp_path: Path) -> None:
    """A chunk of a prompt has as many rows for the matmuls as any other, so even bits must not change."""
    ours = OnDevice.load(save_model(family("gemma4:shared-keys-wide"), tmp_path), taps=(3,))
    ids = ids_of(40, 4)
    whole, pieces = ours.rows(ids, 16), ours.rows(ids, 5)
    assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11, "use_sliding_window": True}


def write_draft(kind: str, folder: Path) -> Path:
    """A drafter with a peculiarity; all its numbers are bf16's."""
    if kind.startswith("laguna"):
        tensors = test_family_drafters.laguna_tensors(per_head=kind == "laguna per head", fused=False)
        rounded = {name: one.to(torch.bfloat16) for name, one in tensors.items()}
        return test_family_drafters.write_laguna_drafter(folder, rounded)
    if kind == "convolutions":
        model: Any = test_dflash2.tiny_dflash2({}, {"num_target_layers": 4})
        return save_model(model.to(torch.bfloat16), folder)
    speculation = {"target_layer_ids": [0, 3], "mask_token_id": MASK}
    changes: dict[str, Any] = {
        "biases": {"attention_bias": True},
        "causal window": SLIDING,
        "window both ways": SLIDING | {"is_causal": False},
        "own scale": {"dflash_config": speculation | {"input_embedding_scale": 3.0}},
        "own softcap": {"dflash_config": speculation | {"final_logit_softcapping": 1.5}},
    }.get(kind, {})
    path = save_model(tiny_drafter(3, taps=(0, 3), num_target_layers=4, **changes).to(torch.bfloat16), folder)
    if kind == "few words":
        test_family_drafters.reduce_vocabulary(path, torch.arange(4, 259, 3))
    if kind == "own words":
        make = torch.Generator().manual_seed(5)
        own = {name: torch.randn(FOLDER_VOCAB, 64, generator=make) / 4 for name in ("embed_tokens", "lm_head")}
        file = path / "model.safetensors"
        save_file(load_file(file) | {f"{name}.weight": one.to(torch.bfloat16) for name, one in own.items()}, file)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "laguna per head",
        "laguna per number",
        "convolutions",
        "biases",
        "causal window",
        "window both ways",
        "own scale",
        "own softcap",
        "few words",
        "own words",
    ],
)
def test_draft_blocks_are_the_cpus(kind: str, tmp_path: Path) -> None:
    target = test_laguna.build() if kind.startswith("laguna") else test_gemma4.build(final_logit_softcapping=2.0)
    path = save_model(target.to(torch.bfloat16), tmp_path / "target")
    draft = write_draft(kind, tmp_path / "draft")
    ids = ids_of(41)
    theirs = OurBlocks("theirs", load(path), load_drafter(draft, "fp32"))
    theirs.begin(ids)
    expected = theirs.block(40)[0]
    logits = OnDevice.load(path, draft=draft).block(ids, theirs.taps[:40])
    known = expected[0].isfinite()
    assert int(known.sum()) == (85 if kind == "few words" else FOLDER_VOCAB)
    assert float(logits[:, ~known].max() if kind == "few words" else -1e30) < -1e29
    assert float(far_apart(logits[:, known], expected[:, known]).max()) < 0.05


def test_blocks_deeper_than_attention_follows_are_refused(tmp_path: Path) -> None:
    target = save_model(tiny_target("qwen3").to(torch.bfloat16), tmp_path / "target")
    deep = tiny_drafter(3, block_size=DEEPEST_ROW + 2).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="proposes 33 tokens"):
        OnDevice.load(target, draft=save_model(deep, tmp_path / "draft"))


def test_pools_of_layers_that_differ_move_together() -> None:
    pools = GpuPools(3, 4, PoolShape(((2, 16), (1, 32), (2, 16))), PoolShape.alike(2, 1, 8), DEVICE)
    assert [tuple(keys.shape) for keys, _ in pools.groups] == [(2, 4, 2, 4, 16), (1, 4, 1, 4, 32)]
    for index, (keys, values) in enumerate(pools.target):
        keys[1, :, 2], values[1, :, 2] = index + 1.0, index + 11.0
    assert [float(keys[0, 1, 0, 2, 0]) for keys, _ in pools.groups] == [1.0, 2.0]
    pools.draft_keys[:, 1], pools.draft_values[:, 1] = 5.0, 6.0
    pools.move_rows([(1, 2)], [(1, 0)])
    pools.copy_page(1, 2)
    pools.clear_rows([(1, 0)])
    for index, (keys, values) in enumerate(pools.target):
        assert torch.all(keys[2, :, 0] == index + 1.0) and torch.all(values[2, :, 0] == index + 11.0)
        assert not keys[1, :, 0].any() and not values[1, :, 0].any() and bool(keys[1, :, 2].all())
    assert torch.all(pools.draft_keys[:, 2] == 5.0) and torch.all(pools.draft_values[:, 2] == 6.0)
    pools.clear_pages([1, 2])
    assert not any(pool.any() for pair in pools.target for pool in pair) and not pools.draft_keys.any()


@pytest.mark.parametrize("name", ["qwen3_moe:plain", "gemma4:experts-tied", "qwen3"])
def test_costs_know_what_rows_read_of_the_experts(name: str, tmp_path: Path) -> None:
    model: Any = OnDevice.load(save_model(family(name), tmp_path)).model
    stored = 0
    if name != "qwen3":
        each = [layer.parts[1].routed for layer in model.layers]
        stored = sum(one.gate_up.nbytes + one.down.nbytes for one in each)
    assert expert_bytes(model, 1) == pytest.approx(stored / 2)  # three of six
    assert expert_bytes(model, 2) == pytest.approx(stored * 3 / 4)
    assert expert_bytes(model, 40) == pytest.approx(stored)


# ---- whole engines


class Oracle:
    """Stands for the drafter's block pass of one sequence at a time: knows its text, and errs from some depth on."""

    def __init__(self, text: Sequence[int], vocabulary: int) -> None:
        self._text = text
        self._vocabulary = vocabulary
        self._rng = random.Random(len(text))
        self._right = cycle((5, 0, 1, 3))

    def run(self, rows: DeviceRows, keys: Tensor, values: Tensor) -> Tensor:
        """Hidden rows that say which they are."""
        count = rows.tokens.shape[0]
        logits = self._logits = torch.zeros(count, self._vocabulary, device=DEVICE)
        right = next(self._right)
        for row in range(rows.each):
            position = int(rows.base[0]) + row  # of what a row proposes
            if row <= right and position < len(self._text):
                logits[row, self._text[position]] = 6.0
            logits[row, self._rng.randrange(self._vocabulary)] += 4.0
        return torch.arange(count, dtype=torch.bfloat16, device=DEVICE)[:, None].expand(-1, 64)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[hidden[:, 0].long()]


@pytest.mark.parametrize(
    "name", ["gemma4:shared-keys-wide", "gemma4:experts-tied", "laguna:per-head", "qwen3_moe:plain", "qwen3_5:experts"]
)
def test_speculation_on_the_device_never_changes_the_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows end inside the trees."""
    monkeypatch.setattr(devices, "gpu_device", lambda: DEVICE)
    target = family(name, **({"sliding_window": 4} if name.split(":")[0] in ("gemma4", "laguna") else {}))
    pair = write_family_pair(target.to(torch.bfloat16), tmp_path)
    with keep_threads():
        llm = open_pair(pair, "bf16", device="cuda", kernels="reference", prefill_chunk=16)
        settings = {"max_tokens": 16, "ignore_eos": True, "gate": "off", "seed": 4, "cache_prompt": False}
        prompts = [(ids_of(9, 1), 0.0), (ids_of(61, 2), 0.9)]
        plain = [
            llm.run([llm.request(ids, mode="plain", temperature=heat, **settings)])[0].token_ids
            for ids, heat in prompts
        ]
        assert [len(text) for text in plain] == [16, 16]
        accepted = []
        for mode in ("chain", "tree:16"):
            requests = [llm.request(ids, mode=mode, temperature=heat, **settings) for ids, heat in prompts]
            assert [answer.token_ids for answer in llm.run(requests)] == plain, mode
            for (ids, heat), text in zip(prompts, plain, strict=True):
                drafter, oracle = llm.engine.executor.variants.drafter.gpu, Oracle([*ids, *text], FOLDER_VOCAB)
                with patch.object(drafter, "run", oracle.run), patch.object(drafter, "logits", oracle.logits):
                    answer = llm.run([llm.request(ids, mode=mode, temperature=heat, **settings)])[0]
                assert answer.token_ids == text, mode
                accepted += [size - 1 for size in answer.step_sizes]
        assert {0, 1, 3, 5} <= set(accepted)
        assert_idle(llm)
